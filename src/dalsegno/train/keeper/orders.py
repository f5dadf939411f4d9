"""What the agent orders, read once where it comes in. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Union

from dalsegno.train.memory.files import check_run


class KeeperAddress(NamedTuple):
    """Where a keeper listens, and the node it belongs to: a keeper of another node that answers there is refused."""

    host: str
    port: int
    node: str


UNTOLD = -1
RATE = 2 << 30  # bytes in a second


@dataclass(frozen=True)
class Keep:
    """Whose snapshots these are, and who is to have a copy of them."""

    run: str
    secret: bytes
    node: str  # the one that this keeper belongs to, as its peers name it
    generation: int
    buddy: KeeperAddress | None = None
    resumed: int | None = UNTOLD  # the step this generation went on from; None if it started anew
    rate: float = RATE  # bytes that may go to the buddy in a second


@dataclass(frozen=True)
class Snapshot:
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


Order = Union[Keep, Snapshot, Fetch, Drop]


def parse_order(message: Mapping[str, Any]) -> Order | None:
    """None for what a later agent may say and this keeper does not know; raises where a known order makes no sense."""
    if "keep" in message:
        return _keep(message["keep"])
    if "snapshot" in message:
        return Snapshot()
    if "fetch" in message:
        return _fetch(message["fetch"])
    if "drop" in message:
        return Drop(tuple(int(one["rank"]) for one in message["drop"]))
    return None


def _keep(told: Mapping[str, Any]) -> Keep:
    run, buddy, resumed = str(told["run"]), told.get("buddy"), told.get("resumed", UNTOLD)
    check_run(run)
    return Keep(
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
