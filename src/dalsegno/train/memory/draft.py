"""A snapshot on its way into a slot."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterable

import torch

from dalsegno.train.memory.layout import Layout, Part, lay_out
from dalsegno.train.memory.record import HEADER, Extent, Record
from dalsegno.train.memory.slot import Slot
from dalsegno.train.state import State

Pair = tuple[torch.Tensor, torch.Tensor]  # where to, where from


class Draft:
    """The slot is open: all but the tensors is in it. Copy the pairs, by whatever means, then commit."""

    def __init__(self, slot: Slot, pairs: list[Pair], record: Record) -> None:
        self.slot, self.pairs, self.record = slot, pairs, record

    def commit(self) -> Record:
        """Only now does the slot hold the snapshot. All copies must be complete."""
        self.slot.commit(self.record)
        return self.record


def begin(slot: Slot, state: State, generation: int, layout: Layout | None = None) -> Draft | None:
    """Open the slot for this state; None while someone still reads what is in it."""
    layout = layout or lay_out(state)
    slot.make_fit(layout.total)
    if not slot.begin():
        return None
    pairs = _put(slot, layout.own, layout.own_at, state) + _put(slot, layout.shared, HEADER, state)
    return Draft(slot, pairs, record_of(state, layout, generation))


def write(slot: Slot, state: State, generation: int, layout: Layout | None = None) -> Record | None:
    """The whole of it, for tensors in this machine's memory."""
    draft = begin(slot, state, generation, layout)
    if draft is None:
        return None
    copy_now(draft.pairs)
    return draft.commit()


def copy_now(pairs: Iterable[Pair]) -> None:
    """torch divides each large copy among its threads."""
    with torch.no_grad():
        for target, source in pairs:
            target.copy_(source)


def record_of(state: State, layout: Layout, generation: int) -> Record:
    shared, own = _extent(layout.shared, HEADER), _extent(layout.own, layout.own_at)
    # The machine's own clock never goes back while its memory lives: no two snapshots bear one number.
    about = (state.step, generation, state.rank, state.world)
    return Record(time.monotonic_ns(), *about, shared, own, is_sharded(state, layout))


def is_sharded(state: State, layout: Layout) -> bool:
    """Whether the rank has a part of the model to itself. Statistics of its own batches are none; alone it has all."""
    return any(piece.shape != piece.size or state.world == 1 for piece in layout.own.pieces)


def _extent(part: Part, at: int) -> Extent:
    return Extent(at, part.length, len(part.head), zlib.crc32(part.head))


def _put(slot: Slot, part: Part, at: int, state: State) -> list[Pair]:
    body_at, buffer = at + part.body_at, slot.buffer
    buffer[at : at + len(part.head)] = part.head
    for blob, content in part.blobs:
        buffer[body_at + blob.at : body_at + blob.at + blob.length] = content
    sources = [state.pieces[piece.order].tensor for piece in part.pieces]
    return list(zip(slot.views.of(part.pieces, body_at), sources))
