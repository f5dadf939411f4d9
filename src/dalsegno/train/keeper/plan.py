"""What to do next, given what is held, what was sent, and what was ordered. Pure.

A copy may be overwritten only by the rule for the slots of a rank itself: when something newer is safe for all ranks.
So there is a third slot for copies, which is made only if the second holds a step that is not safe yet: nodes that
each sent another step first would otherwise wait for each other for ever.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Union

from dalsegno.train.keeper.holdings import StoredSnapshot
from dalsegno.train.memory.files import check_run
from dalsegno.train.memory.record import SnapshotRecord, free_slots
from dalsegno.train.memory.safe import Safe

# ---- What the agent orders, read once where it comes in. Pure.


class KeeperAddress(NamedTuple):
    """Where a keeper listens, and the node it belongs to: a keeper of another node that answers there is refused."""

    host: str
    port: int
    node: str


UNTOLD = -1
RATE = 2 << 30  # bytes in a second


@dataclass(frozen=True)
class KeepOrder:
    """Whose snapshots these are, and who is to have a copy of them."""

    run: str
    secret: bytes
    node: str  # the one that this keeper belongs to, as its peers name it
    generation: int
    buddy: KeeperAddress | None = None
    resumed: int | None = UNTOLD  # the step this generation went on from; None if it started anew
    rate: float = RATE  # bytes that may go to the buddy in a second


@dataclass(frozen=True)
class CommittedSnapshot:
    """A rank of this node has committed a step. What it is stands in its slot: this is only a call to look."""


@dataclass(frozen=True)
class Fetch:
    """What a rank needs to go on from that step. No holders: it is here already."""

    number: int
    rank: int
    generation: int
    step: int
    own: tuple[KeeperAddress, ...] = ()
    shared: tuple[KeeperAddress, ...] = ()


@dataclass(frozen=True)
class Drop:
    """Copies that are of no use any more, by the ranks they are of."""

    ranks: tuple[int, ...]


Order = Union[KeepOrder, CommittedSnapshot, Fetch, Drop]


def parse_order(message: Mapping[str, Any]) -> Order | None:
    """None for what a later agent may say and this keeper does not know; raises where a known order makes no sense."""
    if "keep" in message:
        return _keep(message["keep"])
    if "snapshot" in message:
        return CommittedSnapshot()
    if "fetch" in message:
        return _fetch(message["fetch"])
    if "drop" in message:
        return Drop(tuple(int(one["rank"]) for one in message["drop"]))
    return None


def _keep(told: Mapping[str, Any]) -> KeepOrder:
    run, buddy, resumed = str(told["run"]), told.get("buddy"), told.get("resumed", UNTOLD)
    check_run(run)
    return KeepOrder(
        run,
        bytes.fromhex(told["secret"]),
        str(told["node"]),
        int(told["generation"]),
        None if buddy is None else _address(buddy),
        None if resumed is None else int(resumed),
        max(1.0, float(told.get("rate", RATE))),
    )


def _fetch(told: Mapping[str, Any]) -> Fetch:
    number, rank, generation, step = (int(told[name]) for name in ("number", "rank", "generation", "step"))
    own, shared = (tuple(map(_address, told.get(part, ()))) for part in ("own", "shared"))
    return Fetch(number, rank, generation, step, own, shared)


def _address(told: Any) -> KeeperAddress:
    host, port, node = told
    return KeeperAddress(str(host), int(port), str(node))


# ---- What to do next, given what is held, what was sent, and what was ordered. Pure.


COPIES = 3  # slots for what a buddy sends of one rank
OWN, SHARED = 3, 4  # and those for the parts that were fetched for it

Sent = tuple[int, int]  # a rank, and the number of its snapshot


def to_sum(held: Iterable[StoredSnapshot], failed: Collection[Sent] = ()) -> StoredSnapshot | None:
    """The newest snapshot of this node that has no checksums."""
    without = [one for one in held if not one.copy and not one.summed and key_of(one) not in failed]
    return max(without, key=_place, default=None)


def to_send(
    held: Sequence[StoredSnapshot],
    keep: KeepOrder,
    sent: Collection[Sent],
    safe: Safe | None = None,
    skipped: bool = False,
) -> StoredSnapshot | None:
    """The newest snapshot that the buddy lacks, of the rank whose turn it is. `skipped`: or an older one, after all."""
    mine = [one for one in held if not one.copy and one.summed and _counts(one, keep, safe)]
    waiting = [one for one in mine if key_of(one) not in sent]
    reached = {one.rank: one.place for one in sorted(mine, key=_place) if key_of(one) in sent}
    nothing = (-1, -1)
    ahead = [one for one in waiting if one.place > reached.get(one.rank, nothing)]
    fit = ahead or (waiting if skipped else [])
    turn = min((reached.get(one.rank, nothing), one.rank) for one in fit)[1] if fit else None
    return max((one for one in fit if one.rank == turn), key=_place, default=None)


def key_of(one: StoredSnapshot) -> Sent:
    return one.rank, one.record.seq


def slot_for(
    copies: Sequence[SnapshotRecord | None], made: Sequence[bool], keep: KeepOrder, safe: Safe | None
) -> int | None:
    """Where the next copy of a rank goes; None while all are needed. No file is made before those that are there."""
    free = free_slots(copies, keep.generation, _resumed(copies, keep), safe)
    return min(free, key=lambda number: (not made[number], free.index(number)), default=None)


def find_own(held: Iterable[StoredSnapshot], rank: int, generation: int, step: int) -> StoredSnapshot | None:
    fit = [one for one in held if one.own and one.rank == rank and one.place == (generation, step)]
    return min(fit, key=lambda one: one.copy, default=None)


def find_shared(held: Iterable[StoredSnapshot], generation: int, step: int) -> StoredSnapshot | None:
    """Of any rank: all have the same."""
    fit = [one for one in held if one.shared and one.place == (generation, step)]
    return min(fit, key=lambda one: one.copy, default=None)


def spent(held: Sequence[StoredSnapshot], safe: Safe | None) -> list[StoredSnapshot]:
    """What is of no use any more, and would only take memory.

    That is what was fetched to start from, once the run has come further; and all that is left of a rank that has gone
    to live elsewhere, or has its copies elsewhere: nothing of it is of the generation that has a safe step by now.
    """
    if safe is None:
        return []
    fetched = [one for one in held if one.copy and one.name.slot in (OWN, SHARED) and not safe.needs(one.place)]
    if safe.place[0] != safe.generation:
        return fetched
    here = {(one.rank, one.copy) for one in held if one.record.generation >= safe.generation or safe.needs(one.place)}
    return fetched + [one for one in held if one not in fetched and (one.rank, one.copy) not in here]


def _counts(one: StoredSnapshot, keep: KeepOrder, safe: Safe | None) -> bool:
    """Whether anyone may ever go on from it: not from steps that were given up, nor from before what is safe."""
    if safe is not None and not safe.needs(one.place):
        return False
    return one.record.generation == keep.generation or keep.resumed in (UNTOLD, one.record.step)


def _resumed(copies: Iterable[SnapshotRecord | None], keep: KeepOrder) -> int | None:
    """Untold: it may be the newest one, so that is kept."""
    if keep.resumed != UNTOLD:
        return keep.resumed
    return max((copy.step for copy in copies if copy and copy.generation < keep.generation), default=None)


def _place(one: StoredSnapshot) -> tuple[int, int]:
    return one.place
