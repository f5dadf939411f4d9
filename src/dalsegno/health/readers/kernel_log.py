"""What the kernel has logged: from /dev/kmsg, or on a simulated node from its telemetry.

Virtual hosts share the kernel, so its log is nobody's in particular. The exception is an Xid where the GPUs are the
machine's own: it counts for every virtual host that has real GPUs, from that host's boot on.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from dalsegno.health.facts import LogLine
from dalsegno.health.mended import mended_at
from dalsegno.health.readers.simulated import ask_telemetry
from dalsegno.health.world import World

TICKS_PER_S = 100  # in /proc/PID/stat, on every architecture
XID = re.compile(r"NVRM: Xid \(")
WARNING = 4  # syslog's level; what is less is not kept, or it would push out what is more
_RECORD = re.compile(r"(\d+),\d+,(\d+),[^;]*;(.*)")


@dataclass(frozen=True)
class KernelSaid:
    lines: tuple[LogLine, ...]
    now: float


def ask_kernel_log(world: World) -> KernelSaid:
    told = ask_telemetry(world)
    if told is None:
        since = mended_at(world)
        return KernelSaid(tuple(line for line in _machines_log(world) if line.at >= since), world.now())
    lines = told.kernel_log
    if world.expected.gpus and not told.gpus:
        since = max(_booted_at(world), mended_at(world))
        lines += tuple(line for line in _machines_log(world) if line.at >= since and XID.search(line.text))
    return KernelSaid(tuple(line for line in lines if line.at >= world.seen.since), world.now())


def _machines_log(world: World) -> list[LogLine]:
    """Return what the kernel has logged and we have kept, with what is new since the last look."""
    said = parse_records(world.kernel_records(), _machine_booted_at(world))
    world.seen.log.extend(line for line in said if line.level <= WARNING)
    return list(world.seen.log)


def _machine_booted_at(world: World) -> float:
    return world.now() - float(world.read("/proc/uptime").split()[0])


def _booted_at(world: World) -> float:
    """Return when this host's first process began, which on a virtual host is long after the machine's boot."""
    ticks = world.read("/proc/1/stat").rpartition(")")[2].split()[19]
    return _machine_booted_at(world) + int(ticks) / TICKS_PER_S


def parse_records(records: list[str], booted_at: float) -> list[LogLine]:
    """Lines of the form `level,sequence,microseconds,flags;text`. ValueError if none of several is."""
    found = [match for record in records if (match := _RECORD.match(record))]
    if records and not found:
        raise ValueError(f"no record of the kernel's: {records[0][:80]!r}")
    return [LogLine(booted_at + int(usec) / 1e6, text, int(level) & 7) for level, usec, text in map(_parts, found)]


def _parts(match: re.Match[str]) -> tuple[str, str, str]:
    return match[1], match[2], match[3]
