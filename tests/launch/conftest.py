"""What the tests of launching share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.warm_agent import Agent


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    agent = Agent(tmp_path, "json", "random")
    assert agent.hear("warm")["warm"]["ok"]
    yield agent
    agent.close()
