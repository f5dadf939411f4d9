"""The parts of all ranks put together: `.metadata`, by which torch.distributed.checkpoint finds every tensor."""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from dalsegno.train.disk.part import Chunk, Entry, Part
from dalsegno.train.errors import CheckpointError


def merge(parts: Sequence[Part]) -> bytes:
    """Refuses what could not be loaded: a tensor of which something is missing, or that ranks see differently."""
    items: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for part in sorted(parts, key=lambda part: part.rank):
        for entry in part.entries:
            _add(items, places, entry, part.file)
    _refuse_gaps(items)
    metadata = Metadata(items, planner_data=_paths(parts, items), storage_data=places)
    metadata.version = "1.0.0"  # of DCP's format; older torch does not know the field
    return pickle.dumps(metadata)


def _add(items: dict[str, Any], places: dict[MetadataIndex, _StorageInfo], entry: Entry, file: str) -> None:
    chunk = entry.chunk
    index = MetadataIndex(entry.key, chunk.offsets if chunk else None)
    if index in places:
        return  # hybrid sharding: another rank has written the same
    places[index] = _StorageInfo(file, entry.at, entry.length)
    if chunk is None:
        items[entry.key] = BytesStorageMetadata()
        return
    known = items.setdefault(entry.key, _tensor(chunk))
    if (known.size, known.properties.dtype) != (torch.Size(chunk.size), _dtype(chunk)):
        raise CheckpointError(f"the ranks do not agree on size and type of {entry.key}")
    known.chunks.append(ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)))


def _tensor(chunk: Chunk) -> TensorStorageMetadata:
    return TensorStorageMetadata(TensorProperties(dtype=_dtype(chunk)), torch.Size(chunk.size), [])


def _dtype(chunk: Chunk) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, chunk.dtype)
    return dtype


def _refuse_gaps(items: dict[str, Any]) -> None:
    for key, item in items.items():
        if isinstance(item, TensorStorageMetadata):
            written = sum(math.prod(chunk.sizes) for chunk in item.chunks)
            if written != math.prod(item.size):
                raise CheckpointError(f"the ranks wrote {written} of the {math.prod(item.size)} elements of {key}")


def _paths(parts: Sequence[Part], items: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Where each key stands in the nested state; a name that nobody knows the path of is cut at its first dot."""
    known = {key: tuple(path) for part in parts for key, path in part.paths.items()}
    return {key: known.get(key) or tuple(key.split(".", 1)) for key in items}
