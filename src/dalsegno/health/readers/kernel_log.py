"""What the kernel has logged: from /dev/kmsg, or on a simulated node from its telemetry."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dalsegno.health.facts import LogLine
from dalsegno.health.mended import mended_at
from dalsegno.health.readers.simulated import ask_telemetry
from dalsegno.health.world import World

WARNING = 4  # syslog's level; what is less is not kept, or it would push out what is more
_RECORD = re.compile(r"(\d+),\d+,(\d+),[^;]*;(.*)")


@dataclass(frozen=True)
class KernelSaid:
    lines: tuple[LogLine, ...]
    now: float


def ask_kernel_log(world: World) -> KernelSaid:
    told = ask_telemetry(world)
    if told is None:
        uptime_s = float(world.read("/proc/uptime").split()[0])
        said = parse_records(world.kernel_records(), world.now() - uptime_s)
        world.seen.log.extend(line for line in said if line.level <= WARNING)
        since = mended_at(world)
        return KernelSaid(tuple(line for line in world.seen.log if line.at >= since), world.now())
    return KernelSaid(tuple(line for line in told.kernel_log if line.at >= world.seen.since), world.now())


def parse_records(records: list[str], booted_at: float) -> list[LogLine]:
    """Lines of the form `level,sequence,microseconds,flags;text`. ValueError if none of several is."""
    found = [match for record in records if (match := _RECORD.match(record))]
    if records and not found:
        raise ValueError(f"no record of the kernel's: {records[0][:80]!r}")
    return [LogLine(booted_at + int(usec) / 1e6, text, int(level) & 7) for level, usec, text in map(_parts, found)]


def _parts(match: re.Match[str]) -> tuple[str, str, str]:
    return match[1], match[2], match[3]
