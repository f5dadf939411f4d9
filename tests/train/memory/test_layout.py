"""The layout of a slot: ranges are aligned, do not overlap, and can be read back."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, given, settings

torch = pytest.importorskip("torch")

from dalsegno.train.errors import CheckpointError
from dalsegno.train.memory.files import SHM
from dalsegno.train.memory.layout import ALIGN, Contents, LaidOutPart, lay_out, parse_head
from dalsegno.train.memory.slots import Slot, write
from dalsegno.train.memory.snapshot import open_snapshot, state_of
from dalsegno.train.state import TrainingState
from tests.train.memory.states import piece, same, state, states


def ranges(part: LaidOutPart) -> list[tuple[int, int]]:
    inside = [(one.at, one.length) for one in part.pieces] + [(blob.at, blob.length) for blob, _ in part.blobs]
    return [(0, len(part.head)), *((part.body_at + at, length) for at, length in inside)]


@given(states)
def test_ranges_are_aligned_inside_their_part_and_do_not_overlap(any_state: TrainingState) -> None:
    layout = lay_out(any_state)
    for part in (layout.shared, layout.own):
        found = ranges(part)
        assert all(at % ALIGN == 0 for at, _ in found)
        assert all(at + length <= later for (at, length), (later, _) in pairwise(found))
        assert sum(found[-1]) <= part.length and part.length % ALIGN == 0
    assert layout.own_at % ALIGN == 0


@given(states)
def test_shared_and_own_pieces_are_in_separate_parts(any_state: TrainingState) -> None:
    layout = lay_out(any_state)
    assert layout.shared is not None
    assert all(one.shared for one in layout.shared.pieces) and not any(one.shared for one in layout.own.pieces)


@given(states)
def test_head_describes_its_part(any_state: TrainingState) -> None:
    own = lay_out(any_state).own
    assert parse_head(own.head) == Contents(tuple(blob for blob, _ in own.blobs), own.pieces)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(states)
def test_any_state_is_restored_bit_by_bit(any_state: TrainingState) -> None:
    with TemporaryDirectory(prefix="dalsegno-test-", dir=SHM) as folder:
        slot = Slot(Path(folder) / "slot")
        write(slot, any_state, generation=1)
        snapshot = open_snapshot(slot.path)
        slot.close()
        assert snapshot and same(state_of(snapshot), any_state)


def test_sparse_tensor_is_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match=r"model\.emb is not a dense tensor"):
        lay_out(state(1, piece("model.emb", torch.eye(3).to_sparse())))
