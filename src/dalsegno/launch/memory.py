"""What the nodes of a run hold in memory, as their agents tell it, and what is to be done about that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dalsegno.launch.group import Group
from dalsegno.launch.safety import Safety
from dalsegno.launch.snapshots import Held, Place, Resume, buddies, whole_steps
from dalsegno.train.frames import Message
from dalsegno.train.keeper.orders import KeeperAddress
from dalsegno.train.memory.safe import NOWHERE, Safe, render_word

Address = tuple[str, int]
SOURCES = 8  # whom a node may ask for what all have, one after the other


class Memory:
    """The coordinator's table. Agents that come back tell it again, so but for `used` it need not be kept."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[Held, ...]] = {}
        self._keepers: dict[str, Address] = {}
        self._said: dict[str, Safe] = {}  # the last word on what is safe that each agent has heard, as it says itself
        self._told: dict[str, Message] = {}  # what each agent was last told of its buddy
        self._keepers_changed = False
        self._told_safe: Safe | None = None
        self._begun = 0  # the last generation that was begun here
        self._resume: Resume | None = None  # for that one
        self._safety: Safety | None = None  # None where nothing is replicated
        self.used: set[str] = set()  # nodes that may hold something, also those that nobody has swept since

    def heard(self, node: str, held: Sequence[Held], keeper: Address | None = None, said: Safe | None = None) -> None:
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

    def start(self, group: Group, agent: str, now: float) -> Message:
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

    def _begin(self, group: Group, now: float) -> None:
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

    def _within_reach(self, found: Resume, group: Group) -> bool:
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

    def _buddies(self, group: Group) -> dict[str, KeeperAddress]:
        ring = buddies(group.agents)
        return {
            node: KeeperAddress(*self._keepers[buddy], buddy) for node, buddy in ring.items() if buddy in self._keepers
        }

    # While it runs

    def words(self, group: Group, now: float) -> list[tuple[str, Message]]:
        """To whom to say what, now that something or nothing has changed: where the buddy is, and what is safe."""
        said = self._new_pairs(group) if self._keepers_changed else []
        if self._begun != group.generation:
            self._take_over(group, now)
        safe = self._safety and self._safety.look(now)
        if safe and safe != self._told_safe:
            self._told_safe = safe
            said += [(node, {"safe": render_word(safe)}) for node in group.agents]
        return said

    def _new_pairs(self, group: Group) -> list[tuple[str, Message]]:
        pairs = {node: _buddy(address) for node, address in self._buddies(group).items()}
        said = [(node, word) for node, word in pairs.items() if self._told.get(node) != word]
        self._told.update(said)
        self._keepers_changed = False
        return said

    def _take_over(self, group: Group, now: float) -> None:
        """A generation that a former self began: when all its nodes are heard of, the most that any was told counts."""
        if not all(node in self._held for node in group.agents):
            return
        said = [each for node, each in self._said.items() if each.generation == group.generation]
        self._begun = group.generation
        if said:
            place, floor = max(each.place for each in said), max(each.floor for each in said)
            most = Safe(group.generation, place, said[0].resumed, floor)
            self._safety = self._watch(group, most, now)

    def _watch(self, group: Group, said: Safe, now: float) -> Safety:
        safety = Safety(group.agents, group.world_size, said, now)
        for node in group.agents:
            safety.heard(node, self._held.get(node, ()))
        return safety


def _buddy(address: KeeperAddress) -> Message:
    return {"buddy": {"address": list(address)}}
