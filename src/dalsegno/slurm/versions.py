"""What Slurm's releases differ in, as far as we write or read it. Renderers, parsers and targets ask this table.

Taken from Slurm's sources and release notes from 22.05 to 26.05. Answers of Slurm are read in every spelling they have
had, without asking for the version, wherever the spellings cannot be confused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from dalsegno.errors import DalsegnoError

# ---- Which Slurm is running: settings and formats follow it.


_NUMBER = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?")


class Version(NamedTuple):
    """A Slurm release, ordered: `Version(22, 5, 8) < Version(23, 2)`."""

    major: int
    minor: int
    patch: int = 0

    @classmethod
    def parse(cls, text: str) -> Version:
        """The version in whatever a Slurm command says: `slurm-wlm 22.05.8`, `24.11.0-0rc1`."""
        found = _NUMBER.search(text)
        if found is None:
            raise DalsegnoError(f"no Slurm version in {text.strip()[:80]!r}", hint="`sinfo --version` says it")
        return cls(int(found[1]), int(found[2]), int(found[3] or 0))

    @property
    def release(self) -> str:
        """Return the release without its patches: `24.11`."""
        return f"{self.major}.{self.minor:02d}"

    def __str__(self) -> str:
        return f"{self.major}.{self.minor:02d}.{self.patch}"


# ---- What Slurm's releases differ in, as far as we write or read it. Renderers, parsers and targets ask this
# table.


_FIRST = Version(0, 0)


@dataclass(frozen=True)
class Difference:
    """Something that holds from one release on, up to but without another."""

    since: Version = _FIRST
    until: Version | None = None
    instead: str = ""  # what to use in releases that do not have it

    def holds(self, slurm: Version) -> bool:
        return self.since <= slurm and (self.until is None or slurm < self.until)


def _since(major: int, minor: int, instead: str = "") -> Difference:
    return Difference(since=Version(major, minor), instead=instead)


def _until(major: int, minor: int, instead: str = "") -> Difference:
    return Difference(until=Version(major, minor), instead=instead)


# slurm.conf
STORE_FLAGS = _since(21, 8)  # AccountingStoreFlags=job_comment; AccountingStoreJobComment before
# slurmctld looks for the host of an srun among the nodes only, and calls 0.0.0.0 if it is none (fixed in 22.05.9).
CALLS_ONLY_NODES = Difference(Version(22, 5, 7), Version(22, 5, 9))

# cgroup.conf
CGROUP_PLUGIN = _since(21, 8)
CGROUP_DISABLED = _since(24, 5)  # CgroupPlugin=disabled
CGROUP_AUTOMOUNT = _until(23, 11)  # an error in later ones
IGNORE_SYSTEMD = _since(22, 5)
ENABLE_CONTROLLERS = _since(23, 2)

# slurmctld
# Fatal: a state folder that has a cluster name but no assoc_usage, which is first written after five minutes or at an
# orderly end. `-i` starts slurmctld all the same.
NEEDS_ASSOC_USAGE = _since(25, 5)

# The name `nobody` means that there is no user. Before, slurmdbd compares names, so that the number does not serve.
NOBODY_IS_NO_USER = _since(25, 11)
NOBODY_UID = 65534

# slurmrestd: the part of the API that needs no slurmdbd, the newest release first.
REST_API = (
    (_since(23, 11), "slurmctld"),
    (_since(23, 2), "v0.0.39"),
    (_since(22, 5), "v0.0.38"),
    (Difference(), "v0.0.37"),
)

# Settings of slurm.conf that some release refuses as unknown. Defunct ones that are merely ignored are not listed.
SETTINGS = {
    "AccountingStorageLoc": _until(25, 11, "the database's name is StorageLoc of slurmdbd.conf"),
    "CertgenParameters": _since(25, 5),
    "CertgenType": _since(25, 5),
    "CertmgrParameters": _since(24, 11),
    "CertmgrType": _since(24, 11),
    "CliFilterParameters": _since(25, 11),
    "DataParserParameters": _since(24, 11),
    "EpilogTimeout": _since(25, 5, "PrologEpilogTimeout"),
    "FrontendName": _until(25, 5),
    "HashPlugin": _since(24, 5),
    "HealthCheckTimeout": _since(26, 5),
    "HttpParserType": _since(25, 11),
    "JobCompPassScript": _since(25, 11),
    "LicenseParameters": _since(26, 5),
    "MaxBatchRequeue": _since(23, 2),
    "MetricsAuthUsers": _since(26, 5),
    "MetricsParameters": _since(26, 5),
    "MetricsType": _since(25, 11),
    "NamespaceType": _since(25, 11, "JobContainerType"),
    "PowerAction": _since(26, 5),
    "PreemptParameters": _since(23, 2),
    "PrologTimeout": _since(25, 5, "PrologEpilogTimeout"),
    "SchedulerAuth": _until(24, 5),
    "SlurmctldHttpAuthParameters": _since(26, 5),
    "SlurmctldPlugstack": _until(23, 2),
    "SlurmdHttpAuthParameters": _since(26, 5),
    "SuspendExcStates": _since(23, 2),
    "TLSParameters": _since(24, 5),
    "TLSType": _since(24, 5),
    "UrlParserType": _since(25, 11),
}
_SETTINGS = {name.lower(): difference for name, difference in SETTINGS.items()}


def user_word(name: str, slurm: Version) -> str:
    """Return what to call a user in Slurm's files and options."""
    return str(NOBODY_UID) if name == "nobody" and NOBODY_IS_NO_USER.holds(slurm) else name


def rest_api(slurm: Version) -> str:
    """Return what slurmrestd calls the part of its API that needs no slurmdbd."""
    return next(name for difference, name in REST_API if difference.holds(slurm))


def check_settings(names: Iterable[str], slurm: Version) -> None:
    """Refuse settings of slurm.conf that this release does not know, before a daemon dies of one."""
    for name in names:
        difference = _SETTINGS.get(name.lower())
        if difference is None or difference.holds(slurm):
            continue
        when = f"before {difference.since.release}" if slurm < difference.since else f"since {_end(difference)}"
        hint = f"use: {difference.instead}" if difference.instead else "leave it out of `slurm: {extra: …}`"
        raise DalsegnoError(f"Slurm {slurm} does not know the setting `{name}`: no release {when} does", hint=hint)


def _end(difference: Difference) -> str:
    return difference.until.release if difference.until else ""
