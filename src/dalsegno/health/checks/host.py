"""Checks of the host: disks, memory, stuck processes, the clock, the kernel log and the network."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import NamedTuple

from dalsegno.health.check import ALWAYS, QUIET, WATCHING, Check, Context
from dalsegno.health.node_reader import NodeReader
from dalsegno.health.readers.gpus import ask_telemetry
from dalsegno.health.readers.host import (
    BlockedProcesses,
    KernelLines,
    Ports,
    TcpTraffic,
    ask_kernel_log,
    ask_ports,
    ask_sleepers,
    ask_traffic,
    has_ports,
)
from dalsegno.health.result import Remedy, Result, failed, passed, unknown, warned
from dalsegno.system.hanging_calls import NoAnswer

UNSYNCHRONIZED_S = 16.0  # the clock error that the kernel reports if no daemon synchronizes the clock
# Only these types are queried: df would hang on a dead file server, and mounted images are always full.
_LOCAL = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "overlay", "tmpfs", "bcachefs")
DF = ("df", "--output=target,fstype,pcent,ipcent", *(word for kind in _LOCAL for word in ("-t", kind)))


# tmpfs mounts that the operating system itself needs. Other tmpfs mounts belong to jobs or users.
_IN_MEMORY = ("/", "/run", "/tmp", "/var", "/var/tmp", "/var/log", "/var/spool")


@dataclass(frozen=True)
class Disks:
    df: str
    spool: str  # slurmd's spool folder

    def column(self, number: int) -> list[tuple[str, int]]:
        """Return each mount with the percentage in this column.

        File systems without a percentage are left out, and so are tmpfs mounts of jobs or users.
        """
        rows = [line.rsplit(None, 3) for line in self.df.splitlines()[1:] if line.strip()]
        if not rows:
            raise ValueError("df lists no file system")
        needed = [row for row in rows if row[1] != "tmpfs" or row[0] in (*_IN_MEMORY, self.spool)]
        return [(row[0], int(row[number].rstrip("%"))) for row in needed if row[number] != "-"]


@dataclass(frozen=True)
class MemoryUse:
    meminfo: str
    promised_mib: int | None  # the memory that Slurm promises to jobs


@dataclass(frozen=True)
class ClockOffset:
    """The offset from the right time, and whether the clock is synchronized. `skew_s` is None if the offset is
    unknown."""

    skew_s: float | None
    kept: bool = True


# Functions that read facts from the node


def ask_disks(node: NodeReader) -> Disks:
    return Disks(node.run(DF).stdout, node.expected.spool)


def ask_memory(node: NodeReader) -> MemoryUse:
    """Return the memory use. On a simulated node, no size is expected: the machine under it may have less memory."""
    simulated = ask_telemetry(node) is not None
    return MemoryUse(node.read("/proc/meminfo"), None if simulated else node.expected.memory_mib)


def ask_clock(node: NodeReader) -> ClockOffset:
    telemetry = ask_telemetry(node)
    if telemetry is not None:
        if telemetry.clock_skew_s is None:
            raise NoAnswer("the node's telemetry has no clock offset")
        return ClockOffset(telemetry.clock_skew_s)
    if node.has("chronyc"):
        return parse_chronyc(node.run(("chronyc", "-c", "tracking")).stdout)
    return ClockOffset(None, node.clock_error_s() < UNSYNCHRONIZED_S)


def parse_chronyc(text: str) -> ClockOffset:
    fields = text.strip().split(",")
    return ClockOffset(float(fields[4]), fields[-1] != "Not synchronised")


def ask_nvme(node: NodeReader) -> dict[str, str]:
    devices = [name for name in node.names("/sys/class/nvme") if re.fullmatch(r"nvme\d+", name)]
    return {name: node.run(("nvme", "smart-log", "--output-format=json", f"/dev/{name}")).stdout for name in devices}


# Functions that judge these facts


def judge_disk(disks: Disks, *, warn_percent: float = 85, fail_percent: float = 95) -> Result:
    mount, used = max(disks.column(2), key=lambda each: each[1])
    text = f"{mount} is {used} % full"
    if used >= fail_percent:
        return failed(text, Remedy.DRAIN)
    return warned(text) if used >= warn_percent else passed(f"the fullest disk, {mount}, is {used} % full")


def judge_inodes(disks: Disks, *, fail_percent: float = 95) -> Result:
    counted = disks.column(3)
    if not counted:
        return passed("no file system here has a limit on inodes")
    mount, used = max(counted, key=lambda each: each[1])
    if used >= fail_percent:
        return failed(f"{mount} has used {used} % of its inodes", Remedy.DRAIN)
    return passed(f"at most {used} % of inodes are used")


def judge_memory(memory: MemoryUse, *, warn_share: float = 0.9, fail_share: float = 0.5) -> Result:
    """Judge the memory that an idle node has available, compared with what Slurm promises its jobs."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", memory.meminfo, re.MULTILINE)
    if not found:
        raise ValueError("no MemAvailable in /proc/meminfo")
    free_mib, promised = int(found[1]) // 1024, memory.promised_mib
    if promised is None:
        return passed(f"{free_mib} MiB of memory are available")
    text = f"{free_mib} MiB of memory are available on the idle node, but Slurm promises jobs {promised} MiB"
    if free_mib < fail_share * promised:
        return failed(text, Remedy.REBOOT)
    return warned(text) if free_mib < warn_share * promised else passed(f"{free_mib} MiB of memory are available")


