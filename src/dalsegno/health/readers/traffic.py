"""How many TCP segments this host has sent, and how many of them again, from /proc/net/snmp."""

from __future__ import annotations

from dataclasses import dataclass

from dalsegno.health.seen import Sent
from dalsegno.health.world import World

_FILE = "/proc/net/snmp"


def ask_traffic(world: World) -> Traffic:
    """All that was seen of late, this look included."""
    now, seen = world.now(), world.seen.sent
    seen.append(parse_snmp(world.read(_FILE), now))
    while seen[0].segments > seen[-1].segments:  # of another life
        seen.popleft()
    return Traffic(now, tuple(seen))


@dataclass(frozen=True)
class Traffic:
    now: float
    sent: tuple[Sent, ...]

    def within(self, window_s: float) -> tuple[int, int]:
        """Segments sent within so long, and how many of them were sent again."""
        first = next(each for each in self.sent if each.at >= self.now - window_s)
        again = self.sent[-1].again - first.again
        return self.sent[-1].segments - first.segments + again, again


def parse_snmp(text: str, at: float) -> Sent:
    """A line of names and one of numbers for each protocol. Segments that hold nothing but what was sent before are
    not counted as sent."""
    names, numbers = (line.split()[1:] for line in text.splitlines() if line.startswith("Tcp:"))
    values = dict(zip(names, numbers, strict=True))
    return Sent(at, int(values["OutSegs"]), int(values["RetransSegs"]))
