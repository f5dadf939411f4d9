"""Where this process stands: its rank, its run, its generation, and who launched it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from dalsegno.train import contract
from dalsegno.train.errors import CheckpointError

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]")


@dataclass(frozen=True)
class Where:
    run: str  # the same for every life of a run; empty if nobody named it
    generation: int
    rank: int
    world: int
    local_world: int
    fresh: bool


def find_where(environ: Mapping[str, str] = os.environ) -> Where:
    """Under `dalsegno run`, torchrun, anything else that sets RANK and WORLD_SIZE, or alone."""
    try:
        return Where(
            run=_run(environ),
            generation=_generation(environ),
            rank=int(environ.get("RANK") or 0),
            world=int(environ.get("WORLD_SIZE") or 1),
            local_world=int(environ.get("LOCAL_WORLD_SIZE") or 1),
            fresh=environ.get(contract.FRESH) == "1",
        )
    except ValueError as error:
        raise CheckpointError(f"RANK, WORLD_SIZE or the like is not a number: {error}") from None


def _generation(environ: Mapping[str, str]) -> int:
    """From 1. torchrun counts its restarts instead."""
    return int(environ.get(contract.GENERATION) or int(environ.get("TORCHELASTIC_RESTART_COUNT") or 0) + 1)


def _run(environ: Mapping[str, str]) -> str:
    """torchrun calls a run that nobody named `none`: every such run."""
    name = environ.get("TORCHELASTIC_RUN_ID") or ""
    return environ.get(contract.RUN) or ("" if name == "none" else _NOT_IN_NAMES.sub("-", name)[:100])
