"""Decide what a keeper does next, from the snapshots that it holds and has sent, and from its orders. No I/O.

A copy, like a rank's own snapshot, may be overwritten once a newer step survives the loss of any node (the safe step).
A third slot for copies is created only while the second one holds a step that is not safe yet. Without a third slot,
two nodes whose first copies are of different steps would wait for each other forever.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Union

from dalsegno.train.keeper.holdings import StoredSnapshot
from dalsegno.train.memory.files import check_run
from dalsegno.train.memory.record import SnapshotRecord, free_slots
from dalsegno.train.memory.safe_steps import SafeSteps

# Orders from the agent


class KeeperAddress(NamedTuple):
    """The address of a keeper, and its node.

    A keeper that answers at this address but belongs to another node is refused.
    """

    host: str
    port: int
    node: str


UNKNOWN_STEP = -1  # value of a step that the order does not name
RATE = 2 << 30  # default rate of copies to the buddy, in bytes per second


@dataclass(frozen=True)
class KeepOrder:
    """An order to keep the snapshots of a run and to send copies to a buddy."""

    run: str
    secret: bytes
    node: str  # the name by which peers know this keeper's node
    generation: int
    buddy: KeeperAddress | None = None
    resumed: int | None = UNKNOWN_STEP  # the step from which this generation resumed; None if it started from scratch
    rate: float = RATE  # maximum rate to the buddy, in bytes per second


@dataclass(frozen=True)
class CommittedSnapshot:
    """A notice that a rank on this node has committed a snapshot. The details are in the snapshot's slot."""


@dataclass(frozen=True)
class Fetch:
    """An order to fetch the parts that a rank needs to resume from a step.

    A part without holders is already on this node.
    """

    number: int
    rank: int
    generation: int
    step: int
    own: tuple[KeeperAddress, ...] = ()
    shared: tuple[KeeperAddress, ...] = ()


@dataclass(frozen=True)
class Drop:
    """An order to drop the copies of these ranks."""

    ranks: tuple[int, ...]


Order = Union[KeepOrder, CommittedSnapshot, Fetch, Drop]


def parse_order(message: Mapping[str, Any]) -> Order | None:
    """Parse an order.

    Return None if its type is unknown, for example because the agent is newer. Raise if a known order is invalid.
    """
    if "keep" in message:
        return _keep(message["keep"])
    if "snapshot" in message:
        return CommittedSnapshot()
    if "fetch" in message:
        return _fetch(message["fetch"])
    if "drop" in message:
        return Drop(tuple(int(one["rank"]) for one in message["drop"]))
    return None


def _keep(message: Mapping[str, Any]) -> KeepOrder:
    run, buddy, resumed = str(message["run"]), message.get("buddy"), message.get("resumed", UNKNOWN_STEP)
    check_run(run)
    return KeepOrder(
        run,
        bytes.fromhex(message["secret"]),
        str(message["node"]),
        int(message["generation"]),
        None if buddy is None else _address(buddy),
        None if resumed is None else int(resumed),
        max(1.0, float(message.get("rate", RATE))),
    )


def _fetch(message: Mapping[str, Any]) -> Fetch:
    number, rank, generation, step = (int(message[name]) for name in ("number", "rank", "generation", "step"))
    own, shared = (tuple(map(_address, message.get(part, ()))) for part in ("own", "shared"))
    return Fetch(number, rank, generation, step, own, shared)


def _address(value: Any) -> KeeperAddress:
    host, port, node = value
    return KeeperAddress(str(host), int(port), str(node))


# Decisions about which snapshots to send, keep and remove

COPIES = 3  # number of slots per rank in which a buddy stores the copies that it receives
OWN, SHARED = 3, 4  # numbers of the slots for the two parts that a rank on this node fetches in order to resume

Sent = tuple[int, int]  # a rank and the `seq` of its snapshot


def choose_to_sum(held: Iterable[StoredSnapshot], failed: Collection[Sent] = ()) -> StoredSnapshot | None:
    """Return this node's newest snapshot without checksums, except those in `failed`; None if there is none."""
    without = [one for one in held if not one.copy and not one.summed and key_of(one) not in failed]
    return max(without, key=_place, default=None)


def choose_to_send(
    held: Sequence[StoredSnapshot],
    keep: KeepOrder,
    sent: Collection[Sent],
    safe: SafeSteps | None = None,
    skipped: bool = False,
) -> StoredSnapshot | None:
    """Return the next snapshot to send: the newest snapshot of the rank whose last sent step is the oldest.

    If no rank has a snapshot newer than its last sent one, return None, or an older unsent one if `skipped` is set.
    """
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


def choose_slot(
    copies: Sequence[SnapshotRecord | None], made: Sequence[bool], keep: KeepOrder, safe: SafeSteps | None
) -> int | None:
    """Return the slot for the next copy of a rank; None while all slots are needed.

    Slots with a file are used first.
    """
    free = free_slots(copies, keep.generation, _resumed(copies, keep), safe)
    return min(free, key=lambda number: (not made[number], free.index(number)), default=None)


def find_own(held: Iterable[StoredSnapshot], rank: int, generation: int, step: int) -> StoredSnapshot | None:
    fit = [one for one in held if one.own and one.rank == rank and one.place == (generation, step)]
    return min(fit, key=lambda one: one.copy, default=None)


def find_shared(held: Iterable[StoredSnapshot], generation: int, step: int) -> StoredSnapshot | None:
    """Return a snapshot with the shared part of this step, which is the same on every rank; None if there is none."""
    fit = [one for one in held if one.shared and one.place == (generation, step)]
    return min(fit, key=lambda one: one.copy, default=None)


def find_unneeded(held: Sequence[StoredSnapshot], safe: SafeSteps | None) -> list[StoredSnapshot]:
    """Return the snapshots that are no longer needed.

    There are two kinds. Parts that a rank fetched to resume are no longer needed once the run has a newer safe step.
    All snapshots of a rank are no longer needed if the rank now runs on another node, or sends its copies to another
    node. Such a rank is recognised because none of its snapshots here is needed or belongs to the current generation.
    It is looked for only once this generation has a safe step.
    """
    if safe is None:
        return []
    fetched = [one for one in held if one.copy and one.name.slot in (OWN, SHARED) and not safe.needs(one.place)]
    if safe.place[0] != safe.generation:
        return fetched
    here = {(one.rank, one.copy) for one in held if one.record.generation >= safe.generation or safe.needs(one.place)}
    return fetched + [one for one in held if one not in fetched and (one.rank, one.copy) not in here]


def _counts(one: StoredSnapshot, keep: KeepOrder, safe: SafeSteps | None) -> bool:
    """Return whether the run may still resume from this snapshot.

    It does not resume from an abandoned step, or from a step that is older than the safe step.
    """
    if safe is not None and not safe.needs(one.place):
        return False
    return one.record.generation == keep.generation or keep.resumed in (UNKNOWN_STEP, one.record.step)


def _resumed(copies: Iterable[SnapshotRecord | None], keep: KeepOrder) -> int | None:
    """Return the step from which the generation resumed.

    If the order does not name it, return the newest step among copies of earlier generations.
    """
    if keep.resumed != UNKNOWN_STEP:
        return keep.resumed
    return max((copy.step for copy in copies if copy and copy.generation < keep.generation), default=None)


def _place(one: StoredSnapshot) -> tuple[int, int]:
    return one.place
