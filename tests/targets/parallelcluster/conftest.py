"""The stage of the tests of ParallelCluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.targets.parallelcluster.stage import Stage


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)
