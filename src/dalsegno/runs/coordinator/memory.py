"""What the nodes of a run hold in memory, as their agents tell it, and what is to be done about that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from dalsegno.runs.coordinator.group import Members
from dalsegno.runs.coordinator.snapshots import HeldSnapshot, Place, Resume, buddies, whole_steps
from dalsegno.train.keeper.plan import KeeperAddress
from dalsegno.train.memory.safe import NOWHERE, Safe, render_word
from dalsegno.wire.frames import Message

# ---- What the ranks of one generation may overwrite in memory, as its coordinator finds it. Pure: times come in.


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

    def heard(self, node: str, held: Iterable[HeldSnapshot]) -> None:
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

    def _parts(self, held: Iterable[HeldSnapshot]) -> Iterable[_Part]:
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


# ---- What the nodes of a run hold in memory, as their agents tell it, and what is to be done about that.


Address = tuple[str, int]
SOURCES = 8  # whom a node may ask for what all have, one after the other


class MemoryTable:
    """The coordinator's table. Agents that come back tell it again, so but for `used` it need not be kept."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[HeldSnapshot, ...]] = {}
        self._keepers: dict[str, Address] = {}
        self._said: dict[str, Safe] = {}  # the last word on what is safe that each agent has heard, as it says itself
        self._told: dict[str, Message] = {}  # what each agent was last told of its buddy
        self._keepers_changed = False
        self._told_safe: Safe | None = None
        self._begun = 0  # the last generation that was begun here
        self._resume: Resume | None = None  # for that one
        self._safety: Safety | None = None  # None where nothing is replicated
        self.used: set[str] = set()  # nodes that may hold something, also those that nobody has swept since

    def heard(
        self, node: str, held: Sequence[HeldSnapshot], keeper: Address | None = None, said: Safe | None = None
    ) -> None:
        self._held[node] = tuple(held)
        if keeper is not None:
            self._keepers[node], self._keepers_changed = keeper, True
        if said is not None:
            self._said[node] = said
        if self._safety is not None:
            self._safety.heard(node, held)

    def lost(self, node: str) -> None:
        tables: tuple[dict[str, Any], ...] = (self._held, self._keepers, self._said, self._told)
        for table in tables:
            table.pop(node, None)

    def keeps_nothing(self, node: str) -> None:
        """It has no warm parent to fork a keeper from."""
        self._keepers.pop(node, None)

    # A generation begins

    def start(self, group: Members, agent: str, now: float) -> Message:
        """One node's part: what its workers go on from, who has its copies, and what may not be overwritten."""
        if self._begun != group.generation:
            self._begin(group, now)
        place = next(place for place in group.places if place.agent == agent)
        ranks = range(place.first_rank, place.first_rank + group.nproc_per_node)
        buddy = self._told.get(agent)
        return {
            "resume": self._order(self._resume, ranks, place.group_rank) if self._resume else None,
            "buddy": buddy["buddy"]["address"] if buddy else None,
            "safe": render_word(self._told_safe) if self._told_safe else None,
        }

    def _begin(self, group: Members, now: float) -> None:
        whole = {each.place: each for each in whole_steps(self._held, group.world_size)}
        found = next((each for each in whole.values() if self._within_reach(each, group)), None)
        before = self._last_safe()
        self._begun, self._resume, self._safety = group.generation, found, None
        if len(group.agents) > 1 and len(self._buddies(group)) == len(group.agents):
            kept = before if found and before in whole and before <= found.place else NOWHERE
            said = Safe(group.generation, kept, found.place if found else NOWHERE)
            self._safety = self._watch(group, said, now)
        self._told_safe = self._safety.look(now) if self._safety else None
        self._told = {node: _buddy(address) for node, address in self._buddies(group).items()}

    def _last_safe(self) -> Place:
        if self._safety is not None:
            return self._safety.safe.place
        return max(((said.generation, said.place) for said in self._said.values()), default=(0, NOWHERE))[1]

    def _order(self, found: Resume, ranks: Sequence[int], number: int) -> Message:
        """To these ranks. What all nodes have comes to each from another one."""
        shared = self._addresses(found.shared)
        first = number % len(shared) if shared else 0
        return {
            "generation": found.place[0],
            "step": found.place[1],
            "own": {str(rank): self._addresses(found.own[rank]) for rank in ranks},
            "of": {str(rank): found.of[rank] for rank in ranks if found.of[rank] != rank},
            "shared": (shared[first:] + shared[:first])[:SOURCES],
        }

    def _within_reach(self, found: Resume, group: Members) -> bool:
        """Every rank has each part at home, or somebody has it who can send it."""
        if not self._addresses(found.shared) and not set(group.agents) <= set(found.shared):
            return False
        for place in group.places:
            for rank in range(place.first_rank, place.first_rank + group.nproc_per_node):
                if place.agent not in found.own[rank] and not self._addresses(found.own[rank]):
                    return False
        return True

    def _addresses(self, nodes: Sequence[str]) -> list[list[str | int]]:
        return [[*self._keepers[node], node] for node in nodes if node in self._keepers]

    def _buddies(self, group: Members) -> dict[str, KeeperAddress]:
        ring = buddies(group.agents)
        return {
            node: KeeperAddress(*self._keepers[buddy], buddy) for node, buddy in ring.items() if buddy in self._keepers
        }

    # While it runs

    def words(self, group: Members, now: float) -> list[tuple[str, Message]]:
        """To whom to say what, now that something or nothing has changed: where the buddy is, and what is safe."""
        said = self._new_pairs(group) if self._keepers_changed else []
        if self._begun != group.generation:
            self._take_over(group, now)
        safe = self._safety and self._safety.look(now)
        if safe and safe != self._told_safe:
            self._told_safe = safe
            said += [(node, {"safe": render_word(safe)}) for node in group.agents]
        return said

    def _new_pairs(self, group: Members) -> list[tuple[str, Message]]:
        pairs = {node: _buddy(address) for node, address in self._buddies(group).items()}
        said = [(node, word) for node, word in pairs.items() if self._told.get(node) != word]
        self._told.update(said)
        self._keepers_changed = False
        return said

    def _take_over(self, group: Members, now: float) -> None:
        """A generation that a former self began: when all its nodes are heard of, the most that any was told counts."""
        if not all(node in self._held for node in group.agents):
            return
        said = [each for node, each in self._said.items() if each.generation == group.generation]
        self._begun = group.generation
        if said:
            place, floor = max(each.place for each in said), max(each.floor for each in said)
            most = Safe(group.generation, place, said[0].resumed, floor)
            self._safety = self._watch(group, most, now)

    def _watch(self, group: Members, said: Safe, now: float) -> Safety:
        safety = Safety(group.agents, group.world_size, said, now)
        for node in group.agents:
            safety.heard(node, self._held.get(node, ()))
        return safety


def _buddy(address: KeeperAddress) -> Message:
    return {"buddy": {"address": list(address)}}
