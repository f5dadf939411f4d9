"""The operating systems that hosts may have, and the release of Slurm on each. Pure."""

from __future__ import annotations

import re

from dalsegno.errors import DalsegnoError, TargetError
from dalsegno.setup.inspect import HostFacts
from dalsegno.slurm.versions import Version
from dalsegno.spec.facts import Cluster, SshAccess

DEBIAN, RED_HAT = ("debian", "ubuntu"), ("rhel", "rocky", "almalinux", "centos", "ol", "fedora", "amzn")
OLDEST_SLURM = Version(22, 5)


RELEASES = {  # distribution and its release -> its Slurm
    ("debian", "12"): Version(22, 5, 8),
    ("debian", "13"): Version(24, 11, 5),
    ("ubuntu", "22.04"): Version(21, 8, 5),
    ("ubuntu", "24.04"): Version(23, 11, 4),
}
# Maps a part of a cluster to its packages on the Debian family and on the RHEL family (EPEL has Slurm and munge).
PACKAGES = {
    "munge": (("munge",), ("munge",)),
    "client": (("slurm-client", "slurm-wlm-basic-plugins"), ("slurm",)),
    "node": (("slurmd",), ("slurm-slurmd",)),
    "controller": (("slurmctld",), ("slurm-slurmctld",)),
    "accounting": (("slurmdbd", "slurm-wlm-mysql-plugin"), ("slurm-slurmdbd",)),
    "database": (("mariadb-server",), ("mariadb-server",)),
}
OF_SLURM = ("client", "node", "controller", "accounting")
# Names of packages, with any prefix, whose version is the release of Slurm. `ssh.slurm_packages` may also list other
# packages, such as munge.
_SLURM_NAME = re.compile(r"(.*-)?(slurm(d|ctld|dbd|restd)?|slurm-(smd|wlm|client|devel|libs).*|libslurm.*)")
_FILE_VERSION = re.compile(r"_.*|-\d.*|\.(deb|rpm)")


def all_packages(ssh: SshAccess) -> tuple[str, ...]:
    """Return the packages of all parts and distributions. Each host is first asked which of these packages it has."""
    found = [name for families in PACKAGES.values() for names in families for name in names]
    return tuple(dict.fromkeys([*ssh.slurm_packages, *found]))


def packages_for(facts: HostFacts, kinds: tuple[str, ...], ssh: SshAccess) -> tuple[str, ...]:
    """Return the packages for the parts of a host. Slurm packages named in the cluster file replace the
    distribution's."""
    index = 0 if facts.os_id in DEBIAN else 1
    own = [kind for kind in kinds if not (ssh.slurm_packages and kind in OF_SLURM)]
    return (*(name for kind in own for name in PACKAGES[kind][index]), *ssh.slurm_packages)


def slurm_version(facts: HostFacts, ssh: SshAccess) -> Version:
    """Return the release of Slurm on a machine. The first of these decides:

    1. a version in the name of a package in the cluster file, as in `slurmd=24.11.5-1`
    2. the installed package
    3. `slurm_version` in the cluster file
    4. a package file on the machine, or the package that dnf would install
    5. the distribution
    """
    theirs = [name for kind in OF_SLURM for names in PACKAGES[kind] for name in names]
    names = [name for name in ssh.slurm_packages or theirs if _is_of_slurm(name)]
    if pinned := next((name.partition("=")[2] for name in names if "=" in name), ""):
        return Version.parse(pinned)
    for name in names:
        if facts.version_of(name):
            return Version.parse(facts.version_of(name))
    if ssh.slurm_version:
        return Version.parse(ssh.slurm_version)
    if found := next((version for name, version in facts.available if name in names), ""):
        return Version.parse(found)
    known = RELEASES.get((facts.os_id, facts.os_version))
    if known is None or ssh.slurm_packages:
        wanted = " ".join(packages_for(facts, ("munge", *OF_SLURM), ssh))
        raise TargetError(
            f"{facts.host}: Slurm is not installed, and its release for {facts.os_id} {facts.os_version} is not known",
            hint=f"install {wanted} on that machine, or set `ssh.slurm_packages` and `ssh.slurm_version`",
        )
    return known


def _is_of_slurm(package: str) -> bool:
    folder, _, file = package.rpartition("/")
    name = _FILE_VERSION.sub("", file, count=1) if folder else file.partition("=")[0]
    return bool(_SLURM_NAME.fullmatch(name))


def check_system(host: str, facts: HostFacts, ssh: SshAccess, kinds: tuple[str, ...]) -> TargetError | None:
    """Return an error if the system of a host, or its Slurm, cannot be used. `kinds` are the parts that the host
    gets."""
    if facts.os_id not in (*DEBIAN, *RED_HAT):
        return TargetError(
            f"{host}: {facts.os_id or 'its system'} {facts.os_version} is not supported",
            hint="use Debian 12 or 13, Ubuntu 24.04, or a distribution of the RHEL family",
        )
    if facts.os_id in RED_HAT and (missing := _missing_packages(facts, ssh, kinds)):
        return TargetError(
            f"{host}: {facts.os_id} {facts.os_version} has no package {', '.join(missing)}",
            hint="EPEL has Slurm and munge: enable it there with `dnf install epel-release`, and the repository crb; "
            "or name packages of another repository with `ssh.slurm_packages`",
        )
    files = [name for name in ssh.slurm_packages if name.startswith("/")]
    if untrusted := [path for path in files if path in facts.untrusted]:
        return TargetError(
            f"{host}: users can change {', '.join(untrusted)}, or a folder above",
            hint="copy the files on every host, as root, into a folder that only root can change",
        )
    if absent := [path for path in files if path not in dict(facts.available)]:
        return TargetError(
            f"{host}: {', '.join(absent)} is not a package there",
            hint="`ssh.slurm_packages` takes paths on the hosts: copy the files to this path on every host, as root",
        )
    try:
        found = slurm_version(facts, ssh)
    except TargetError as error:
        return error
    except DalsegnoError as error:
        hint = "name the version with numbers in `ssh: slurm_packages:`, as in `slurmd=24.11.5-1`"
        return TargetError(f"{host}: {error.what}", hint=hint)
    if found < OLDEST_SLURM:
        return TargetError(
            f"{host}: {facts.os_id} {facts.os_version} has Slurm {found}, and 22.05 is the oldest that works",
            hint="name packages of a later Slurm: `ssh: {slurm_packages: [...], slurm_version: 24.11.5}`",
        )
    return None


def _missing_packages(facts: HostFacts, ssh: SshAccess, kinds: tuple[str, ...]) -> list[str]:
    """Return the packages that are neither installed nor in a repository of the machine.

    Packages that the cluster file names are left to dnf, because their names may contain versions.
    """
    known = {name for name, _ in (*facts.packages, *facts.available)} | set(ssh.slurm_packages)
    return [name for name in packages_for(facts, kinds, ssh) if name not in known]


def kinds_of(cluster: Cluster, host: str) -> tuple[str, ...]:
    """Return the parts that a host gets."""
    if host == cluster.head:
        accounting = ("accounting", "database") if cluster.slurm.accounting else ()
        return ("munge", "client", "controller", *accounting)
    return ("munge", "client", "node") if any(node.name == host for node in cluster.nodes) else ("munge", "client")
