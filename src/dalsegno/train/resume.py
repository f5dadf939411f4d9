"""Resume a run from snapshots in memory or from a checkpoint on disk.

Memory is used if all ranks have a snapshot of the same step and no checkpoint on disk is newer. Otherwise the newest
intact checkpoint is used.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dalsegno.train.agent import AgentLink
from dalsegno.train.disk.load import FoundCheckpoint, all_damaged_error, find_newest_except, open_checkpoint
from dalsegno.train.disk.verify import byte_faults, check, list_steps
from dalsegno.train.errors import CheckpointError
from dalsegno.train.memory.snapshot import Snapshot, SnapshotVerdict, judge, open_snapshot, state_of
from dalsegno.train.ranks import RankStore
from dalsegno.train.state import Objects, TensorPiece, TrainingState, layout_for, local_part, with_local

# Checkpoints. Each rank reads and checks a part of the bytes, because a single rank could take hours

Warn = Callable[[str], None]


def find_together(folder: Path, rank_store: RankStore, rank: int, world: int, warn: Warn) -> FoundCheckpoint | None:
    """Return the newest intact checkpoint, the same on all ranks; None if there is no checkpoint.

    Damaged checkpoints are skipped, and the first rank warns about them. If all are damaged, raise CheckpointError.
    """
    damaged: list[str] = []
    for attempt in itertools.count():
        first = _find_newest(folder, damaged, warn) if rank == 0 else None
        name, error = rank_store.gather(f"disk {attempt}", _name_or_error(first))[0]
        if error:
            raise CheckpointError(*error)
        if name is None:
            return None
        found, faults = _read_share(first, folder / name, rank, world)
        all_faults = sorted({fault for each in rank_store.gather(f"faults {attempt}", faults) for fault in each})
        if found is not None and not all_faults:
            return found
        if found is not None:
            found.close()
        damaged.append(name)
        if rank == 0:
            warn(f"{folder / name} is damaged, skipping it: {'; '.join(all_faults)}")
    return None


def _find_newest(folder: Path, damaged: list[str], warn: Warn) -> FoundCheckpoint | CheckpointError | None:
    """Return the newest checkpoint whose files have the right sizes; None if there is no checkpoint.

    An error is returned instead of raised, so that all ranks get it.
    """
    try:
        found = find_newest_except(damaged, folder, warn)
    except CheckpointError as error:
        return error
    return all_damaged_error(folder, damaged) if found is None and damaged else found


def _name_or_error(found: FoundCheckpoint | CheckpointError | None) -> tuple[str | None, tuple[str, str] | None]:
    if isinstance(found, CheckpointError):
        return None, (found.what, found.hint)
    return (found.path.name if found else None), None


def _read_share(
    found: FoundCheckpoint | CheckpointError | None, path: Path, rank: int, world: int
) -> tuple[FoundCheckpoint | None, list[str]]:
    try:
        mine = found if isinstance(found, FoundCheckpoint) else open_checkpoint(path, every_byte=False)
    except CheckpointError as error:
        return None, [f"rank {rank}: {error}"]
    return mine, byte_faults(mine.path, dict(sorted(mine.manifest.files.items())[rank::world]))


# Resuming from memory or disk

FETCH_S = 1800.0  # the agent may have to fetch the whole snapshot from another node first


@dataclass(frozen=True)
class Resumed:
    """The loaded state.

    `own` is the saved state of this rank, or of rank 0 if this rank did not exist at the time of the save.
    """

    step: int
    world: int
    own: Any
    source: str  # where the state came from: "memory" or "disk"


def resume_from_memory(
    objects: Objects, agent: AgentLink, folder: Path, rank_store: RankStore, rank: int, warn: Warn
) -> Resumed | None:
    """Load the state from memory, on all ranks or on none.

    Return None if a rank cannot load its state, if the ranks have different steps, or if a checkpoint on disk is newer.
    """
    layouts = objects.layouts()
    state = _find_in_memory(agent, rank, layouts, warn)
    steps = rank_store.gather("memory", None if state is None else [state.step, state.world])
    on_disk = rank_store.gather("on disk", _newest_on_disk(folder) if rank == 0 else None)[0]
    if state is None or any(step != steps[0] for step in steps) or state.step < on_disk:
        return None
    objects.restore(state.shell, {piece.key: _whole(piece, layouts) for piece in state.pieces})
    return Resumed(state.step, state.world, pickle.loads(state.own), "memory")


def _newest_on_disk(folder: Path) -> int:
    """Return the step of the newest checkpoint whose files have the right sizes; -1 if there is none."""
    whole = (path for path in list_steps(folder) if not check(path, every_byte=False).faults)
    return max((int(path.name.rpartition("-")[2]) for path in whole), default=-1)


def _find_in_memory(
    agent: AgentLink, rank: int, layouts: Mapping[str, torch.Tensor], warn: Warn
) -> TrainingState | None:
    """Return this rank's state from memory; None if there is no usable one.

    The agent chooses the step, and fetches missing parts from other nodes.
    """
    answer = agent.ask({"resume": rank}, FETCH_S)
    if not answer.get("own"):
        return None
    shared = open_intact(Path(answer["shared"]), warn)
    own = shared if answer["own"] == answer["shared"] else open_intact(Path(answer["own"]), warn)
    if shared is None or own is None:
        return None
    with contextlib.suppress(CheckpointError):
        state = state_of(shared, own)
        return state if state.step == answer["step"] and _fits(state, layouts) else None
    return None


def _fits(state: TrainingState, layouts: Mapping[str, torch.Tensor]) -> bool:
    """Return whether the saved shards have the shapes that this rank needs. Shapes depend on the number of ranks."""
    for piece in state.pieces:
        like = None if piece.shared else layout_for(piece.key, piece.size, layouts)
        if like is not None and local_part(like).shape != piece.tensor.shape:
            return False
    return True


def open_intact(path: Path, warn: Warn) -> Snapshot | None:
    """Map and check the snapshot, and return it; None if it is damaged.

    A snapshot without checksums was made on this node and is accepted.
    """
    snapshot = open_snapshot(path)
    if snapshot is not None and judge(snapshot, _free_threads()) in (SnapshotVerdict.WHOLE, SnapshotVerdict.UNCHECKED):
        return snapshot
    warn(f"the snapshot in {path} is damaged; using the checkpoint on disk")
    return None


def _free_threads() -> int:
    """Return how many threads this rank may use to check a snapshot: its share of the node's cores.

    The cores are otherwise idle while the ranks resume.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(2, cores // max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1)))


def _whole(piece: TensorPiece, layouts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    if piece.shared:
        return piece.tensor
    like = layout_for(piece.key, piece.size, layouts)
    if like is not None:
        return with_local(like, piece.tensor)
    if tuple(piece.tensor.shape) == tuple(piece.size):
        return piece.tensor
    raise CheckpointError(f"{piece.key} was sharded and no longer is", hint="save to disk and resume from there")


def resume_from_disk(
    objects: Objects, folder: Path, rank_store: RankStore, rank: int, world: int, warn: Warn
) -> Resumed | None:
    found = find_together(folder, rank_store, rank, world, warn)
    if found is None:
        return None
    with found:
        objects.restore(found.shell, _read(found, objects.layouts()), found.unpickle)
        resumed = Resumed(found.step, found.world, _own(found, rank), "disk")
        rank_store.gather("loaded", True)  # each rank keeps its lock on the checkpoint until all ranks have read it
    return resumed


def _read(found: FoundCheckpoint, layouts: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Read each tensor, in full or as this rank's shard."""
    tensors = {}
    for key, (size, dtype) in found.sizes.items():
        like = layout_for(key, size, layouts)
        tensors[key] = torch.empty(size, dtype=dtype) if like is None else torch.empty_like(like, dtype=dtype)
    found.fill(tensors)
    return tensors


def _own(found: FoundCheckpoint, rank: int) -> Any:
    own = found.own(rank) or found.own(0)
    return found.unpickle(own) if own else {}


def fix_layout(model: torch.nn.Module) -> bool:
    """Fix the order in which a DDP model sums gradients, so that the order is the same after every restart.

    Return False if this version of torch does not allow it. Do nothing for a model without DDP, or with
    `find_unused_parameters`.
    """
    reducer: Any = getattr(model, "reducer", None)
    if reducer is None or getattr(model, "find_unused_parameters", False):
        return True
    if not (hasattr(reducer, "_push_all_rebuilt_params") and hasattr(reducer, "_rebuild_buckets")):
        return False
    reducer._push_all_rebuilt_params()
    reducer._rebuild_buckets()
    return True


def fix_layouts(objects: Iterable[Any], warn: Callable[[str], None]) -> None:
    """Call `fix_layout` for every model among the objects. Warn if torch does not allow it."""
    models = [each for each in objects if isinstance(each, torch.nn.Module)]
    if not all([fix_layout(model) for model in models]):
        warn("this version of torch does not allow fixing DDP's buckets: a resumed run may differ in the last bits")
