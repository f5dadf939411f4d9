"""A worker loads a snapshot only if it is intact, of the requested step and has the current shards."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from dalsegno.train.agent import AgentLink
from dalsegno.train.memory.slots import Slot, write
from dalsegno.train.memory.snapshot import checksum
from dalsegno.train.resume import _find_in_memory
from dalsegno.train.state import TensorPiece, TrainingState
from tests.train.memory.states import filled, same


class Told(AgentLink):
    """A fake agent that answers every request with this snapshot."""

    def __init__(self, step: int, own: Path, shared: Path) -> None:
        super().__init__("nobody")
        self.answer = {"step": step, "own": str(own), "shared": str(shared)}

    def ask(self, message: Mapping[str, Any], timeout_s: float = 0.0) -> dict[str, Any]:
        return self.answer


def found(path: Path, step: int, layouts: Mapping[str, Any] | None = None) -> tuple[TrainingState | None, list[str]]:
    warned: list[str] = []
    return _find_in_memory(Told(step, path, path), 0, layouts or {}, warned.append), warned


def test_snapshot_is_loaded_with_or_without_checksums(tmp_path: Path) -> None:
    write(Slot(tmp_path / "slot"), filled(5), generation=1)
    for _ in range(2):
        state, warned = found(tmp_path / "slot", 5)
        assert state is not None and same(state, filled(5)) and not warned
        checksum(tmp_path / "slot")
    assert found(tmp_path / "slot", 6) == (None, [])


def test_damaged_snapshot_is_not_loaded_and_warned_of(tmp_path: Path) -> None:
    slot = Slot(tmp_path / "slot")
    record = write(slot, filled(5), generation=1)
    checksum(tmp_path / "slot")
    assert record is not None
    slot.buffer[record.own.end - 1] ^= 1
    state, (warning,) = found(tmp_path / "slot", 5)
    assert state is None and "is damaged" in warning
    state, (warning,) = found(tmp_path / "nothing", 5)
    assert state is None and "nothing is damaged" in warning


def test_snapshot_with_other_shard_shapes_is_not_used(tmp_path: Path) -> None:
    half = TensorPiece("model.w", torch.ones(2), size=(4,), offsets=(0,), shared=False)
    write(Slot(tmp_path / "slot"), TrainingState(5, 0, 2, (half,), b"", b"", {}), generation=1)

    class Cut(torch.Tensor):
        """A fake of a DTensor: its full shape, and this rank's part."""

        def to_local(self) -> Any:
            return torch.zeros(self.part)  # type: ignore[attr-defined]

    for part, fits in ((2, True), (1, False), (4, False)):
        living = torch.zeros(4).as_subclass(Cut)
        living.part = part  # type: ignore[attr-defined]
        state, _ = found(tmp_path / "slot", 5, {"model.w": living})
        assert (state is not None) == fits
