"""Who writes what: every rank works it out alone and finds the same, so nobody has to be asked.

All shared tensors are laid end to end on a line of bytes, and the line is cut into as many equal parts as there are
ranks. A cut falls between rows of a tensor; one that would leave a crumb moves to the tensor's edge.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

CRUMB = 64 * 1024  # bytes: below this one entry costs more than it evens out


class Shared(NamedTuple):
    """A tensor that every rank has in whole."""

    key: str
    size: tuple[int, ...]
    itemsize: int

    @property
    def bytes(self) -> int:
        return math.prod(self.size) * self.itemsize


class Slice(NamedTuple):
    """Rows `start` to `stop` along dimension `dim` of a tensor; a whole one has all rows of its dimension."""

    key: str
    dim: int
    start: int
    stop: int


def divide(tensors: Sequence[Shared], world: int) -> list[list[Slice]]:
    """For each rank the slices it writes: together every tensor once, each rank about the same number of bytes."""
    shares: list[list[Slice]] = [[] for _ in range(world)]
    total = sum(tensor.bytes for tensor in tensors)
    at = 0
    for tensor in sorted(tensors):
        for rank, piece in _cut(tensor, at, total, world):
            shares[rank].append(piece)
        at += tensor.bytes
    return shares


def split_dim(size: Sequence[int]) -> int:
    """The first dimension with more than one row: slices along it lie in one piece in memory."""
    return next((dim for dim, rows in enumerate(size) if rows != 1), 0)


def _cut(tensor: Shared, at: int, total: int, world: int) -> list[tuple[int, Slice]]:
    dim = split_dim(tensor.size)
    rows = tensor.size[dim] if tensor.size else 1
    if tensor.bytes <= CRUMB or rows < 2:
        return [(_owner(at + tensor.bytes // 2, total, world), Slice(tensor.key, dim, 0, rows))]
    first, last = _owner(at, total, world), _owner(at + tensor.bytes - 1, total, world)
    cuts = [0, *(_row(tensor, rows, total * rank // world - at) for rank in range(first + 1, last + 1)), rows]
    spans = zip(range(first, last + 1), cuts, cuts[1:])
    return [(rank, Slice(tensor.key, dim, start, stop)) for rank, start, stop in spans if start < stop]


def _row(tensor: Shared, rows: int, byte: int) -> int:
    """The row at which a cut wanted at `byte` is made."""
    if byte < CRUMB:
        return 0
    if tensor.bytes - byte < CRUMB:
        return rows
    return round(byte * rows / tensor.bytes)


def _owner(byte: int, total: int, world: int) -> int:
    return min(world - 1, byte * world // total) if total else 0
