"""A rank's data file as PyTorch's distributed checkpoint writes it: every entry a small torch.save file of its own."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch

from dalsegno.train.disk.names import SHELL, own_key
from dalsegno.train.disk.part import Chunk, Entry
from dalsegno.train.disk.share import Shared, Slice, divide
from dalsegno.train.disk.stream import ChecksummedFile
from dalsegno.train.state import Piece, State


def write_entries(file: ChecksummedFile, state: State) -> list[Entry]:
    """All that falls to this rank: its share of the tensors, what is its own, and on rank 0 the rest."""
    with _without_torchs_checksums():
        return [
            *(_write(file, key, value) for key, value in _values(state)),
            *(_write_chunk(file, piece, part) for piece, part in _share(state)),
        ]


def _values(state: State) -> Iterator[tuple[str, object]]:
    if state.own:
        yield own_key(state.rank), state.own
    if state.rank == 0:
        yield SHELL, state.shell
        yield from state.values.items()


def _share(state: State) -> Iterator[tuple[Piece, Slice]]:
    shared = {piece.key: piece for piece in state.pieces if piece.shared}
    tensors = [Shared(piece.key, piece.size, piece.tensor.element_size()) for piece in shared.values()]
    for part in divide(tensors, state.world)[state.rank]:
        yield shared[part.key], part
    for piece in state.pieces:
        if not piece.shared and piece.writes and (piece.tensor.numel() or not math.prod(piece.size)):
            yield piece, Slice(piece.key, 0, 0, piece.tensor.shape[0] if piece.tensor.dim() else 1)


def _write_chunk(file: ChecksummedFile, piece: Piece, part: Slice) -> Entry:
    data = _cut(piece.tensor, part)
    offsets = list(piece.offsets)
    if offsets:
        offsets[part.dim] += part.start
    dtype = str(data.dtype).replace("torch.", "")
    chunk = Chunk(dtype, tuple(piece.size), tuple(offsets), tuple(data.shape))
    return _write(file, piece.key, data, chunk)


def _cut(tensor: torch.Tensor, part: Slice) -> torch.Tensor:
    """The slice with a storage of its own: torch.save would write all that lies around a mere view. Not a copy."""
    dense = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
    if dense.dim():
        dense = dense.narrow(part.dim, part.start, part.stop - part.start)
    start = dense.storage_offset() * dense.element_size()
    alone = dense.untyped_storage()[start : start + dense.numel() * dense.element_size()]
    return torch.empty(0, dtype=dense.dtype).set_(alone, 0, dense.shape, dense.stride())


def _write(file: ChecksummedFile, key: str, value: Any, chunk: Any = None) -> Entry:
    at = file.position
    torch.save(value, file)
    file.check()
    return Entry(key, at, file.position - at, chunk)


@contextlib.contextmanager
def _without_torchs_checksums() -> Iterator[None]:
    """torch.save can leave out its own CRC-32 (2.6 and later), which no loader looks at: ours covers the same bytes."""
    choose = getattr(torch.serialization, "set_crc32_options", None)
    if choose is None:
        yield
        return
    before = torch.serialization.get_crc32_options()
    choose(False)
    try:
        yield
    finally:
        choose(before)
