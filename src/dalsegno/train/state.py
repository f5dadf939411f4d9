"""A training state as one value: what this rank holds of every tensor, and all that is not a tensor."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dalsegno.train.nested import empty_out, fill_in
from dalsegno.train.shards import part_of

Unpickle = Callable[[bytes], Any]


@dataclass(frozen=True)
class Piece:
    """What this rank holds of one tensor."""

    key: str  # as PyTorch's distributed checkpoint names it: "model.layers.0.weight"
    tensor: torch.Tensor
    size: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]  # of this part in it
    shared: bool  # every rank holds the same: writers divide it among themselves
    writes: bool = True  # False: another rank writes this very part (hybrid sharding)


@dataclass(frozen=True)
class State:
    """What a run needs to go on from a step as if nothing had happened."""

    step: int  # steps that are done; training goes on with this one
    rank: int
    world: int
    pieces: tuple[Piece, ...]
    shell: bytes  # pickled: the nested state dicts, with a hole for each tensor; the same on all ranks
    own: bytes  # pickled: what only this rank has (random numbers, its place in the data)
    values: Mapping[str, object]  # leaves of the shell that are no tensors, by name: for torch's own loader


def take(nested: Mapping[str, Any], own: object, step: int, rank: int, world: int, apart: Container[str] = ()) -> State:
    """The state as it is now. Nothing is copied: the tensors are the living ones.

    `apart`: names of tensors that may differ between ranks. Each keeps its own; on disk it is the first one's.
    """
    shell, tensors, values = empty_out(nested)
    pieces = tuple(_piece(key, tensor, rank, key in apart) for key, tensor in tensors.items())
    return State(step, rank, world, pieces, pickle.dumps(shell), pickle.dumps(own), values)


def put_together(
    shell: bytes, tensors: Mapping[str, torch.Tensor], unpickle: Unpickle = pickle.loads
) -> dict[str, Any]:
    """The nested state dicts again, for `load_state_dict`."""
    nested: dict[str, Any] = fill_in(unpickle(shell), tensors)
    return nested


def _piece(key: str, tensor: torch.Tensor, rank: int, apart: bool) -> Piece:
    part = part_of(key, tensor)
    if apart and part.shared:
        return Piece(key, part.tensor.detach(), part.size, part.offsets, shared=False, writes=rank == 0)
    return Piece(key, part.tensor.detach(), part.size, part.offsets, part.shared, part.writes)
