"""From which snapshot in memory a generation goes on, and which step may be counted on. Pure.

A rank's state has two parts: what every rank has, which any node's copy serves, and its own, which its buddy has too.
A step is whole if all ranks' own parts of it are somewhere, and the common one is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Held:
    """A snapshot in a node's memory."""

    rank: int
    step: int
    generation: int
    world: int
    own: bool = True  # it has what only this rank has
    shared: bool = True  # it has what all ranks have


Holdings = Mapping[str, Sequence[Held]]  # by node


@dataclass(frozen=True)
class Resume:
    """A whole step, and the nodes that hold what of it."""

    generation: int
    step: int
    own: Mapping[int, tuple[str, ...]]  # by rank
    shared: tuple[str, ...]

    @property
    def least(self) -> int:
        """How many nodes have what the fewest have."""
        return min(map(len, (*self.own.values(), self.shared)))


def choose(holdings: Holdings, world: int) -> Resume | None:
    """The newest whole step. A later generation comes first: what it has done since was done on a later decision."""
    return next(_whole_steps(holdings, world), None)


def safe_step(holdings: Holdings, world: int, generation: int) -> int | None:
    """The newest step of this generation that no single node takes along; of a single node, that it has."""
    enough = min(2, len(holdings))
    whole = (each for each in _whole_steps(holdings, world) if each.generation == generation)
    return next((each.step for each in whole if each.least >= enough), None)


def buddies(nodes: Sequence[str]) -> dict[str, str]:
    """A ring: each node's snapshots are kept by the next one too."""
    return dict(zip(nodes, (*nodes[1:], nodes[0]), strict=True)) if len(nodes) > 1 else {}


def _whole_steps(holdings: Holdings, world: int) -> Iterator[Resume]:
    """The newest first."""
    steps: dict[tuple[int, int], list[tuple[str, Held]]] = {}
    for node, held in holdings.items():
        for each in held:
            if each.world == world:
                steps.setdefault((each.generation, each.step), []).append((node, each))
    for (generation, step), found in sorted(steps.items(), reverse=True):
        ranks = {rank: _nodes(found, rank) for rank in range(world)}
        shared = tuple(dict.fromkeys(node for node, each in found if each.shared))
        if shared and all(ranks.values()):
            yield Resume(generation, step, ranks, shared)


def _nodes(found: Sequence[tuple[str, Held]], rank: int) -> tuple[str, ...]:
    return tuple(dict.fromkeys(node for node, each in found if each.own and each.rank == rank))
