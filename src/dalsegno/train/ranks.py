"""The rank, run and generation of this process, and the store through which ranks agree."""

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

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]")


@dataclass(frozen=True)
class RankPlace:
    run: str  # stays the same after a restart; empty if the run has no name
    generation: int
    rank: int
    world: int
    local_world: int
    fresh: bool


def find_where(environ: Mapping[str, str] = os.environ) -> RankPlace:
    """Read the rank and run from the environment.

    `dalsegno run`, torchrun and other launchers set RANK and WORLD_SIZE. Without them, this is the only rank.
    """
    try:
        return RankPlace(
            run=_run(environ),
            generation=_generation(environ),
            rank=int(environ.get("RANK") or 0),
            world=int(environ.get("WORLD_SIZE") or 1),
            local_world=int(environ.get("LOCAL_WORLD_SIZE") or 1),
            fresh=environ.get(contract.FRESH) == "1",
        )
    except ValueError as error:
        raise CheckpointError(f"RANK, WORLD_SIZE or a similar variable is not a number: {error}") from None


def _generation(environ: Mapping[str, str]) -> int:
    """Return the generation, counted from 1. torchrun counts restarts instead."""
    return int(environ.get(contract.GENERATION) or int(environ.get("TORCHELASTIC_RESTART_COUNT") or 0) + 1)


def _run(environ: Mapping[str, str]) -> str:
    """Return the run's name; empty if it has none. torchrun uses the id `none` for a run without a name."""
    name = environ.get("TORCHELASTIC_RUN_ID") or ""
    return environ.get(contract.RUN) or ("" if name == "none" else _NOT_IN_NAMES.sub("-", name)[:100])


def locate_process() -> RankPlace:
    """Return the rank and run of this process, with its rank in the process group if there is one."""
    where, group = find_where(), torch.distributed
    if group.is_available() and group.is_initialized():
        where = dataclasses.replace(where, rank=group.get_rank(), world=group.get_world_size())
        keep(group.group.WORLD)
    elif where.world > 1:
        raise CheckpointError(
            f"this is one of {where.world} ranks, but there is no process group yet",
            hint="call torch.distributed.init_process_group before Checkpointer",
        )
    return where


def with_run_name(where: RankPlace, name: str) -> RankPlace:
    """Return `where` with this name if the run has none."""
    return where if where.run else dataclasses.replace(where, run=name)


# The rank store, in which the ranks of a run agree on the step to stop at, when to save and what to load

GATHER_TIMEOUT = timedelta(hours=1)  # so long, because a disk can be slow; if a rank dies, the launcher ends the run


class RankStore(Protocol):
    def read(self) -> dict[str, Any]:
        """Return all entries."""
        ...

    def write(self, name: str, value: Any, replace: bool = True) -> None:
        """Write an entry. Without `replace`, the first writer wins."""
        ...

    def gather(self, subject: str, value: Any) -> list[Any]:
        """Publish this rank's value for a subject, and return the values of all ranks. Use each subject once."""
        ...


class LocalRankStore:
    """The store of a run with one rank."""

    def __init__(self) -> None:
        self._entries: dict[str, Any] = {}

    def read(self) -> dict[str, Any]:
        return dict(self._entries)

    def write(self, name: str, value: Any, replace: bool = True) -> None:
        if replace or name not in self._entries:
            self._entries[name] = value

    def gather(self, subject: str, value: Any) -> list[Any]:
        return [value]


class TorchRankStore:
    """A store inside torch's rendezvous store, which every process group has and which needs no GPU."""

    def __init__(self, store: Any, rank: int, world: int, number: int = 0) -> None:
        self._store, self._rank, self._world = store, rank, world
        self._prefix = f"dalsegno/{number}"
        self._store.compare_set(f"{self._prefix}/board", "", "{}")

    def read(self) -> dict[str, Any]:
        entries: dict[str, Any] = json.loads(self._store.get(f"{self._prefix}/board"))
        return entries

    def write(self, name: str, value: Any, replace: bool = True) -> None:
        found = self._store.get(f"{self._prefix}/board").decode()
        while True:
            entries = json.loads(found)
            if name in entries and not replace:
                return
            wanted = json.dumps({**entries, name: value})
            now = self._store.compare_set(f"{self._prefix}/board", found, wanted).decode()
            if now == wanted:
                return
            found = now

    def gather(self, subject: str, value: Any) -> list[Any]:
        """Gather the values of all ranks.

        The first rank reads all values and writes them as one list. The number of messages therefore grows with the
        number of ranks, and not with its square.
        """
        key = f"{self._prefix}/{subject}"
        self._store.set(f"{key}/{self._rank}", json.dumps(value))
        if self._rank == 0:
            every = [json.loads(self._wait_for(f"{key}/{rank}")) for rank in range(self._world)]
            self._store.set(key, json.dumps(every))
        values: list[Any] = json.loads(self._wait_for(key))
        return values

    def _wait_for(self, key: str) -> bytes:
        """Wait for an entry and return it.

        The timeout for collectives is not used, because it is too short for a slow disk.
        """
        self._store.wait([key], GATHER_TIMEOUT)
        value: bytes = self._store.get(key)
        return value


_store_numbers = itertools.count()


def open_rank_store(rank: int, world: int) -> RankStore:
    """Return a new store for the process group. All ranks must open their stores in the same order."""
    if world == 1:
        return LocalRankStore()
    from torch.distributed.distributed_c10d import _get_default_store

    return TorchRankStore(_get_default_store(), rank, world, next(_store_numbers))
