"""Processes that wait in the kernel, or for somebody to note their end; since when is known from looks before."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dalsegno.health.seen import Waiting
from dalsegno.health.world import World
from dalsegno.system.apart import NoAnswer

STATES = "RSDZTtXxKWPI"  # all that proc(5) knows
_SWITCHES = re.compile(r"ctxt_switches:\s*(\d+)")


@dataclass(frozen=True)
class Sleepers:
    waiting: tuple[Waiting, ...]
    now: float


def ask_sleepers(world: World) -> Sleepers:
    """All in state D or Z now. One that has run since the last look waits anew: its count of switches is another."""
    pids = [name for name in world.names("/proc") if name.isdigit()]
    if not pids:
        raise NoAnswer("/proc shows no process")
    found = dict(entry for pid in pids if (entry := _waiting(world, pid)))
    world.seen.waiting = {key: _since(world, key, one) for key, one in found.items()}
    return Sleepers(tuple(world.seen.waiting.values()), world.now())


def _waiting(world: World, pid: str) -> tuple[tuple[int, str], Waiting] | None:
    try:
        head, _, tail = world.read(f"/proc/{pid}/stat").rpartition(")")
        fields = tail.split()
        if fields[0] not in STATES:
            raise ValueError(f"/proc/{pid}/stat is {head[:20]!r} … {tail[:20]!r}")
        if fields[0] not in ("D", "Z"):
            return None
        switches = ",".join(_SWITCHES.findall(world.read(f"/proc/{pid}/status")))
    except NoAnswer:
        return None  # it has ended meanwhile
    name = head.partition("(")[2]
    return (int(pid), fields[19]), Waiting(int(pid), name, fields[0], world.now(), switches)


def _since(world: World, key: tuple[int, str], now: Waiting) -> Waiting:
    before = world.seen.waiting.get(key)
    same = before is not None and (before.state, before.switches) == (now.state, now.switches)
    return before if before is not None and same else now
