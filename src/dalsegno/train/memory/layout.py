"""Where each byte of a state goes. Pure: a state in, ranges out, and back.

A snapshot has two parts, each a run of bytes that can be moved on its own: what every rank has, and what only this
rank has. A buddy is sent the second alone; any rank's first part and a lost rank's second make its state again.

    part = head (what is in it, JSON) | tensors | blobs (pickles)          every range starts at a multiple of 64
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from dalsegno.train.errors import CheckpointError
from dalsegno.train.memory.record import HEADER
from dalsegno.train.state import Piece, TrainingState

ALIGN = 64
SHELL, VALUES, OWN = "shell", "values", "own"


def aligned(size: int, to: int = ALIGN) -> int:
    return -(-size // to) * to


@dataclass(frozen=True)
class PlacedPiece:
    """A piece without its bytes, and where they lie, counted from the end of the part's head."""

    order: int  # its place among all pieces of the state
    key: str
    shared: bool
    writes: bool
    shape: tuple[int, ...]
    size: tuple[int, ...]
    offsets: tuple[int, ...]
    dtype: str
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
    pieces: tuple[PlacedPiece, ...]


@dataclass(frozen=True)
class LaidOutPart:
    """One part, laid out: its head, its blobs with their bytes, its pieces."""

    head: bytes
    blobs: tuple[tuple[Blob, bytes], ...]
    pieces: tuple[PlacedPiece, ...]
    length: int

    @property
    def body_at(self) -> int:
        return aligned(len(self.head))


@dataclass(frozen=True)
class SlotLayout:
    shared: LaidOutPart
    own: LaidOutPart

    @property
    def own_at(self) -> int:
        return HEADER + self.shared.length

    @property
    def total(self) -> int:
        return self.own_at + self.own.length


def lay_out(state: TrainingState) -> SlotLayout:
    pieces = list(enumerate(state.pieces))
    own = _part([(OWN, state.own)], [(order, piece) for order, piece in pieces if not piece.shared])
    blobs = [(SHELL, state.shell), (VALUES, pickle.dumps(dict(state.values)))]
    return SlotLayout(_part(blobs, [(order, piece) for order, piece in pieces if piece.shared]), own)


def parse_head(head: bytes) -> Contents:
    """The reverse of a part's head."""
    told = json.loads(head)
    pieces = tuple(_placed(*fields) for fields in told["pieces"])
    return Contents(tuple(Blob(*blob) for blob in told["blobs"]), pieces)


def _part(named: Sequence[tuple[str, bytes]], pieces: Iterable[tuple[int, Piece]]) -> LaidOutPart:
    placed = _place(tuple(_told(order, piece) for order, piece in pieces))
    at, blobs = placed.end, []
    for name, blob in named:
        blobs.append((Blob(name, at, len(blob)), blob))
        at = aligned(at + len(blob))
    told = json.dumps([list(vars(blob).values()) for blob, _ in blobs])
    head = f'{{"blobs": {told}, "pieces": {placed.told}}}'.encode()
    return LaidOutPart(head, tuple(blobs), placed.pieces, aligned(len(head)) + at)


@dataclass(frozen=True)
class _Places:
    pieces: tuple[PlacedPiece, ...]
    told: str  # the same in JSON
    end: int


@lru_cache(maxsize=8)
def _place(pieces: tuple[tuple[Any, ...], ...]) -> _Places:
    """Remembered, because most states look like the one before: then nothing is computed while training waits."""
    at, placed = 0, []
    for *about, dtype, length in pieces:
        placed.append(_placed(*about, str(dtype).replace("torch.", ""), at, length))
        at = aligned(at + length)
    return _Places(tuple(placed), json.dumps([list(vars(piece).values()) for piece in placed]), at)


def _told(order: int, piece: Piece) -> tuple[Any, ...]:
    tensor = piece.tensor
    if tensor.is_sparse or tensor.is_quantized or tensor.is_nested:
        raise CheckpointError(f"{piece.key} is no dense tensor", "only dense tensors can be kept")
    about = (order, piece.key, piece.shared, piece.writes, tensor.shape, tuple(piece.size), tuple(piece.offsets))
    return (*about, tensor.dtype, tensor.nbytes)


def _placed(order: int, key: str, shared: bool, writes: bool, *fields: Any) -> PlacedPiece:
    shape, size, offsets, *rest = fields
    return PlacedPiece(order, key, shared, writes, tuple(shape), tuple(size), tuple(offsets), *rest)
