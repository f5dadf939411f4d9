"""Choose the in-memory snapshot from which a generation resumes.

A rank's state has two parts. The shared part is the same for all ranks. The rank's own part is also held by the buddy
of the rank's node. A step is whole if some node holds the shared part and, for every rank, some node holds the rank's
own part. If the number of ranks has changed, a step can be used only if no rank's own part is a shard of the model.
Each rank's state is then complete by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

Place = tuple[int, int]  # a position in the run's history: generation and step


@dataclass(frozen=True)
class HeldSnapshot:
    """A snapshot in a node's memory."""

    rank: int
    step: int
    generation: int
    world: int
    own: bool = True  # whether it contains this rank's own part
    shared: bool = True  # whether it contains the part shared by all ranks
    sharded: bool = True  # whether the rank's own part is a shard of the model

    @property
    def place(self) -> Place:
        return self.generation, self.step


Holdings = Mapping[str, Sequence[HeldSnapshot]]  # node -> its snapshots


@dataclass(frozen=True)
class Resume:
    """The step from which a generation resumes, and the nodes that hold its parts."""

    place: Place
    own: Mapping[int, tuple[str, ...]]  # rank -> nodes with the part that it loads
    shared: tuple[str, ...]
    source_ranks: Mapping[int, int]  # rank -> the rank whose own part it loads


def whole_steps(holdings: Holdings, world: int) -> Iterator[Resume]:
    """Yield whole steps, newest first. A step of a later generation is newer than any step of an earlier one."""
    steps: dict[Place, list[tuple[str, HeldSnapshot]]] = {}
    for node, held in holdings.items():
        for each in held:
            steps.setdefault(each.place, []).append((node, each))
    for place, found in sorted(steps.items(), reverse=True):
        resume = _whole(place, found, world)
        if resume is not None:
            yield resume


def choose(holdings: Holdings, world: int) -> Resume | None:
    """Return the newest whole step; None if there is none."""
    return next(whole_steps(holdings, world), None)


@dataclass(frozen=True)
class MissingParts:
    """The missing parts of an incomplete step: the own parts of these ranks, or the part shared by all ranks."""

    place: Place
    ranks: tuple[int, ...]
    shared: bool = False


def find_incomplete(holdings: Holdings, world: int, after: Place) -> MissingParts | None:
    """Return the newest step after `after` that is incomplete for a run with this many ranks; None if there is none."""
    found = [each for held in holdings.values() for each in held if each.world == world and each.place > after]
    place = max((each.place for each in found), default=None)
    if place is None:
        return None
    parts = [each for each in found if each.place == place]
    have = {each.rank for each in parts if each.own}
    missing = tuple(rank for rank in range(world) if rank not in have)
    shared = not any(each.shared for each in parts)
    return MissingParts(place, missing, shared) if missing or shared else None


def buddies(nodes: Sequence[str]) -> dict[str, str]:
    """Return each node's buddy, which holds copies of its snapshots: the next node in a ring."""
    return dict(zip(nodes, (*nodes[1:], nodes[0]), strict=True)) if len(nodes) > 1 else {}


def _whole(place: Place, found: Sequence[tuple[str, HeldSnapshot]], world: int) -> Resume | None:
    owners: dict[int, dict[str, None]] = {}
    for node, each in found:
        if each.own:
            owners.setdefault(each.rank, {})[node] = None
    shared = tuple(dict.fromkeys(node for node, each in found if each.shared))
    same_world = all(each.world == world for _, each in found)
    serves = len(owners) == world if same_world else not any(each.sharded for _, each in found)
    if not (shared and owners and serves):
        return None
    source_ranks = {rank: rank if rank in owners else min(owners) for rank in range(world)}
    return Resume(place, {rank: tuple(owners[source_ranks[rank]]) for rank in source_ranks}, shared, source_ranks)
