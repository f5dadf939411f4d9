"""Tensors filled from a checkpoint by torch's own planner and reader, without a process group."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from dalsegno.train.errors import CheckpointError


def fill(checkpoint: Path, metadata: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    from dalsegno.train.disk.mapped import MappedReader

    _refuse_misfits(metadata.state_dict_metadata, tensors)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with warnings.catch_warnings(), _in_our_words(checkpoint):
        warnings.filterwarnings("ignore", message="torch.distributed is")  # that it reads alone is what we want
        dcp.load(dict(tensors), storage_reader=MappedReader(checkpoint, metadata), planner=planner, no_dist=True)


@contextlib.contextmanager
def _in_our_words(checkpoint: Path) -> Iterator[None]:
    """torch packs whatever fails into an error of its own, a BaseException at that."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        why = "; ".join(f"{type(cause).__name__}: {cause}" for cause, _ in error.failures.values())
        raise CheckpointError(f"cannot read {checkpoint}: {why}") from error


def _refuse_misfits(items: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    missing = sorted(key for key in tensors if not hasattr(items.get(key), "chunks"))
    if missing:
        raise CheckpointError(f"the checkpoint has no {_few(missing)}", hint="has the model or the optimizer changed?")
    for key, tensor in tensors.items():
        if tuple(items[key].size) != tuple(tensor.shape):
            was, now = tuple(items[key].size), tuple(tensor.shape)
            raise CheckpointError(f"{key} has size {now}, but {was} in the checkpoint", hint="has the model changed?")


def _few(keys: list[str]) -> str:
    return ", ".join(keys[:5]) + (f" and {len(keys) - 5} more" if len(keys) > 5 else "")
