"""Where this process stands among its ranks, once they know each other."""

from __future__ import annotations

import dataclasses

import torch

from dalsegno.train.errors import CheckpointError
from dalsegno.train.groups import keep
from dalsegno.train.where import Where, find_where


def stand() -> Where:
    where, group = find_where(), torch.distributed
    if group.is_available() and group.is_initialized():
        where = dataclasses.replace(where, rank=group.get_rank(), world=group.get_world_size())
        keep(group.group.WORLD)
    elif where.world > 1:
        raise CheckpointError(
            f"this is one of {where.world} ranks, but they do not know each other yet",
            hint="call torch.distributed.init_process_group before Checkpointer",
        )
    return where


def named(where: Where, name: str) -> Where:
    """A run that nobody named goes by a name that its first rank made up."""
    return where if where.run else dataclasses.replace(where, run=name)
