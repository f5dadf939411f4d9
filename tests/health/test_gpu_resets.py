"""Tests of marking GPUs as reset: older log lines do not count."""

from __future__ import annotations

from pathlib import Path

import pytest

from dalsegno.errors import UsageError
from dalsegno.health.expected import Expected
from dalsegno.health.node_reader import RecordedNode
from dalsegno.health.xids import FORMER_MARK, MARK, record_repair, repaired_at


def test_a_repair_is_recorded_and_read(tmp_path: Path) -> None:
    node = RecordedNode(tmp_path, Expected("gpu-1"))
    assert repaired_at(node) == 0
    record_repair(1700000000.25, 0, f"{tmp_path}{MARK}")
    assert repaired_at(node) == 1700000000.25
    node.seen.since = 1700000005.0
    assert repaired_at(node) == 1700000005.0


def test_mark_of_an_earlier_release_counts_until_a_newer_one(tmp_path: Path) -> None:
    node = RecordedNode(tmp_path, Expected("gpu-1"))
    record_repair(1700000000.0, 0, f"{tmp_path}{FORMER_MARK}")
    assert repaired_at(node) == 1700000000.0
    record_repair(1700000009.0, 0, f"{tmp_path}{MARK}")
    assert repaired_at(node) == 1700000009.0


def test_only_root_may_record_a_repair(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        record_repair(1.0, 1000, f"{tmp_path}{MARK}")


def test_a_damaged_mark_is_ignored(tmp_path: Path) -> None:
    path = Path(f"{tmp_path}{MARK}")
    path.parent.mkdir(parents=True)
    path.write_text("lately")
    assert repaired_at(RecordedNode(tmp_path, Expected("gpu-1"))) == 0