def judge_stuck(sleepers: BlockedProcesses, *, older_than_s: float = 300) -> Result:
    old = [one for one in sleepers.waiting if one.state == "D" and sleepers.now - one.since > older_than_s]
    if old:
        names = ", ".join(f"{one.name} ({one.pid})" for one in old[:4])
        return failed(f"stuck in the kernel for over {older_than_s:g} s: {names}", Remedy.REBOOT)
    return passed("no process is stuck in the kernel")


def judge_zombies(sleepers: BlockedProcesses, *, older_than_s: float = 300) -> Result:
    old = [one for one in sleepers.waiting if one.state == "Z" and sleepers.now - one.since > older_than_s]
    if old:
        return warned(f"{len(old)} zombie processes for over {older_than_s:g} s, the first: {old[0].name}")
    return passed("no zombie processes")


def judge_clock(clock: ClockOffset, *, warn_s: float = 0.5, fail_s: float = 5) -> Result:
    """Judge the clock. Munge fails only at an offset of minutes, but much smaller offsets already make logs and leases
    wrong."""
    if clock.skew_s is None:
        return passed("the clock is synchronized") if clock.kept else warned("the clock is not synchronized")
    text = f"the clock is {abs(clock.skew_s):.3g} s off"
    if abs(clock.skew_s) >= fail_s:
        return failed(text, Remedy.DRAIN)
    return warned(text) if abs(clock.skew_s) >= warn_s or not clock.kept else passed(text)


def judge_nvme(logs: dict[str, str]) -> Result:
    if not logs:
        return unknown("no disk could be queried")
    warnings = {name: int(json.loads(log)["critical_warning"]) for name, log in logs.items()}
    if bad := [f"{name} (0x{warning:02x})" for name, warning in warnings.items() if warning]:
        return failed(f"critical warning from {', '.join(bad)}", Remedy.REPLACE)
    return passed(f"no warning from {len(warnings)} disks")


BESIDE_PROLOG = ALWAYS - {Context.PROLOG}

HOST_CHECKS = (
    # These two checks do not run in the prolog. A failed prolog drains the node, so a user who fills disks could drain
    # every node.
    Check("disk", "free space on local disks", ask_disks, judge_disk, BESIDE_PROLOG, every_s=10, settle_s=5),
    Check("inodes", "free inodes on local disks", ask_disks, judge_inodes, BESIDE_PROLOG, every_s=10, settle_s=5),
    Check("memory", "memory that Slurm promises to jobs", ask_memory, judge_memory, QUIET, 60),
    Check("stuck", "processes that hang in the kernel", ask_sleepers, judge_stuck, WATCHING, 30),
    Check("zombies", "zombie processes", ask_sleepers, judge_zombies, WATCHING, 30),
    Check("clock", "clock offset", ask_clock, judge_clock, every_s=5, settle_s=5),
    Check(
        "nvme", "warnings of NVMe disks", ask_nvme, judge_nvme, QUIET, 300,
        applies=lambda node: node.has("nvme") and bool(node.names("/sys/class/nvme")),
    ),
)  # fmt: skip


