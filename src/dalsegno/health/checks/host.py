"""Room on disks and in memory, processes that are stuck, and the right time."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from dalsegno.health.check import ALWAYS, QUIET, WATCHING, Check, Context
from dalsegno.health.readers.processes import Sleepers, ask_sleepers
from dalsegno.health.readers.simulated import ask_telemetry
from dalsegno.health.result import Remedy, Result, failed, passed, unknown, warned
from dalsegno.health.world import World
from dalsegno.system.apart import NoAnswer

NOBODY_KEEPS_S = 16.0  # the kernel's word for a clock that no daemon looks after
# Named one by one: a dead file server would hold whoever asks for all, and images that are mounted are always full.
_LOCAL = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "overlay", "tmpfs", "bcachefs")
DF = ("df", "--output=target,fstype,pcent,ipcent", *(word for kind in _LOCAL for word in ("-t", kind)))


# What lies in memory belongs to a job, or to whoever mounted it, but for these, which the system itself needs.
_IN_MEMORY = ("/", "/run", "/tmp", "/var", "/var/tmp", "/var/log", "/var/spool")


@dataclass(frozen=True)
class Disks:
    df: str
    spool: str  # slurmd's

    def column(self, number: int) -> list[tuple[str, int]]:
        """Mounts with a share; `-` where a file system has no inodes to count."""
        rows = [line.rsplit(None, 3) for line in self.df.splitlines()[1:] if line.strip()]
        if not rows:
            raise ValueError("df shows no file system")
        needed = [row for row in rows if row[1] != "tmpfs" or row[0] in (*_IN_MEMORY, self.spool)]
        return [(row[0], int(row[number].rstrip("%"))) for row in needed if row[number] != "-"]


@dataclass(frozen=True)
class Memory:
    meminfo: str
    promised_mib: int | None  # to Slurm's jobs


@dataclass(frozen=True)
class Clock:
    """How far from the right time; None: only whether it is kept right is known."""

    skew_s: float | None
    kept: bool = True


# Questions --------------------------------------------------------------------------------------------------------


def ask_disks(world: World) -> Disks:
    return Disks(world.run(DF).stdout, world.expected.spool)


def ask_memory(world: World) -> Memory:
    """A simulated node promises the memory of the machine that it plays."""
    simulated = ask_telemetry(world) is not None
    return Memory(world.read("/proc/meminfo"), None if simulated else world.expected.memory_mib)


def ask_clock(world: World) -> Clock:
    told = ask_telemetry(world)
    if told is not None:
        if told.clock_skew_s is None:
            raise NoAnswer("the node's telemetry tells no time")
        return Clock(told.clock_skew_s)
    if world.has("chronyc"):
        return parse_chronyc(world.run(("chronyc", "-c", "tracking")).stdout)
    return Clock(None, world.clock_error_s() < NOBODY_KEEPS_S)


def parse_chronyc(text: str) -> Clock:
    fields = text.strip().split(",")
    return Clock(float(fields[4]), fields[-1] != "Not synchronised")


def ask_nvme(world: World) -> dict[str, str]:
    devices = [name for name in world.names("/sys/class/nvme") if re.fullmatch(r"nvme\d+", name)]
    return {name: world.run(("nvme", "smart-log", "--output-format=json", f"/dev/{name}")).stdout for name in devices}


# Judges -------------------------------------------------------------------------------------------------------------


def judge_disk(disks: Disks, *, warn_percent: float = 85, fail_percent: float = 95) -> Result:
    mount, used = max(disks.column(2), key=lambda each: each[1])
    text = f"{mount} is {used} % full"
    if used >= fail_percent:
        return failed(text, Remedy.DRAIN)
    return warned(text) if used >= warn_percent else passed(f"the fullest disk, {mount}, is {used} % full")


def judge_inodes(disks: Disks, *, fail_percent: float = 95) -> Result:
    counted = disks.column(3)
    if not counted:
        return passed("no file system here runs out of inodes")
    mount, used = max(counted, key=lambda each: each[1])
    if used >= fail_percent:
        return failed(f"{mount} has used {used} % of its inodes", Remedy.DRAIN)
    return passed(f"at most {used} % of inodes are used")


def judge_memory(memory: Memory, *, warn_share: float = 0.9, fail_share: float = 0.5) -> Result:
    """What an idle node has free, beside what Slurm promises its jobs."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", memory.meminfo, re.MULTILINE)
    if not found:
        raise ValueError("no MemAvailable in /proc/meminfo")
    free_mib, promised = int(found[1]) // 1024, memory.promised_mib
    if promised is None:
        return passed(f"{free_mib} MiB of memory are available")
    text = f"{free_mib} MiB of memory are available on an idle node, and jobs are promised {promised}"
    if free_mib < fail_share * promised:
        return failed(text, Remedy.REBOOT)
    return warned(text) if free_mib < warn_share * promised else passed(f"{free_mib} MiB of memory are available")


