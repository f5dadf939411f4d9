"""The systems that hosts may have, and the Slurm of each. Pure data, and what is refused."""

from __future__ import annotations

from dalsegno.errors import TargetError
from dalsegno.setup.inspect import HostFacts
from dalsegno.slurm.versions import Version
from dalsegno.spec.facts import SshAccess

DEBIAN, RED_HAT = ("debian", "ubuntu"), ("rhel", "rocky", "almalinux", "centos", "ol", "fedora", "amzn")
OLDEST_SLURM = Version(22, 5)


RELEASES = {  # distribution and its release -> its Slurm
    ("debian", "12"): Version(22, 5, 8),
    ("debian", "13"): Version(24, 11, 5),
    ("ubuntu", "22.04"): Version(21, 8, 5),
    ("ubuntu", "24.04"): Version(23, 11, 4),
}
# Part of a cluster -> packages of the Debian family, and those of the RHEL family (EPEL has Slurm and munge)
PACKAGES = {
    "munge": (("munge",), ("munge",)),
    "client": (("slurm-client", "slurm-wlm-basic-plugins"), ("slurm",)),
    "node": (("slurmd",), ("slurm-slurmd",)),
    "controller": (("slurmctld",), ("slurm-slurmctld",)),
    "accounting": (("slurmdbd", "slurm-wlm-mysql-plugin"), ("slurm-slurmdbd",)),
    "database": (("mariadb-server",), ("mariadb-server",)),
}
OF_SLURM = ("client", "node", "controller", "accounting")


def all_packages(ssh: SshAccess) -> tuple[str, ...]:
    """Return the packages of all parts and distributions: whether a host has them is asked before anything else."""
    found = [name for families in PACKAGES.values() for names in families for name in names]
    return tuple(dict.fromkeys([*ssh.slurm_packages, *found]))


def packages_for(facts: HostFacts, kinds: tuple[str, ...], ssh: SshAccess) -> tuple[str, ...]:
    """Return the packages for the parts that a host has. Slurm packages of the cluster file replace those of the
    distribution."""
    index = 0 if facts.os_id in DEBIAN else 1
    own = [kind for kind in kinds if not (ssh.slurm_packages and kind in OF_SLURM)]
    return (*(name for kind in own for name in PACKAGES[kind][index]), *ssh.slurm_packages)


def slurm_version(facts: HostFacts, ssh: SshAccess) -> Version:
    """Return the release of Slurm on a machine: the installed one, the one in the file, or the distribution's."""
    theirs = [name for kind in OF_SLURM for names in PACKAGES[kind] for name in names]
    for name in ssh.slurm_packages or theirs:
        if facts.version_of(name):
            return Version.parse(facts.version_of(name))
    if ssh.slurm_version:
        return Version.parse(ssh.slurm_version)
    known = RELEASES.get((facts.os_id, facts.os_version))
    if known is None or ssh.slurm_packages:
        wanted = " ".join(packages_for(facts, ("munge", *OF_SLURM), ssh))
        repository = "" if facts.os_id in DEBIAN or ssh.slurm_packages else ", which EPEL has,"
        raise TargetError(
            f"{facts.host}: Slurm is not installed, and its release for {facts.os_id} {facts.os_version} is not known",
            hint=f"install {wanted}{repository} on that machine, or set `ssh.slurm_packages` and `ssh.slurm_version`",
        )
    return known


def check_system(host: str, facts: HostFacts, ssh: SshAccess) -> TargetError | None:
    """Return an error if the system of a host, or its Slurm, cannot be used."""
    if facts.os_id not in (*DEBIAN, *RED_HAT):
        return TargetError(
            f"{host}: {facts.os_id or 'its system'} {facts.os_version} is not supported",
            hint="use Debian 12 or 13, Ubuntu 24.04, or a distribution of the RHEL family",
        )
    try:
        found = slurm_version(facts, ssh)
    except TargetError as error:
        return error
    if found < OLDEST_SLURM:
        return TargetError(
            f"{host}: {facts.os_id} {facts.os_version} has Slurm {found}, and 22.05 is the oldest that works",
            hint="name packages of a later Slurm: `ssh: {slurm_packages: [...], slurm_version: 24.11.5}`",
        )
    return None
