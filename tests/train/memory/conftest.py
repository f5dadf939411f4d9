"""A folder in shared memory, removed after each test."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def shm() -> Iterator[Path]:
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="dalsegno-test-", dir=memory if memory.is_dir() else None))
    yield folder
    shutil.rmtree(folder)
