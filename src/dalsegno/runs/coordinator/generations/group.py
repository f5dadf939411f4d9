"""Choose the members of a generation and their ranks."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

_DIGITS = re.compile(r"(\d+)")


@dataclass(frozen=True)
class Shape:
    """The requested size of a run: the number of nodes, and of processes per node."""

    min_nodes: int
    max_nodes: int
    nproc_per_node: int


@dataclass(frozen=True)
class GroupPlace:
    """The position of one node in a generation: its GROUP_RANK, and the RANK of its first process."""

    agent: str
    group_rank: int
    first_rank: int


@dataclass(frozen=True)
class Members:
    """The members of one generation, in the order of their group ranks."""

    generation: int
    places: tuple[GroupPlace, ...]
    nproc_per_node: int

    @cached_property
    def agents(self) -> tuple[str, ...]:
        return tuple(place.agent for place in self.places)

    @cached_property
    def _by_agent(self) -> Mapping[str, GroupPlace]:
        return {place.agent: place for place in self.places}

    def place_of(self, agent: str) -> GroupPlace:
        return self._by_agent[agent]

    @property
    def world_size(self) -> int:
        return len(self.places) * self.nproc_per_node

    @property
    def store_agent(self) -> str:
        """The agent that runs the store. It is on the first node, which is MASTER_ADDR for all ranks."""
        return self.places[0].agent

    @property
    def ranks(self) -> frozenset[int]:
        return frozenset(range(self.world_size))

    def agent_of(self, rank: int) -> str:
        return self.places[rank // self.nproc_per_node].agent


def form_group(
    generation: int, shape: Shape, ready: Sequence[str], before: Sequence[str] = (), doubted: Collection[str] = ()
) -> Members | None:
    """Return the members of the next generation, chosen from the agents that are ready; None if there are too few.

    Members of the previous generation keep their group rank, and with it their ranks, data and snapshots. Other agents
    get the free ranks in the order in which Slurm lists nodes, with nodes out of service last. A smaller group drops
    ranks from the end.
    """
    size = min(len(ready), shape.max_nodes)
    if size < shape.min_nodes:
        return None
    kept = _keep_ranks(size, ready, before)
    placed = set(kept.values())
    free = [agent for agent in ready if agent not in placed]
    newcomers = iter(sorted(free, key=lambda agent: (agent in doubted, in_order(agent))))
    order = [kept[index] if index in kept else next(newcomers) for index in range(size)]
    places = tuple(GroupPlace(agent, index, index * shape.nproc_per_node) for index, agent in enumerate(order))
    return Members(generation, places, shape.nproc_per_node)


@lru_cache(maxsize=1 << 15)
def in_order(name: str) -> tuple[str | int, ...]:
    """Return a key that sorts names as Slurm lists them, with numbers in numerical order."""
    return tuple(int(part) if number % 2 else part for number, part in enumerate(_DIGITS.split(name)))


def _keep_ranks(size: int, ready: Sequence[str], before: Sequence[str]) -> Mapping[int, str]:
    """Return the agents by group rank. An agent keeps its group rank if the rank is below the new size.

    Members with higher group ranks get free ones.
    """
    alive = set(ready)
    kept = {index: agent for index, agent in enumerate(before[:size]) if agent in alive}
    moved = [agent for agent in before[size:] if agent in alive]
    gaps = [index for index in range(size) if index not in kept]
    return kept | dict(zip(gaps, moved, strict=False))
