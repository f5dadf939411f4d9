"""Where this process stands among its ranks, once they know each other."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch

from dalsegno.train import contract
from dalsegno.train.errors import CheckpointError
from dalsegno.train.groups import keep

# ---- Where this process stands: its rank, its run, its generation, and who launched it.


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


# ---- Where this process stands among its ranks, once they know each other.


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


# ---- Where the ranks of a run agree: on the step to stop at, on when to save, on what to load.


PATIENCE = timedelta(hours=1)  # whoever launched the ranks ends them long before if one has died


class Board(Protocol):
    def read(self) -> dict[str, Any]:
        """All that stands on it."""
        ...

    def write(self, word: str, value: Any, replace: bool = True) -> None:
        """Without `replace`, the first to write a word wins."""
        ...

    def gather(self, subject: str, value: Any) -> list[Any]:
        """What every rank has to say to a subject, by rank. Each subject once."""
        ...


class OwnBoard:
    """Of a run with one rank."""

    def __init__(self) -> None:
        self._words: dict[str, Any] = {}

    def read(self) -> dict[str, Any]:
        return dict(self._words)

    def write(self, word: str, value: Any, replace: bool = True) -> None:
        if replace or word not in self._words:
            self._words[word] = value

    def gather(self, subject: str, value: Any) -> list[Any]:
        return [value]


class StoreBoard:
    """In the store through which the ranks found each other: it is there already, and no GPU waits for it."""

    def __init__(self, store: Any, rank: int, world: int, number: int = 0) -> None:
        self._store, self._rank, self._world = store, rank, world
        self._name = f"dalsegno/{number}"
        self._store.compare_set(f"{self._name}/board", "", "{}")

    def read(self) -> dict[str, Any]:
        words: dict[str, Any] = json.loads(self._store.get(f"{self._name}/board"))
        return words

    def write(self, word: str, value: Any, replace: bool = True) -> None:
        found = self._store.get(f"{self._name}/board").decode()
        while True:
            words = json.loads(found)
            if word in words and not replace:
                return
            wanted = json.dumps({**words, word: value})
            now = self._store.compare_set(f"{self._name}/board", found, wanted).decode()
            if now == wanted:
                return
            found = now

    def gather(self, subject: str, value: Any) -> list[Any]:
        """Each writes, the first rank reads them all and writes the whole: N messages, not N times N."""
        place = f"{self._name}/{subject}"
        self._store.set(f"{place}/{self._rank}", json.dumps(value))
        if self._rank == 0:
            every = [json.loads(self._awaited(f"{place}/{rank}")) for rank in range(self._world)]
            self._store.set(place, json.dumps(every))
        told: list[Any] = json.loads(self._awaited(place))
        return told

    def _awaited(self, key: str) -> bytes:
        """A store gives up after the timeout that the script chose for its collectives; a disk may take longer."""
        self._store.wait([key], PATIENCE)
        value: bytes = self._store.get(key)
        return value


_boards = itertools.count()


def open_board(rank: int, world: int) -> Board:
    """Of this process's group, a new one each time: ranks open their first together, then their second."""
    if world == 1:
        return OwnBoard()
    from torch.distributed.distributed_c10d import _get_default_store

    return StoreBoard(_get_default_store(), rank, world, next(_boards))
