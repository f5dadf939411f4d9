"""What the ranks of one generation may overwrite in memory, as its coordinator finds it. Pure: times come in.

Only the coordinator decides it, because only it knows what all nodes hold: ranks that decided by themselves could each
keep another step, and none would be whole. A later word only ever gives more up, so a node that has not heard it yet
keeps all that the others count on.

- The newest step that no single node takes along is safe: older ones may go. Until this generation has one, the last
  one of the generations before is kept, and what this one went on from.
- If nothing becomes safe for a while, because a buddy is slow or ranks have skipped different steps, a floor is set a
  few steps ahead: ranks overwrite what is below it, so that a crash costs little, and keep the first steps above it,
  which are the same for all who heard of it in time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from dalsegno.launch.snapshots import Held, Place
from dalsegno.train.memory.safe import Safe

PATIENCE_S = 5.0  # until a floor is set; twice as long each time, so that what is only slow gets through
MOST_PATIENCE_S = 300.0
AHEAD = 8  # steps; twice as many each time, should it have been heard of too late
MOST_AHEAD = 4096
_SHARED = -1

_Part = tuple[Place, int]  # of a step: a rank's own, or what all have

_Counted = TypeVar("_Counted")


class Safety:
    """Of one generation on these nodes. `said` is what a word about it has to begin with."""

    def __init__(self, nodes: Sequence[str], world: int, said: Safe, now: float) -> None:
        self.safe = said
        self._nodes, self._parts_of_a_step, self._world = frozenset(nodes), world + 1, world
        self._enough = min(2, len(nodes))
        self._held: dict[str, frozenset[_Part]] = {}
        self._holders: Counter[_Part] = Counter()
        self._replicated: Counter[Place] = Counter()  # how many parts of a step enough nodes hold
        self._newest = said.place
        self._since, self._patience_s, self._ahead = now, PATIENCE_S, AHEAD

    def heard(self, node: str, held: Iterable[Held]) -> None:
        """Costs what has changed, not what there is."""
        if node not in self._nodes:
            return
        parts, before = frozenset(self._parts(held)), self._held.get(node, frozenset())
        self._held[node] = parts
        for part in before - parts:
            _count(self._replicated, part[0], -(self._holders[part] == self._enough))
            _count(self._holders, part, -1)
        for part in parts - before:
            _count(self._holders, part, 1)
            _count(self._replicated, part[0], self._holders[part] == self._enough)
            self._newest = max(self._newest, part[0])

    def look(self, now: float) -> Safe:
        """What may be said now."""
        found = [place for place, parts in self._replicated.items() if parts == self._parts_of_a_step]
        place = max(filter(self._may_become_safe, found), default=self.safe.place)
        if place != self.safe.place:
            self.safe = replace(self.safe, place=place)
            self._since = now
        elif self._newest <= max(self.safe.place, self.safe.resumed):
            self._since = now  # nothing is waiting
        elif now - self._since > self._patience_s:
            self._give_up(now)
        return self.safe

    def _give_up(self, now: float) -> None:
        self.safe = replace(self.safe, floor=max(self.safe.floor, self._newest[1]) + self._ahead)
        self._since = now
        self._patience_s, self._ahead = min(2 * self._patience_s, MOST_PATIENCE_S), min(2 * self._ahead, MOST_AHEAD)

    def _may_become_safe(self, place: Place) -> bool:
        return place > self.safe.place and self.safe.needs(place)

    def _parts(self, held: Iterable[Held]) -> Iterable[_Part]:
        for each in held:
            counts = each.generation == self.safe.generation or each.place == self.safe.resumed
            if counts and each.world == self._world:
                if each.own:
                    yield each.place, each.rank
                if each.shared:
                    yield each.place, _SHARED


def _count(counter: Counter[_Counted], key: _Counted, change: int) -> None:
    """What comes to nothing is forgotten."""
    counter[key] += change
    if not counter[key]:
        del counter[key]
