"""Where each byte of a state goes. Pure: a state in, ranges out, and back.

A snapshot has two parts, each a run of bytes that can be moved on its own: what every rank has, and what only this
rank has. A buddy is sent the second alone; any rank's first part and a lost rank's second make its state again.

    part = head (what is in it, JSON) | blobs (pickles) | tensors          every range starts at a multiple of 64
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dalsegno.train.errors import CheckpointError
from dalsegno.train.memory.record import HEADER
from dalsegno.train.state import Piece, State

ALIGN = 64
SHELL, VALUES, OWN = "shell", "values", "own"


def aligned(size: int, to: int = ALIGN) -> int:
    return -(-size // to) * to


@dataclass(frozen=True)
class Placed:
    """A piece without its bytes, and where they lie, counted from the end of the part's head."""

    order: int  # its place among all pieces of the state
    key: str
    dtype: str
    shape: tuple[int, ...]
    size: tuple[int, ...]
    offsets: tuple[int, ...]
    shared: bool
    writes: bool
    at: int
    length: int


@dataclass(frozen=True)
class Blob:
    name: str
    at: int
    length: int


@dataclass(frozen=True)
class Contents:
    """What a head tells."""

    blobs: tuple[Blob, ...]
    pieces: tuple[Placed, ...]


@dataclass(frozen=True)
class Part:
    """One part, laid out: its head, its blobs with their bytes, its pieces."""

    head: bytes
    blobs: tuple[tuple[Blob, bytes], ...]
    pieces: tuple[Placed, ...]
    length: int

    @property
    def body_at(self) -> int:
        return aligned(len(self.head))


@dataclass(frozen=True)
class Layout:
    shared: Part | None  # None where another rank of the node keeps it
    own: Part

    @property
    def own_at(self) -> int:
        return HEADER + (self.shared.length if self.shared else 0)

    @property
    def total(self) -> int:
        return self.own_at + self.own.length


def lay_out(state: State, with_shared: bool = True) -> Layout:
    pieces = list(enumerate(state.pieces))
    own = _part([(OWN, state.own)], [(order, piece) for order, piece in pieces if not piece.shared])
    if not with_shared:
        return Layout(None, own)
    blobs = [(SHELL, state.shell), (VALUES, pickle.dumps(dict(state.values)))]
    return Layout(_part(blobs, [(order, piece) for order, piece in pieces if piece.shared]), own)


def parse_head(head: bytes) -> Contents:
    """The reverse of a part's head."""
    told = json.loads(head)
    pieces = tuple(_placed_again(*fields) for fields in told["pieces"])
    return Contents(tuple(Blob(*blob) for blob in told["blobs"]), pieces)


def _part(named: Sequence[tuple[str, bytes]], pieces: Iterable[tuple[int, Piece]]) -> Part:
    at, blobs, placed = 0, [], []
    for name, blob in named:
        blobs.append((Blob(name, at, len(blob)), blob))
        at = aligned(at + len(blob))
    for order, piece in pieces:
        placed.append(_placed(order, piece, at))
        at = aligned(at + placed[-1].length)
    head = json.dumps({"blobs": [_fields(blob) for blob, _ in blobs], "pieces": [_fields(piece) for piece in placed]})
    return Part(head.encode(), tuple(blobs), tuple(placed), aligned(len(head.encode())) + at)


def _placed(order: int, piece: Piece, at: int) -> Placed:
    tensor = piece.tensor
    if tensor.is_sparse or tensor.is_quantized or tensor.is_nested:
        raise CheckpointError(f"{piece.key} is no dense tensor", "only dense tensors can be kept")
    dtype, length = str(tensor.dtype).replace("torch.", ""), tensor.numel() * tensor.element_size()
    shape, size, offsets = tuple(tensor.shape), tuple(piece.size), tuple(piece.offsets)
    return Placed(order, piece.key, dtype, shape, size, offsets, piece.shared, piece.writes, at, length)


def _fields(value: Placed | Blob) -> list[object]:
    return list(vars(value).values())


def _placed_again(order: int, key: str, dtype: str, *fields: Any) -> Placed:
    shape, size, offsets, *rest = fields
    return Placed(order, key, dtype, tuple(shape), tuple(size), tuple(offsets), *rest)
