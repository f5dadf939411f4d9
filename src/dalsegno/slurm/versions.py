"""Differences between Slurm releases that matter to renderers, parsers and targets.

The differences are taken from Slurm's sources and release notes from 22.05 to 26.05. Parsers accept the output formats
of all releases without knowing the version, unless two formats could be confused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from dalsegno.errors import DalsegnoError

_NUMBER = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?")


class Version(NamedTuple):
    """A Slurm version. Versions can be compared: `Version(22, 5, 8) < Version(23, 2)`."""

    major: int
    minor: int
    patch: int = 0

    @classmethod
    def parse(cls, text: str) -> Version:
        """Return the version in a command's output, such as `slurm-wlm 22.05.8` or `24.11.0-0rc1`."""
        found = _NUMBER.search(text)
        if found is None:
            raise DalsegnoError(f"no Slurm version in {text.strip()[:80]!r}", hint="`sinfo --version` shows it")
        return cls(int(found[1]), int(found[2]), int(found[3] or 0))

    @property
    def release(self) -> str:
        """The release without the patch number: `24.11`."""
        return f"{self.major}.{self.minor:02d}"

    def __str__(self) -> str:
        return f"{self.major}.{self.minor:02d}.{self.patch}"


_FIRST = Version(0, 0)


@dataclass(frozen=True)
class Difference:
    """A feature or behaviour that exists from one release up to, but not including, another."""

    since: Version = _FIRST
    until: Version | None = None
    instead: str = ""  # the setting to use in other releases

    def holds(self, slurm: Version) -> bool:
        return self.since <= slurm and (self.until is None or slurm < self.until)


def _since(major: int, minor: int, instead: str = "") -> Difference:
    return Difference(since=Version(major, minor), instead=instead)


def _until(major: int, minor: int, instead: str = "") -> Difference:
    return Difference(until=Version(major, minor), instead=instead)


# Differences in slurm.conf
STORE_FLAGS = _since(21, 8)  # AccountingStoreFlags=job_comment; older releases have AccountingStoreJobComment
# In these releases, slurmctld looks up srun's host only among the nodes. For any other host it connects to 0.0.0.0.
CALLS_ONLY_NODES = Difference(Version(22, 5, 7), Version(22, 5, 9))

# Differences in cgroup.conf
CGROUP_PLUGIN = _since(21, 8)
CGROUP_DISABLED = _since(24, 5)  # CgroupPlugin=disabled is supported
CGROUP_AUTOMOUNT = _until(23, 11)  # the setting is an error since 23.11
IGNORE_SYSTEMD = _since(22, 5)
ENABLE_CONTROLLERS = _since(23, 2)

# slurmctld exits if its state folder has a cluster name but no assoc_usage. slurmctld first writes assoc_usage after
# five minutes or at a clean shutdown. With `-i`, it starts without the file.
NEEDS_ASSOC_USAGE = _since(25, 5)

# Since 25.11, the name `nobody` means no user, so the uid is written. Older releases of slurmdbd compare names, so they
# need the name.
NOBODY_IS_NO_USER = _since(25, 11)
NOBODY_UID = 65534

# The part of slurmrestd's API that needs no slurmdbd, by release, the newest release first
REST_API = (
    (_since(23, 11), "slurmctld"),
    (_since(23, 2), "v0.0.39"),
    (_since(22, 5), "v0.0.38"),
    (Difference(), "v0.0.37"),
)

# Settings in slurm.conf that some release refuses as unknown. Obsolete settings that are merely ignored are not listed.
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
    """Return a user's name for Slurm's files and options. Where the name `nobody` means no user, return its uid."""
    return str(NOBODY_UID) if name == "nobody" and NOBODY_IS_NO_USER.holds(slurm) else name


def rest_api(slurm: Version) -> str:
    """Return slurmrestd's name for the part of its API that needs no slurmdbd."""
    return next(name for difference, name in REST_API if difference.holds(slurm))


def check_settings(names: Iterable[str], slurm: Version) -> None:
    """Raise an error for settings in slurm.conf that this release does not support and that would make a daemon
    exit."""
    for name in names:
        difference = _SETTINGS.get(name.lower())
        if difference is None or difference.holds(slurm):
            continue
        when = f"before {difference.since.release}" if slurm < difference.since else f"since {_end(difference)}"
        hint = f"use: {difference.instead}" if difference.instead else "leave it out of `slurm: {extra: …}`"
        raise DalsegnoError(f"Slurm {slurm} does not support the setting `{name}`: no release {when} does", hint=hint)


def _end(difference: Difference) -> str:
    return difference.until.release if difference.until else ""