# Kernel log, apart from Xids


CRITICAL = 2  # syslog level: lines at this level or a more severe one are reported unless they are allowed


class KernelSign(NamedTuple):
    name: str
    pattern: re.Pattern[str]
    remedy: Remedy


def _sign(name: str, pattern: str, remedy: Remedy) -> KernelSign:
    return KernelSign(name, re.compile(pattern), remedy)


SIGNS = (
    _sign("machine-check", r"Machine Check Exception|\[Hardware Error\]: event severity: fatal", Remedy.REPLACE),
    _sign("memory", r"Uncorrected hardware memory error|\[Hardware Error\].*Uncorrected", Remedy.REPLACE),
    _sign("lockup", r"hard LOCKUP", Remedy.REBOOT),
    _sign("file-system", r"EXT4-fs error|XFS .*(Corruption|Shutting down)|Remounting .* read-only", Remedy.REBOOT),
    _sign("pcie", r"AER: .*(Uncorrected \(Fatal\)|Fatal error)", Remedy.REBOOT),
    _sign("driver", r"NVRM: .*RmInitAdapter failed|NVRM: GPU .* is lost", Remedy.REBOOT),
    _sign("disk", r"I/O error, dev (nvme|sd|vd)\w+|nvme\w*: .*controller is down", Remedy.DRAIN),
    # A slow file server or a busy host can cause these two messages, so they are only watched. The check `stuck` finds
    # processes that hang for good.
    _sign("hung-task", r"blocked for more than \d+ seconds", Remedy.WATCH),
    _sign("soft-lockup", r"soft lockup", Remedy.WATCH),
)
ALLOWED = (
    re.compile(r"thermal|throttl", re.IGNORECASE),  # the checks of the GPUs report such lines
    re.compile(r"NVRM: Xid"),  # the check `xid` reports such lines
    re.compile(r"Out of memory|oom-kill|Killed process"),  # the check `oom` reports such lines
    re.compile(r"systemd|watchdog: .*nmi", re.IGNORECASE),
)
_OOM = re.compile(
    r"^(?:\[.*?\] )?(Out of memory|Memory cgroup out of memory): Killed process (\d+) \(([^)]*)\)(?:.*? UID:(\d+))?"
)
FIRST_USER = 1000  # the lowest uid of a person; daemons run as root or as system accounts
SYSTEM_DAEMONS = (
    "slurmd", "slurmstepd", "munged", "systemd", "dalsegno", "chronyd", "sshd", "nv-fabricmanager",
    "nv-hostengine", "dbus-daemon",
)  # fmt: skip


def judge_kernel_log(log: KernelLines, *, window_s: float = 3600) -> Result:
    recent = [line for line in log.lines if line.at > log.now - window_s]
    for sign in SIGNS:
        if line := next((line for line in reversed(recent) if sign.pattern.search(line.text)), None):
            watch = sign.remedy is Remedy.WATCH
            return warned(line.text, sign.name) if watch else failed(line.text, sign.remedy, sign.name)
    strange = [line for line in recent if line.level <= CRITICAL and not _is_allowed(line.text)]
    if strange:
        return warned(f"{len(strange)} critical lines, the last: {strange[-1].text}", "critical")
    return passed("no sign of broken hardware in the kernel log")


def _is_allowed(text: str) -> bool:
    return any(pattern.search(text) for pattern in ALLOWED)


