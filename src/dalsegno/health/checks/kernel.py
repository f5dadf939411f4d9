"""What the kernel complains of, beside Xids: known signs of broken hardware, and memory that ran out."""

from __future__ import annotations

import re
from typing import NamedTuple

from dalsegno.health.check import Check
from dalsegno.health.readers.kernel_log import KernelSaid, ask_kernel_log
from dalsegno.health.result import Remedy, Result, failed, passed, warned

CRITICAL = 2  # syslog's levels: lines at least so bad are worth a look, unless they are allowed


class Sign(NamedTuple):
    name: str
    words: re.Pattern[str]
    remedy: Remedy


def _sign(name: str, words: str, remedy: Remedy) -> Sign:
    return Sign(name, re.compile(words), remedy)


SIGNS = (
    _sign("machine-check", r"Machine Check Exception|\[Hardware Error\]: event severity: fatal", Remedy.REPLACE),
    _sign("memory", r"Uncorrected hardware memory error|\[Hardware Error\].*Uncorrected", Remedy.REPLACE),
    _sign("lockup", r"hard LOCKUP", Remedy.REBOOT),
    _sign("file-system", r"EXT4-fs error|XFS .*(Corruption|Shutting down)|Remounting .* read-only", Remedy.REBOOT),
    _sign("pcie", r"AER: .*(Uncorrected \(Fatal\)|Fatal error)", Remedy.REBOOT),
    _sign("driver", r"NVRM: .*RmInitAdapter failed|NVRM: GPU .* is lost", Remedy.REBOOT),
    _sign("disk", r"I/O error, dev (nvme|sd|vd)\w+|nvme\w*: .*controller is down", Remedy.DRAIN),
    # Both come of a slow file server or a busy neighbour too; `stuck` knows which processes never went on.
    _sign("hung-task", r"blocked for more than \d+ seconds", Remedy.WATCH),
    _sign("soft-lockup", r"soft lockup", Remedy.WATCH),
)
ALLOWED = (
    re.compile(r"thermal|throttl", re.IGNORECASE),  # a check of its own
    re.compile(r"NVRM: Xid"),  # another
    re.compile(r"Out of memory|oom-kill|Killed process"),  # another
    re.compile(r"systemd|watchdog: .*nmi", re.IGNORECASE),
)
_OOM = re.compile(r"^(?:\[.*?\] )?(Out of memory|Memory cgroup out of memory): Killed process (\d+) \(([^)]*)\)")
OURS = (
    "slurmd", "slurmstepd", "munged", "systemd", "dalsegno", "chronyd", "sshd", "nv-fabricmanager",
    "nv-hostengine", "dbus-daemon",
)  # fmt: skip


def judge_kernel_log(said: KernelSaid, *, window_s: float = 3600) -> Result:
    recent = [line for line in said.lines if line.at > said.now - window_s]
    for sign in SIGNS:
        if line := next((line for line in reversed(recent) if sign.words.search(line.text)), None):
            watch = sign.remedy is Remedy.WATCH
            return warned(line.text, sign.name) if watch else failed(line.text, sign.remedy, sign.name)
    strange = [line for line in recent if line.level <= CRITICAL and not _is_allowed(line.text)]
    if strange:
        return warned(f"{len(strange)} critical lines, the last: {strange[-1].text}", "critical")
    return passed("no sign of broken hardware in the kernel's log")


def _is_allowed(text: str) -> bool:
    return any(words.search(text) for words in ALLOWED)


def judge_oom(said: KernelSaid, *, window_s: float = 3600) -> Result:
    """A job that outgrows its own limit is its user's affair; a node that runs out is not."""
    kills = [found for line in said.lines if line.at > said.now - window_s and (found := _OOM.search(line.text))]
    if ours := [kill for kill in kills if kill[3].startswith(OURS)]:
        return failed(f"memory ran out and the kernel killed {ours[-1][3]}", Remedy.REBOOT, ours[-1][3])
    whole = [kill for kill in kills if kill[1] == "Out of memory"]
    if whole:
        times = f"{len(whole)} times" if len(whole) > 1 else "once"
        return warned(f"memory ran out {times}; the last to be killed was {whole[-1][3]} ({whole[-1][2]})")
    return passed("memory has not run out")


KERNEL_CHECKS = (
    Check("kernel-log", "signs of broken hardware", ask_kernel_log, judge_kernel_log, every_s=1, lasts=False),
    Check("oom", "memory that ran out", ask_kernel_log, judge_oom, every_s=1, lasts=False),
)
