"""Fixtures for clusters in memory with a recovery loop."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from dalsegno.recovery.decisions.policy import Policy
from dalsegno.recovery.fakes import FakeCluster
from tests.recovery.clinic import Clinic, MakeClinic


@pytest.fixture
def clinic_of() -> Iterator[MakeClinic]:
    made: list[Clinic] = []

    def make(count: int = 4, **policy: object) -> Clinic:
        made.append(Clinic(FakeCluster.of(count), Policy(**policy)))  # type: ignore[arg-type]
        made[-1].round()
        return made[-1]

    yield make
    for clinic in made:
        clinic.store.close()
        shutil.rmtree(clinic.folder)
