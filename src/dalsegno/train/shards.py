"""Which part of a tensor this rank holds: all of it, or its shard of a DTensor."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dalsegno.train.errors import CheckpointError


class Part(NamedTuple):
    tensor: torch.Tensor
    size: tuple[int, ...]
    offsets: tuple[int, ...]
    shared: bool
    writes: bool


def part_of(key: str, tensor: torch.Tensor) -> Part:
    if is_sharded(tensor):
        return _shard(tensor)
    if type(tensor).__name__ == "ShardedTensor":
        raise CheckpointError(
            f"{key} is a ShardedTensor (FSDP1), which is not supported",
            hint="use fully_shard (FSDP2), or FullyShardedDataParallel(use_orig_params=True) with a full state dict",
        )
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    size = tuple(whole.shape)
    return Part(whole, size, (0,) * len(size), shared=True, writes=True)


def is_sharded(tensor: torch.Tensor) -> bool:
    """A DTensor of which this rank has only a part."""
    placements = getattr(tensor, "placements", ())
    return any(placement.is_shard() for placement in placements)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What of it is on this rank."""
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def with_local(like: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """A DTensor laid out as `like`, whose part on this rank is `local`."""
    from torch.distributed.tensor import DTensor

    assert isinstance(like, DTensor)
    mesh, placements = like.device_mesh, like.placements
    local = local.to(like.device)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())


def _shard(tensor: torch.Tensor) -> Part:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    assert isinstance(tensor, DTensor)
    mesh, placements = tensor.device_mesh, tensor.placements
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    place = mesh.get_coordinate() or []
    first = all(at == 0 for at, placement in zip(place, placements) if placement.is_replicate())
    return Part(tensor.to_local(), tuple(tensor.shape), tuple(offsets), shared=False, writes=first)
