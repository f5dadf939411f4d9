"""Read the host's state: the kernel log, waiting processes, TCP traffic and fabric ports.

Virtual hosts share the machine's kernel, so their own kernel log is in their telemetry. One kind of line is taken from
the machine's log: an Xid of a real GPU counts for every virtual host with real GPUs, if it is newer than that host's
boot.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from dalsegno.health.facts import LogLine, Port, TcpSegments, WaitingProcess
from dalsegno.health.node_reader import NodeReader
from dalsegno.health.readers.gpus import ask_telemetry
from dalsegno.health.xids import repaired_at
from dalsegno.system.hanging_calls import NoAnswer

TICKS_PER_S = 100  # times in /proc/PID/stat are counted in these ticks, on every architecture
XID = re.compile(r"NVRM: Xid \(")
WARNING = 4  # syslog level; less important lines are dropped, so that they cannot displace others
_RECORD = re.compile(r"(\d+),\d+,(\d+),[^;]*;(.*)")


@dataclass(frozen=True)
class KernelLines:
    lines: tuple[LogLine, ...]
    now: float


def ask_kernel_log(node: NodeReader) -> KernelLines:
    telemetry = ask_telemetry(node)
    if telemetry is None:
        since = repaired_at(node)
        return KernelLines(tuple(line for line in _machines_log(node) if line.at >= since), node.now())
    lines = telemetry.kernel_log
    if node.expected.gpus and not telemetry.gpus:
        since = max(_booted_at(node), repaired_at(node))
        lines += tuple(line for line in _machines_log(node) if line.at >= since and XID.search(line.text))
    return KernelLines(tuple(line for line in lines if line.at >= node.seen.since), node.now())


def _machines_log(node: NodeReader) -> list[LogLine]:
    """Store the new lines of the kernel log, and return all stored lines."""
    lines = parse_records(node.kernel_records(), _machine_booted_at(node))
    node.seen.log.extend(line for line in lines if line.level <= WARNING)
    return list(node.seen.log)


def _machine_booted_at(node: NodeReader) -> float:
    return node.now() - float(node.read("/proc/uptime").split()[0])


def _booted_at(node: NodeReader) -> float:
    """Return when this host's first process started, which on a virtual host is long after the machine's boot."""
    ticks = node.read("/proc/1/stat").rpartition(")")[2].split()[19]
    return _machine_booted_at(node) + int(ticks) / TICKS_PER_S


def parse_records(records: list[str], booted_at: float) -> list[LogLine]:
    """Parse records `level,sequence,microseconds,flags;text`; raise ValueError if none has this form."""
    found = [match for record in records if (match := _RECORD.match(record))]
    if records and not found:
        raise ValueError(f"not a kernel log record: {records[0][:80]!r}")
    return [LogLine(booted_at + int(usec) / 1e6, text, int(level) & 7) for level, usec, text in map(_parts, found)]


def _parts(match: re.Match[str]) -> tuple[str, str, str]:
    return match[1], match[2], match[3]


# Processes in uninterruptible sleep (D) and zombies (Z). Earlier rounds show how long each of them has waited.


STATES = "RSDZTtXxKWPI"  # all process states in proc(5)
_SWITCHES = re.compile(r"ctxt_switches:\s*(\d+)")


@dataclass(frozen=True)
class BlockedProcesses:
    waiting: tuple[WaitingProcess, ...]
    now: float


def ask_sleepers(node: NodeReader) -> BlockedProcesses:
    """Return the processes in state D or Z. The waiting time of a process starts again when it has run."""
    pids = [name for name in node.names("/proc") if name.isdigit()]
    if not pids:
        raise NoAnswer("/proc shows no process")
    found = dict(entry for pid in pids if (entry := _waiting(node, pid)))
    node.seen.waiting = {key: _since(node, key, one) for key, one in found.items()}
    return BlockedProcesses(tuple(node.seen.waiting.values()), node.now())


def _waiting(node: NodeReader, pid: str) -> tuple[tuple[int, str], WaitingProcess] | None:
    try:
        head, _, tail = node.read(f"/proc/{pid}/stat").rpartition(")")
        fields = tail.split()
        if fields[0] not in STATES:
            raise ValueError(f"/proc/{pid}/stat is {head[:20]!r} … {tail[:20]!r}")
        if fields[0] not in ("D", "Z"):
            return None
        switches = ",".join(_SWITCHES.findall(node.read(f"/proc/{pid}/status")))
    except NoAnswer:
        return None  # the process has ended meanwhile
    name = head.partition("(")[2]
    return (int(pid), fields[19]), WaitingProcess(int(pid), name, fields[0], node.now(), switches)


def _since(node: NodeReader, key: tuple[int, str], now: WaitingProcess) -> WaitingProcess:
    before = node.seen.waiting.get(key)
    same = before is not None and (before.state, before.switches) == (now.state, now.switches)
    return before if before is not None and same else now


# TCP segments sent and retransmitted, from /proc/net/snmp


_FILE = "/proc/net/snmp"


def ask_traffic(node: NodeReader) -> TcpTraffic:
    """Return the recent TCP counters, oldest first. The last entry has the current counters."""
    now, seen = node.now(), node.seen.sent
    seen.append(parse_snmp(node.read(_FILE), now))
    while seen[0].segments > seen[-1].segments:  # the oldest sample is from before the counters were reset
        seen.popleft()
    return TcpTraffic(now, tuple(seen))


@dataclass(frozen=True)
class TcpTraffic:
    now: float
    sent: tuple[TcpSegments, ...]

    def within(self, window_s: float) -> tuple[int, int]:
        """Return the segments sent within the window, and how many of them were retransmissions."""
        first = next(each for each in self.sent if each.at >= self.now - window_s)
        again = self.sent[-1].again - first.again
        return self.sent[-1].segments - first.segments + again, again


def parse_snmp(text: str, at: float) -> TcpSegments:
    """Parse the TCP counters: a line of names and one of numbers.

    The kernel does not count a segment as sent if it only retransmits data.
    """
    names, numbers = (line.split()[1:] for line in text.splitlines() if line.startswith("Tcp:"))
    values = dict(zip(names, numbers, strict=True))
    return TcpSegments(at, int(values["OutSegs"]), int(values["RetransSegs"]))


# Fabric ports: InfiniBand, RoCE and EFA, from sysfs


CLASS = "/sys/class/infiniband"
ERRORS = (
    "symbol_error", "link_error_recovery", "port_rcv_errors", "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
)  # fmt: skip
DOWNED = "link_downed"
_KINDS = {"InfiniBand": "ib", "Ethernet": "roce"}
_FLAPS_KEPT = 100


@dataclass(frozen=True)
class Ports:
    """The fabric ports. `expected` is the number of ports that should be up, as far as known."""

    ports: tuple[Port, ...]
    expected: int
    now: float
    booted_at: float


def has_ports(node: NodeReader) -> bool:
    telemetry = ask_telemetry(node)
    return bool(telemetry.ports) if telemetry else bool(node.names(CLASS))


def ask_ports(node: NodeReader) -> Ports:
    telemetry = ask_telemetry(node)
    if telemetry is not None:
        return Ports(telemetry.ports, len(telemetry.ports), node.now(), telemetry.booted_at)
    ports = tuple(_port(node, device, number) for device, number in port_places(node))
    node.seen.active.update(port.name for port in ports if port.state == "ACTIVE")
    booted_at = node.now() - float(node.read("/proc/uptime").split()[0])
    return Ports(ports, len(node.seen.active), node.now(), booted_at)


def port_places(node: NodeReader) -> list[tuple[str, str]]:
    return [(device, number) for device in node.names(CLASS) for number in node.names(f"{CLASS}/{device}/ports")]


def _port(node: NodeReader, device: str, number: str) -> Port:
    folder, name = f"{CLASS}/{device}/ports/{number}", f"{device}/{number}"
    found = re.fullmatch(r"\d+: (\w+)", node.read(f"{folder}/state").strip())
    if not found:
        raise NoAnswer(f"{folder}/state has unexpected content")
    counters = {name: count for name in (*ERRORS, DOWNED) if (count := _count(node, f"{folder}/counters/{name}"))}
    flaps = _flaps(node, name, counters.pop(DOWNED, 0))
    return Port(name, found[1], port_kind(node, folder), flaps, counters)


def _flaps(node: NodeReader, port: str, downed: int) -> tuple[float, ...]:
    """Return the times at which the port's link-down counter was seen to increase."""
    seen = node.seen
    rise = downed - seen.downs.get(port, downed)
    seen.downs[port] = downed
    if rise > 0:
        seen.flaps[port] = (*seen.flaps.get(port, ()), *[node.now()] * rise)[-_FLAPS_KEPT:]
    return seen.flaps.get(port, ())


def port_kind(node: NodeReader, folder: str) -> str:
    try:
        return _KINDS.get(node.read(f"{folder}/link_layer").strip(), "efa")
    except NoAnswer:
        return "efa"


def _count(node: NodeReader, path: str) -> int:
    """Return a counter; 0 if this kind of port does not have it."""
    try:
        text = node.read(path).strip()
    except NoAnswer:
        return 0
    return int(text) if text.isdigit() else 0