def judge_oom(log: KernelLines, *, window_s: float = 3600) -> Result:
    """Judge out-of-memory kills.

    A kill of a system daemon always counts. Any other kill counts only if the node ran out of memory, and not if a job
    exceeded its own limit.
    """
    kills = [found for line in log.lines if line.at > log.now - window_s and (found := _OOM.search(line.text))]
    if daemons := [kill for kill in kills if _is_daemon(kill)]:
        return failed(f"out of memory, the kernel killed {daemons[-1][3]}", Remedy.REBOOT, daemons[-1][3])
    whole = [kill for kill in kills if kill[1] == "Out of memory"]
    if whole:
        times = f"{len(whole)} times" if len(whole) > 1 else "once"
        return warned(f"out of memory {times}; the last process killed was {whole[-1][3]} ({whole[-1][2]})")
    return passed("no out-of-memory kills")


def _is_daemon(kill: re.Match[str]) -> bool:
    """Return whether the kernel killed a system daemon.

    The name is not enough, because users can give their processes the name of a daemon.
    """
    uid = kill[4]
    is_of_system = int(uid) < FIRST_USER if uid else kill[1] == "Out of memory"
    return is_of_system and kill[3].startswith(SYSTEM_DAEMONS)


KERNEL_CHECKS = (
    Check(
        "kernel-log",
        "signs of broken hardware in the kernel log",
        ask_kernel_log,
        judge_kernel_log,
        every_s=1,
        lasts=False,
    ),
    Check("oom", "out-of-memory kills", ask_kernel_log, judge_oom, every_s=1, lasts=False),
)


# TCP retransmissions, which are a sign of a slow or lossy line


def judge_network(traffic: TcpTraffic, *, percent: float = 3, least: float = 10, window_s: float = 60) -> Result:
    """Judge retransmissions. Return at most a warning, because the other end may be the cause."""
    sent, again = traffic.within(window_s)
    if again >= max(least, 1) and 100 * again >= percent * sent:
        share = 100 * again / sent
        return warned(f"{again} of {sent} TCP segments were retransmitted within {window_s:g} s ({share:.0f} %)")
    return passed("few retransmissions")


NETWORK = Check("network", "TCP retransmissions", ask_traffic, judge_network, WATCHING, every_s=5)


# Ports of InfiniBand, RoCE and EFA


def judge_ports(found: Ports, *, count: float = 0) -> Result:
    """Judge how many ports are up. There must be at least `count`, and at least as many as were up before."""
    up = [port for port in found.ports if port.state == "ACTIVE"]
    down = [port for port in found.ports if port.state != "ACTIVE"]
    wanted, names = int(max(count, found.expected)), ", ".join(f"{port.name} is {port.state}" for port in down[:4])
    if not wanted and not up:
        return warned(f"no port is up, now or before: {names}")
    if len(up) < wanted:
        names = names or "the others are missing"
        return failed(f"{len(up)} of {wanted} ports are up: {names}", Remedy.REBOOT)
    return passed(f"{len(up)} ports are up")


def judge_flaps(found: Ports, *, most: float = 1, window_s: float = 6 * 3600, after_boot_s: float = 1800) -> Result:
    """Judge ports that go down repeatedly. Flaps shortly after boot, while links are trained, do not count."""
    since = max(found.now - window_s, found.booted_at + after_boot_s if found.booted_at else 0)
    counts = {port.name: sum(at >= since for at in port.flaps) for port in found.ports}
    worst = max(counts, key=lambda name: counts[name], default="")
    if worst and counts[worst] > most:
        return failed(f"{worst} went down {counts[worst]} times within {window_s / 3600:g} h", Remedy.DRAIN)
    return passed("no port flaps")


def judge_port_errors(found: Ports, *, most: float = 100) -> Result:
    bad = [(port.name, name, count) for port in found.ports for name, count in port.errors.items() if count > most]
    if bad:
        name, counter, count = max(bad, key=lambda each: each[2])
        return warned(f"{name} has {count} errors of type {counter}", counter)
    return passed("no port has many errors")


FABRIC_CHECKS = (
    Check(
        "fabric-ports",
        "EFA and InfiniBand ports are up",
        ask_ports,
        judge_ports,
        every_s=1,
        applies=has_ports,
        settle_s=3,
    ),
    Check("fabric-flaps", "ports that go up and down", ask_ports, judge_flaps, every_s=5, applies=has_ports),
    Check("fabric-errors", "errors counted by ports", ask_ports, judge_port_errors, every_s=30, applies=has_ports),
)
