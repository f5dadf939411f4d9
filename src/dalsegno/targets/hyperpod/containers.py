"""Set up container jobs on one instance of HyperPod. The lifecycle script runs this program on all instances.

Newer images of HyperPod have Pyxis and Enroot, and their plugstack.conf names Pyxis. Then nothing is changed. On other
images, the program adds a marked block with one line to plugstack.conf. If Pyxis is installed, that line names Pyxis.
Otherwise, the program compiles Dal Segno's plugin for the image's Slurm, and the line names this plugin.

Slurm's configless mode hands out slurmctld's plugstack.conf, but not the files that plugstack.conf includes. So the
line is in plugstack.conf itself. The line is `optional`: slurmd does not start if a required plugin is missing, and on
a new instance slurmd can run before this program.
"""

from __future__ import annotations

import glob
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dalsegno.containers.native import (
    DATA,
    HOST_FOLDER,
    PLUGIN,
    UNPACKED,
    build_native,
    header_version,
    missing_packages,
)
from dalsegno.containers.plugstack.check import AS_USER
from dalsegno.errors import DalsegnoError
from dalsegno.log import start_logging
from dalsegno.setup.machine_record import BEGIN, END, split_block, write
from dalsegno.system.files import make_folder, read_text
from dalsegno.system.processes import LocalRunner, Runner
from dalsegno.targets.cloud.node_plans import PATH
from dalsegno.targets.hyperpod.answers import SlurmRole
from dalsegno.targets.sides import COMMAND

log = logging.getLogger("containers")

PYXIS = "spank_pyxis.so"
# Program or file -> its package on Ubuntu. The image has the headers of its Slurm.
TOOLS = {
    "gcc": "gcc",
    "/usr/include/stdio.h": "libc6-dev",
    "unsquashfs": "squashfs-tools",
    "squashfuse": "squashfuse",
}
INSTALL_S = 1800.0
FETCHES = {SlurmRole.COMPUTE: 1, SlurmRole.LOGIN: 30}  # maximum number of restarts of slurmd, see `_receive`
RETRY_S = "DALSEGNO_RETRY_S"  # variable with the seconds between two attempts


@dataclass(frozen=True)
class InstancePaths:
    """The paths of Slurm's files and of our files on an instance."""

    slurm: Path = Path("/opt/slurm")
    local: Path = Path("/usr/local")  # where `make install` of Pyxis puts it
    own: Path = Path(HOST_FOLDER)
    data: Path = Path(DATA)
    unpacked: Path = Path(UNPACKED)
    received: Path = Path("/run/slurm/conf")  # Slurm's files from slurmctld, in configless mode

    @property
    def stack(self) -> Path:
        return self.slurm / "etc/plugstack.conf"

    @property
    def pyxis(self) -> tuple[Path, ...]:
        return self.slurm / "lib/slurm" / PYXIS, self.local / "lib/slurm" / PYXIS

    @property
    def link(self) -> Path:
        """The folder that plugstack.conf names. It is the same on all instances, whatever build it links to."""
        return self.own / "plugin"

    def plugin_line(self, images: str) -> str:
        """Return the line for Dal Segno's plugin.

        `resume=none` leaves the option --auto-resume to HyperPod's own plugin. AS_USER keeps the kernel from mounting
        images, because other machines, such as Studio's, may write to the shared file systems as root.
        """
        words = ["optional", f"{self.link}/{PLUGIN}", f"data={self.data}", f"cache={self.unpacked}", AS_USER]
        words += [f"import={COMMAND}", "resume=none", *([f"images={images}"] if images else [])]
        return " ".join(words)


