"""What the nodes of a run hold in memory, as their agents tell it, and what is to be done about that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dalsegno.launch.group import Group
from dalsegno.launch.snapshots import Held, Resume, buddies, choose, safe_step
from dalsegno.train.frames import Message

Address = tuple[str, int]


class Memory:
    """The coordinator's table. It is told again by agents that come back, so it need not be kept."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[Held, ...]] = {}
        self._keepers: dict[str, Address] = {}
        self._told: dict[str, Message] = {}  # what each agent was last told of its buddy
        self._safe: tuple[int, int] | None = None

    def heard(self, node: str, held: Sequence[Held], keeper: Address | None = None) -> None:
        self._held[node] = tuple(held)
        if keeper is not None:
            self._keepers[node] = keeper

    def lost(self, node: str) -> None:
        tables: tuple[dict[str, Any], ...] = (self._held, self._keepers, self._told)
        for table in tables:
            table.pop(node, None)

    def resume(self, group: Group) -> Message | None:
        """For the start of a generation: what all its workers go on from. Ranks find it at home, or are told where."""
        found = choose(self._held, group.world_size)
        if found is None or not self._within_reach(found, group):
            return None
        return {
            "generation": found.generation,
            "step": found.step,
            "own": {str(rank): self._addresses(nodes) for rank, nodes in found.own.items()},
            "shared": self._addresses(found.shared),
        }

    def words(self, group: Group) -> list[tuple[str, Message]]:
        """To whom to say what, now that something has changed: where the buddy is, and which step is safe."""
        said = [(node, word) for node, word in self._pairs(group) if self._told.get(node) != word]
        self._told.update(said)
        members = {node: self._held.get(node, ()) for node in group.agents}
        step = safe_step(members, group.world_size, group.generation)
        safe = (group.generation, -1 if step is None else step)
        if self._keepers and len(members) > 1 and safe != self._safe:
            self._safe = safe
            said += [(node, {"safe": {"generation": safe[0], "step": safe[1]}}) for node in group.agents]
        return said

    def _pairs(self, group: Group) -> list[tuple[str, Message]]:
        ring = buddies(group.agents)
        known = {node: self._keepers.get(buddy) for node, buddy in ring.items()}
        return [(node, {"buddy": {"address": list(at)}}) for node, at in known.items() if at is not None]

    def _within_reach(self, found: Resume, group: Group) -> bool:
        """Every rank has each part at home, or somebody has it who can send it."""
        for place in group.places:
            for rank in range(place.first_rank, place.first_rank + group.nproc_per_node):
                for nodes in (found.own[rank], found.shared):
                    if place.agent not in nodes and not self._addresses(nodes):
                        return False
        return True

    def _addresses(self, nodes: Sequence[str]) -> list[list[str | int]]:
        return [list(self._keepers[node]) for node in nodes if node in self._keepers]
