"""The layout of a state in a slot. The module converts a state into byte ranges and back, without I/O.

A snapshot has two contiguous parts: the shared part, which every rank has, and the own part, which only this rank has.
A buddy gets only the own part. Any rank's shared part and a lost rank's own part together restore the lost rank.

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
from dalsegno.train.state import TensorPiece, TrainingState

ALIGN = 64
SHELL, VALUES, OWN = "shell", "values", "own"


def aligned(size: int, to: int = ALIGN) -> int:
    return -(-size // to) * to


@dataclass(frozen=True)
class PlacedPiece:
    """The description of one piece of a tensor, and the position of its bytes after the head of the part."""

    order: int  # index of the piece among all pieces of the state
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
    """The pieces and blobs of a part, as its head lists them."""

    blobs: tuple[Blob, ...]
    pieces: tuple[PlacedPiece, ...]


@dataclass(frozen=True)
class LaidOutPart:
    """The layout of one part: its head, its blobs with their contents, and its pieces."""

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
    """Return the contents that the head of a part lists."""
    contents = json.loads(head)
    pieces = tuple(_placed(*fields) for fields in contents["pieces"])
    return Contents(tuple(Blob(*blob) for blob in contents["blobs"]), pieces)


def _part(named: Sequence[tuple[str, bytes]], pieces: Iterable[tuple[int, TensorPiece]]) -> LaidOutPart:
    placed = _place(tuple(_fields(order, piece) for order, piece in pieces))
    at, blobs = placed.end, []
    for name, blob in named:
        blobs.append((Blob(name, at, len(blob)), blob))
        at = aligned(at + len(blob))
    listed = json.dumps([list(vars(blob).values()) for blob, _ in blobs])
    head = f'{{"blobs": {listed}, "pieces": {placed.json}}}'.encode()
    return LaidOutPart(head, tuple(blobs), placed.pieces, aligned(len(head)) + at)


@dataclass(frozen=True)
class _Places:
    pieces: tuple[PlacedPiece, ...]
    json: str  # the pieces as JSON
    end: int


@lru_cache(maxsize=8)
def _place(pieces: tuple[tuple[Any, ...], ...]) -> _Places:
    """Compute the position of each piece. The result is cached, because training waits for it and it rarely changes."""
    at, placed = 0, []
    for *fields, dtype, length in pieces:
        placed.append(_placed(*fields, str(dtype).replace("torch.", ""), at, length))
        at = aligned(at + length)
    return _Places(tuple(placed), json.dumps([list(vars(piece).values()) for piece in placed]), at)


def _fields(order: int, piece: TensorPiece) -> tuple[Any, ...]:
    tensor = piece.tensor
    if tensor.is_sparse or tensor.is_quantized or tensor.is_nested:
        raise CheckpointError(f"{piece.key} is not a dense tensor", "only dense tensors can be saved")
    fields = (order, piece.key, piece.shared, piece.writes, tensor.shape, tuple(piece.size), tuple(piece.offsets))
    return (*fields, tensor.dtype, tensor.nbytes)


def _placed(order: int, key: str, shared: bool, writes: bool, *fields: Any) -> PlacedPiece:
    shape, size, offsets, *rest = fields
    return PlacedPiece(order, key, shared, writes, tuple(shape), tuple(size), tuple(offsets), *rest)
