"""Where a run goes on: from the newest snapshot in memory that all ranks have, else from the newest checkpoint."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dalsegno.train.agent import AgentLink
from dalsegno.train.board import Board
from dalsegno.train.disk.load import Found
from dalsegno.train.disk.verify import check, list_steps
from dalsegno.train.errors import CheckpointError
from dalsegno.train.finding import find_together
from dalsegno.train.memory.checksum import Verdict, judge
from dalsegno.train.memory.snapshot import Snapshot, open_snapshot, state_of
from dalsegno.train.objects import Objects, layout_for
from dalsegno.train.shards import local_part, with_local
from dalsegno.train.state import Piece, State

Warn = Callable[[str], None]
FETCH_S = 1800.0  # the agent may have to fetch all of it from another node first


@dataclass(frozen=True)
class Resumed:
    """What was loaded. `own`: of this rank, or of the first one if there were fewer ranks then."""

    step: int
    world: int
    own: Any
    source: str  # "memory" or "disk"


def from_memory(
    objects: Objects, agent: AgentLink, folder: Path, board: Board, rank: int, warn: Warn
) -> Resumed | None:
    """All ranks or none: what one of them cannot load from memory, or is newer on disk, all load from disk."""
    layouts = objects.layouts()
    state = _found_in_memory(agent, rank, layouts, warn)
    steps = board.gather("memory", None if state is None else [state.step, state.world])
    on_disk = board.gather("on disk", _newest_on_disk(folder) if rank == 0 else None)[0]
    if state is None or any(step != steps[0] for step in steps) or state.step < on_disk:
        return None
    objects.give(state.shell, {piece.key: _whole(piece, layouts) for piece in state.pieces})
    return Resumed(state.step, state.world, pickle.loads(state.own), "memory")


def _newest_on_disk(folder: Path) -> int:
    """The last step that was saved, at first sight; -1 if none was."""
    whole = (path for path in list_steps(folder) if not check(path, every_byte=False).faults)
    return max((int(path.name.rpartition("-")[2]) for path in whole), default=-1)


def _found_in_memory(agent: AgentLink, rank: int, layouts: Mapping[str, torch.Tensor], warn: Warn) -> State | None:
    """The agent knows the step, and has fetched from other nodes what this one did not have."""
    told = agent.ask({"resume": rank}, FETCH_S)
    if not told.get("own"):
        return None
    shared = _opened(Path(told["shared"]), warn)
    own = shared if told["own"] == told["shared"] else _opened(Path(told["own"]), warn)
    if shared is None or own is None:
        return None
    with contextlib.suppress(CheckpointError):
        state = state_of(shared, own)
        return state if state.step == told["step"] and _fits(state, layouts) else None
    return None


def _fits(state: State, layouts: Mapping[str, torch.Tensor]) -> bool:
    """Whether what this rank had to itself is what it has now: another number of ranks may divide the model anew."""
    for piece in state.pieces:
        like = None if piece.shared else layout_for(piece.key, piece.size, layouts)
        if like is not None and local_part(like).shape != piece.tensor.shape:
            return False
    return True


def _opened(path: Path, warn: Warn) -> Snapshot | None:
    """Mapped once: what was checked is what is loaded. One without checksums yet was made on this node."""
    snapshot = open_snapshot(path)
    if snapshot is not None and judge(snapshot) in (Verdict.WHOLE, Verdict.UNCHECKED):
        return snapshot
    warn(f"the snapshot in {path} is damaged; going back to the checkpoint on disk")
    return None


def _whole(piece: Piece, layouts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    if piece.shared:
        return piece.tensor
    like = layout_for(piece.key, piece.size, layouts)
    if like is not None:
        return with_local(like, piece.tensor)
    if tuple(piece.tensor.shape) == tuple(piece.size):
        return piece.tensor
    raise CheckpointError(f"{piece.key} was sharded, and is not any more", hint="save to disk and load it there")


def from_disk(objects: Objects, folder: Path, board: Board, rank: int, world: int, warn: Warn) -> Resumed | None:
    found = find_together(folder, board, rank, world, warn)
    if found is None:
        return None
    with found:
        objects.give(found.shell, _read(found, objects.layouts()), found.unpickle)
        resumed = Resumed(found.step, found.world, _own(found, rank), "disk")
        board.gather("loaded", True)  # one rank's hold keeps it from being removed until all have read it
    return resumed


def _read(found: Found, layouts: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Each tensor whole, or cut as the living one is."""
    tensors = {}
    for key, (size, dtype) in found.sizes.items():
        like = layout_for(key, size, layouts)
        tensors[key] = torch.empty(size, dtype=dtype) if like is None else torch.empty_like(like, dtype=dtype)
    found.fill(tensors)
    return tensors


def _own(found: Found, rank: int) -> Any:
    own = found.own(rank) or found.own(0)
    return found.unpickle(own) if own else {}
