"""Facts about this machine."""

from __future__ import annotations

import os
import platform
import re
import shutil
import socket
from dataclasses import dataclass, field

from dalsegno.system.cgroups import CgroupTree, read_cgroups
from dalsegno.system.processes import Runner

DAEMONS = {
    "slurmctld": "slurmctld", "slurmd": "slurmd", "sinfo": "slurm-client", "munged": "munge",
    "slurmdbd": "slurmdbd", "mariadbd": "mariadb-server", "mariadb-install-db": "mariadb-server",
    "slurmrestd": "slurmrestd", "ip": "iproute2", "nsenter": "util-linux",
    "prometheus": "prometheus", "prometheus-alertmanager": "prometheus-alertmanager",
    "prometheus-node-exporter": "prometheus-node-exporter", "slapd": "slapd", "openssl": "openssl",
}  # fmt: skip
UNSHARE = ("--mount", "--net", "--uts", "--ipc", "--pid", "--fork", "--mount-proc")
SEARCH = (*os.environ.get("PATH", os.defpath).split(os.pathsep), "/usr/local/sbin", "/usr/sbin", "/sbin")


@dataclass(frozen=True)
class MachineFacts:
    """The facts that the local target needs."""

    system: str  # such as "Linux"
    hostname: str
    user: str
    is_root: bool
    slurm_version: str  # such as "slurm-wlm 22.05.8"; "" if Slurm is missing
    namespaces: bool  # whether this user can create virtual hosts: root, if the kernel permits namespaces
    gpu_files: tuple[str, ...]  # device files of real GPUs
    cgroups: CgroupTree = field(default_factory=CgroupTree)
    cores: int = 1


def program(name: str) -> str | None:
    """Return the path of a program; None if it is missing. Folders that only root has on its PATH are searched too."""
    return shutil.which(name, path=os.pathsep.join(SEARCH))


def missing_packages(programs: tuple[str, ...]) -> list[str]:
    """Return the distribution's packages for programs that are missing."""
    return sorted({DAEMONS[name] for name in programs if program(name) is None})


def user_name() -> str:
    """Return the name of this process's user. It is found by uid, because `sudo` and `su` may leave $USER unchanged."""
    import pwd  # imported here, because Windows does not have this module

    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def collect_facts(runner: Runner) -> MachineFacts:
    """Collect the facts, which takes a few milliseconds."""
    is_root = os.geteuid() == 0
    slurmctld = program("slurmctld")
    return MachineFacts(
        system=platform.system(),
        hostname=socket.gethostname().split(".")[0],
        user=user_name(),
        is_root=is_root,
        slurm_version=runner.run([slurmctld, "-V"]).checked().stdout.strip() if slurmctld else "",
        namespaces=is_root and may_make_namespaces(runner),
        gpu_files=gpu_files(os.listdir("/dev")),
        cgroups=read_cgroups() if platform.system() == "Linux" else CgroupTree(),
        cores=os.cpu_count() or 1,
    )


def may_make_namespaces(runner: Runner) -> bool:
    """Return whether this user may create namespaces. In a container, even root often may not."""
    unshare = program("unshare")
    if unshare is None:
        return False
    return runner.run([unshare, *UNSHARE, "true"], timeout_s=60).exit_code == 0


def gpu_files(names: list[str]) -> tuple[str, ...]:
    """Return the device files of NVIDIA GPUs among the names in /dev, in order."""
    numbers = sorted(int(found[1]) for name in names if (found := re.fullmatch(r"nvidia(\d+)", name)))
    return tuple(f"/dev/nvidia{number}" for number in numbers)
