"""Write a rank's share of a checkpoint: one data file, and a part file that describes it for rank 0."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dalsegno.train.disk.files import ChecksummedFile, remove_tree, report_disk_errors, unlink, write_durably
from dalsegno.train.disk.format import (
    SHELL,
    Chunk,
    DataEntry,
    PathStep,
    RankPart,
    TemporaryName,
    data_name,
    failed_name,
    own_key,
    part_name,
    render_part,
)
from dalsegno.train.state import TensorPiece, TrainingState

# Division of the work. Every rank computes the same result independently

MIN_ENTRY_BYTES = 64 * 1024  # splitting into smaller entries costs more time than the better balance saves


class Shared(NamedTuple):
    """A tensor that every rank has in full."""

    key: str
    size: tuple[int, ...]
    itemsize: int

    @property
    def bytes(self) -> int:
        return math.prod(self.size) * self.itemsize


class Slice(NamedTuple):
    """Rows `start` to `stop` along dimension `dim` of a tensor. A slice may be the whole tensor."""

    key: str
    dim: int
    start: int
    stop: int


def divide(tensors: Sequence[Shared], world: int) -> list[list[Slice]]:
    """Return the slices that each rank writes: every tensor once, and about the same number of bytes per rank."""
    shares: list[list[Slice]] = [[] for _ in range(world)]
    total = sum(tensor.bytes for tensor in tensors)
    at = 0
    for tensor in sorted(tensors):
        for rank, piece in _cut(tensor, at, total, world):
            shares[rank].append(piece)
        at += tensor.bytes
    return shares


def split_dim(size: Sequence[int]) -> int:
    """Return the first dimension with more than one row. Slices along it are contiguous in memory."""
    return next((dim for dim, rows in enumerate(size) if rows != 1), 0)


def _cut(tensor: Shared, at: int, total: int, world: int) -> list[tuple[int, Slice]]:
    dim = split_dim(tensor.size)
    rows = tensor.size[dim] if tensor.size else 1
    if tensor.bytes <= MIN_ENTRY_BYTES or rows < 2:
        return [(_owner(at + tensor.bytes // 2, total, world), Slice(tensor.key, dim, 0, rows))]
    first, last = _owner(at, total, world), _owner(at + tensor.bytes - 1, total, world)
    cuts = [0, *(_row(tensor, rows, total * rank // world - at) for rank in range(first + 1, last + 1)), rows]
    spans = zip(range(first, last + 1), cuts, cuts[1:])
    return [(rank, Slice(tensor.key, dim, start, stop)) for rank, start, stop in spans if start < stop]


def _row(tensor: Shared, rows: int, byte: int) -> int:
    """Return the row that is nearest to the byte offset `byte`.

    Near an end of the tensor, return that end, so that no rank writes a tiny slice.
    """
    if byte < MIN_ENTRY_BYTES:
        return 0
    if tensor.bytes - byte < MIN_ENTRY_BYTES:
        return rows
    return round(byte * rows / tensor.bytes)


def _owner(byte: int, total: int, world: int) -> int:
    return min(world - 1, byte * world // total) if total else 0


# Data file, as PyTorch's distributed checkpoint writes it: every entry is a small torch.save file


def write_entries(file: ChecksummedFile, state: TrainingState) -> list[DataEntry]:
    """Write this rank's slices of the tensors and its own state, and return the entries.

    Rank 0 also writes the values that are not tensors.
    """
    with _without_torchs_checksums():
        return [
            *(_write_entry(file, key, value) for key, value in _values(state)),
            *(_write_chunk(file, piece, part) for piece, part in _share(state)),
        ]


def _values(state: TrainingState) -> Iterator[tuple[str, object]]:
    if state.own:
        yield own_key(state.rank), state.own
    if state.rank == 0:
        yield SHELL, state.shell
        yield from state.values.items()


def _share(state: TrainingState) -> Iterator[tuple[TensorPiece, Slice]]:
    shared = {piece.key: piece for piece in state.pieces if piece.shared}
    tensors = [Shared(piece.key, piece.size, piece.tensor.element_size()) for piece in shared.values()]
    for part in divide(tensors, state.world)[state.rank]:
        yield shared[part.key], part
    for piece in state.pieces:
        if not piece.shared and piece.writes and (piece.tensor.numel() or not math.prod(piece.size)):
            yield piece, Slice(piece.key, 0, 0, piece.tensor.shape[0] if piece.tensor.dim() else 1)


def _write_chunk(file: ChecksummedFile, piece: TensorPiece, part: Slice) -> DataEntry:
    data = _dense_slice(piece.tensor, part)
    offsets = list(piece.offsets)
    if offsets:
        offsets[part.dim] += part.start
    dtype = str(data.dtype).replace("torch.", "")
    chunk = Chunk(dtype, tuple(piece.size), tuple(offsets), tuple(data.shape))
    return _write_entry(file, piece.key, data, chunk)


def _dense_slice(tensor: torch.Tensor, part: Slice) -> torch.Tensor:
    """Return the slice as a tensor whose storage contains nothing else, because torch.save writes whole storages.

    A dense tensor in host memory is not copied.
    """
    dense = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
    if dense.dim():
        dense = dense.narrow(part.dim, part.start, part.stop - part.start)
    start = dense.storage_offset() * dense.element_size()
    alone = dense.untyped_storage()[start : start + dense.numel() * dense.element_size()]
    return torch.empty(0, dtype=dense.dtype).set_(alone, 0, dense.shape, dense.stride())


def _write_entry(file: ChecksummedFile, key: str, value: Any, chunk: Any = None) -> DataEntry:
    at = file.position
    torch.save(value, file)
    file.check()
    return DataEntry(key, at, file.position - at, chunk)


@contextlib.contextmanager
def _without_torchs_checksums() -> Iterator[None]:
    """Turn off the CRC-32 of torch.save (2.6 and later). No loader reads it, and our checksum covers the same bytes."""
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


# Fingerprints of tensors, which show where ranks differ

SAMPLES = 1024  # about this many elements are read from each tensor


def fingerprint_shared(state: TrainingState) -> dict[str, int]:
    """Return the fingerprints of all shared tensors; an empty dict if there is only one rank."""
    shared = [piece for piece in state.pieces if piece.shared] if state.world > 1 else []
    return {piece.key: fingerprint(piece.tensor) for piece in shared}


def fingerprint(tensor: torch.Tensor) -> int:
    flat = tensor.detach().flatten()
    some = flat[:: max(1, flat.numel() // SAMPLES)].cpu().resolve_conj().resolve_neg().contiguous()
    numbers = some.view(torch.uint8).to(torch.int64)
    return int((numbers * (torch.arange(len(numbers)) * 2 + 1)).sum())  # weighted, so that swapped values differ


def describe_difference(parts: Sequence[RankPart]) -> str:
    """Return a warning about tensors that differ between ranks; an empty string if there are none."""
    first = min(parts, key=lambda part: part.rank)
    unlike = {key: part.rank for part in parts for key, value in part.prints.items() if first.prints.get(key) != value}
    if not unlike:
        return ""
    (key, rank), others = next(iter(unlike.items())), len(unlike) - 1
    also = f" and {others} more" if others else ""
    return (
        f"ranks {first.rank} and {rank} have different values of {key}{also}: a checkpoint has every tensor once, with"
        " parts from different ranks. Pass per-rank state as per_rank={'name': object}, or as a DTensor (FSDP2)"
    )


def find_paths(shell: bytes, keys: Collection[str]) -> dict[str, tuple[PathStep, ...]]:
    """Return the path of each key in the nested state; an empty dict if the shell cannot be unpickled here.

    torch needs the paths to rebuild the state without a model.
    """
    try:
        nested = pickle.loads(shell)
    except Exception:  # the state contains classes that only the training script has
        return {}
    found: dict[str, tuple[PathStep, ...]] = {}

    def walk(path: tuple[PathStep, ...], value: Any) -> None:
        key = ".".join(map(str, path))
        if key in keys:
            found[key] = path
        elif isinstance(value, Mapping):
            for name, each in value.items():
                walk((*path, str(name)), each)
        elif isinstance(value, (list, tuple)):
            for place, each in enumerate(value):
                walk((*path, place), each)

    walk((), nested)
    return found


# A rank's share of a checkpoint


def write_share(folder: Path, state: TrainingState, run: str, generation: int) -> None:
    """Write this rank's share, which rank 0 later commits with all others.

    A run must not use a generation number twice. The calling process may be the worker or its saver. A failure raises
    CheckpointError and leaves no data of this rank behind.
    """
    temporary = folder / TemporaryName(state.step, run, generation).name
    try:
        with report_disk_errors("cannot write the checkpoint", folder):
            _make(temporary)
            _write(temporary, state)
    except BaseException as error:
        _abandon(temporary, state.rank, error)
        raise


def _make(temporary: Path) -> None:
    """Create the folder but not its parents, because a missing parent may be an unmounted file system."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(temporary)


def _write(temporary: Path, state: TrainingState) -> None:
    _remove_files(temporary, state.rank)
    name = data_name(state.rank)
    with ChecksummedFile(temporary / name) as file:
        entries = write_entries(file, state)
        mark = file.finish()
    paths = find_paths(state.shell, {*state.values, *(piece.key for piece in state.pieces)}) if state.rank == 0 else {}
    part = RankPart(
        state.rank, state.world, name, mark, entries, str(torch.__version__), paths, fingerprint_shared(state)
    )
    write_durably(temporary / part_name(state.rank), render_part(part))


def _remove_files(temporary: Path, rank: int) -> None:
    for name in (part_name(rank), failed_name(rank), data_name(rank)):
        unlink(temporary / name)


def _abandon(temporary: Path, rank: int, error: BaseException) -> None:
    """Clean up after a failure.

    Rank 0 removes the folder, because only rank 0 could commit it. Any other rank writes its error to a file for rank
    0.
    """
    if rank == 0:
        remove_tree(temporary)
        return
    with contextlib.suppress(OSError):
        _remove_files(temporary, rank)
    with contextlib.suppress(OSError):
        (temporary / failed_name(rank)).write_text(str(error))