class ContainerSetup:
    """Sets up one instance. The setup may be repeated."""

    def __init__(
        self,
        runner: Runner,
        paths: InstancePaths = InstancePaths(),
        pause: Callable[[], None] = lambda: time.sleep(float(os.environ.get(RETRY_S, "10"))),
        tools: Mapping[str, str] = TOOLS,
    ) -> None:
        self.runner, self.paths, self.pause, self.tools = runner, paths, pause, tools
        self.env = {"PATH": PATH, "SLURM_CONF": str(paths.slurm / "etc/slurm.conf")}

    def switch_on(self, role: SlurmRole, images: str = "") -> None:
        """Make `srun --container-image` work. `images` is the folder with the cluster's images."""
        line = ""
        theirs = read_stack(self.paths.stack)
        installed = [path for path in self.paths.pyxis if path.exists()]
        if any(PYXIS in each for each in theirs):
            log.info("%s has Pyxis already", self.paths.stack)
        elif installed:
            line = f"optional {installed[0]}"
        else:
            self._install_packages()
            self._build()
            line = self.paths.plugin_line(images)
        self._write(line, role)
        if line and role is not SlurmRole.CONTROLLER:
            self._receive(FETCHES[role])

    def switch_off(self, role: SlurmRole) -> None:
        """Remove our block from plugstack.conf. The image's own Pyxis stays."""
        self._write("", role)

    def _install_packages(self) -> None:
        packages = missing_packages(tools=self.tools)
        if not packages:
            return
        log.info("installing %s", ", ".join(packages))
        # While a new instance boots, Ubuntu's own updates may hold dpkg's lock.
        apt = ["apt-get", "-y", "-o", "DPkg::Lock::Timeout=600"]
        install = [*apt, "install", "--no-install-recommends", *packages]
        env = {**self.env, "DEBIAN_FRONTEND": "noninteractive"}
        if self.runner.run(install, env=env, timeout_s=INSTALL_S).exit_code != 0:  # the package lists may be old
            self.runner.run([*apt, "update"], env=env, timeout_s=INSTALL_S)
            self.runner.run(install, env=env, timeout_s=INSTALL_S).checked()

    def _build(self) -> None:
        # Slurm's commands give no version on an instance that has no slurm.conf yet.
        header = self.paths.slurm / "include/slurm/slurm_version.h"
        built = build_native(self.runner, self.paths.own, header_version(read_text(header) or ""), header)
        for folder in (self.paths.data, self.paths.unpacked):
            make_folder(folder)
        if not (self.paths.link.is_symlink() and self.paths.link.readlink() == built):
            new = self.paths.link.with_name("plugin.new")
            new.unlink(missing_ok=True)
            new.symlink_to(built)
            new.replace(self.paths.link)

    def _write(self, line: str, role: SlurmRole) -> None:
        """Write our block. If that changes the file on the controller, tell slurmctld, which hands the file out."""
        stack = self.paths.stack
        before = read_text(stack)
        after = with_line(before or "", line)
        if after == (before or ""):
            return
        about = stack.stat() if before is not None else None
        mode, owner = (about.st_mode & 0o777, (about.st_uid, about.st_gid)) if about else (0o644, (0, 0))
        write(str(stack), after.encode(), mode, owner)
        log.info("%s now has `%s`", stack, line) if line else log.info("%s has no line of ours now", stack)
        if role is SlurmRole.CONTROLLER:
            done = self.runner.run([str(self.paths.slurm / "bin/scontrol"), "reconfigure"], env=self.env, timeout_s=120)
            if done.exit_code != 0:
                log.info("slurmctld does not answer yet: it reads the file when it starts")

    def _receive(self, fetches: int) -> None:
        """Restart slurmd until its plugstack.conf from slurmctld names a container plugin, at most `fetches` times.

        slurmctld sends its files by itself only to nodes that it knows. slurmd on a login node fetches them only when
        it starts. At that time, the lifecycle script on the controller may not have written the line yet, so a login
        node needs many attempts.
        """
        while self.paths.received.exists() and not _has_plugin(self.paths.received / "plugstack.conf"):
            if not fetches:
                log.warning("slurmctld has not sent the line of the container plugin yet")
                return
            self.runner.run(["systemctl", "restart", "slurmd"], timeout_s=120)
            self.pause()
            fetches -= 1


def read_stack(path: Path, depth: int = 5) -> list[str]:
    """Return the lines of plugstack.conf and of the files that it includes, without our block."""
    found = []
    for line in split_block(read_text(path) or "")[1].splitlines():
        words = line.partition("#")[0].split()
        if words[:1] == ["include"] and depth:
            for pattern in words[1:]:
                for each in sorted(glob.glob(os.path.join(path.parent, pattern))):
                    found += read_stack(Path(each), depth - 1)
        elif words:
            found.append(" ".join(words))
    return found


def with_line(text: str, line: str) -> str:
    """Return the text of plugstack.conf with our block, or without it if `line` is empty."""
    rest = split_block(text)[1]
    if not line:
        return rest
    rest += "" if rest.endswith("\n") or not rest else "\n"
    return f"{rest}{BEGIN}\n{line}\n{END}\n"


def _has_plugin(path: Path) -> bool:
    return any(name in (read_text(path) or "") for name in (PYXIS, PLUGIN))


def main(arguments: list[str]) -> int:
    """Run `hyperpod-containers on|off ROLE [FOLDER-OF-IMAGES]` and return the exit code."""
    start_logging("containers")
    os.umask(0o022)  # users' srun loads the plugin
    switch, role, *images = arguments
    setup = ContainerSetup(LocalRunner())
    try:
        if switch == "on":
            setup.switch_on(SlurmRole(role), *images)
        else:
            setup.switch_off(SlurmRole(role))
    except DalsegnoError as error:
        log.error("%s%s", error.what, f" ({error.hint})" if error.hint else "")
        return 1
    except OSError as error:
        log.error("%s", error)
        return 1
    return 0
