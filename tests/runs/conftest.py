"""Fixtures for tests of runs: one warm parent for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runs.warm_agent import Agent


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    agent = Agent(tmp_path_factory.mktemp("warm"), "json", "random")
    assert agent.hear("warm")["warm"]["ok"]
    yield agent
    agent.close()


@pytest.fixture
def agent(warm: Agent, tmp_path: Path) -> Iterator[Agent]:
    """Return the warm parent without any worker, before and after the test."""
    warm.folder = tmp_path
    yield warm
    warm.end_workers()