def judge_stuck(sleepers: Sleepers, *, older_than_s: float = 300) -> Result:
    old = [one for one in sleepers.waiting if one.state == "D" and sleepers.now - one.since > older_than_s]
    if old:
        names = ", ".join(f"{one.name} ({one.pid})" for one in old[:4])
        return failed(f"stuck in the kernel for over {older_than_s:g} s: {names}", Remedy.REBOOT)
    return passed("no process is stuck in the kernel")


def judge_zombies(sleepers: Sleepers, *, older_than_s: float = 300) -> Result:
    old = [one for one in sleepers.waiting if one.state == "Z" and sleepers.now - one.since > older_than_s]
    if old:
        return warned(f"{len(old)} zombie processes for over {older_than_s:g} s, the first: {old[0].name}")
    return passed("no zombie processes")


def judge_clock(clock: Clock, *, warn_s: float = 0.5, fail_s: float = 5) -> Result:
    """Munge refuses what is minutes off; logs and leases are wrong long before."""
    if clock.skew_s is None:
        return passed("the clock is kept right") if clock.kept else warned("nobody keeps the clock right")
    text = f"the clock is {abs(clock.skew_s):.3g} s off"
    if abs(clock.skew_s) >= fail_s:
        return failed(text, Remedy.DRAIN)
    return warned(text) if abs(clock.skew_s) >= warn_s or not clock.kept else passed(text)


def judge_nvme(logs: dict[str, str]) -> Result:
    if not logs:
        return unknown("no disk answers")
    warnings = {name: int(json.loads(log)["critical_warning"]) for name, log in logs.items()}
    if bad := [f"{name} (0x{warning:02x})" for name, warning in warnings.items() if warning]:
        return failed(f"critical warning of {', '.join(bad)}", Remedy.REPLACE)
    return passed(f"no warning of {len(warnings)} disks")


BESIDE_PROLOG = ALWAYS - {Context.PROLOG}

HOST_CHECKS = (
    Check("disk", "room on local disks", ask_disks, judge_disk, every_s=10, settle_s=5),
    Check("inodes", "room for more files", ask_disks, judge_inodes, every_s=10, settle_s=5),
    Check("memory", "memory for what Slurm promises", ask_memory, judge_memory, QUIET, 60),
    Check("stuck", "processes that hang in the kernel", ask_sleepers, judge_stuck, WATCHING, 30),
    Check("zombies", "processes that nobody buries", ask_sleepers, judge_zombies, WATCHING, 30),
    Check("clock", "the right time", ask_clock, judge_clock, every_s=5, settle_s=5),
    Check(
        "nvme", "what disks say of themselves", ask_nvme, judge_nvme, QUIET, 300,
        applies=lambda world: world.has("nvme") and bool(world.names("/sys/class/nvme")),
    ),
)  # fmt: skip
