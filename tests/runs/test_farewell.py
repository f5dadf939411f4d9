"""Cleanup of nodes whose agents were killed, at the end of a run."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from pathlib import Path
from typing import Any

from dalsegno.runs.coordinator.coordinator import shut_down
from dalsegno.runs.coordinator.events import Finish
from dalsegno.runs.coordinator.memory import MemoryTable
from dalsegno.runs.coordinator.staff import NoStaff
from dalsegno.runs.folder import RunFolder


class Nodes(NoStaff):
    """Starts agents on request, which connect a moment later."""

    def __init__(self, memory: MemoryTable, alive: Collection[str]) -> None:
        super().__init__()
        self.memory, self.alive, self.called = memory, alive, set[str]()
        self.swept_before_dismissed: set[str] = set()

    async def recall_agents(self, nodes: Collection[str]) -> set[str]:
        self.called = set(nodes) & set(self.alive)
        for node in self.called:
            asyncio.get_running_loop().call_later(0.05, self.memory.used.discard, node)
        return self.called

    async def release_all(self, code: int | None = None) -> None:
        self.swept_before_dismissed = self.called - self.memory.used


class Ending:
    """The part of a coordinator that shuts down."""

    def __init__(self, folder: Path, used: Collection[str], alive: Collection[str], suspended: bool = False) -> None:
        self.memory, self.folder, self.suspended, self.is_shut_down = MemoryTable(), RunFolder(folder), suspended, False
        self.staff, self.agents, self.status_writer = Nodes(self.memory, alive), self, self
        self.peers: dict[str, object] = {}
        self.memory.used.update(used)

    def send_all(self, message: Any) -> None: ...

    def save_state(self) -> None: ...

    def run_suspended(self, coordinator: Any, why: str) -> None: ...

    def ended(self, coordinator: Any, end: Finish) -> None: ...


def end_run(ending: Any) -> None:
    asyncio.run(shut_down(ending, Finish(0)))


def test_agent_is_recalled_to_sweep_a_node_whose_agent_was_killed(tmp_path: Path) -> None:
    ending = Ending(tmp_path, used=["b", "c"], alive=["a", "b"])
    end_run(ending)
    assert ending.staff.called == ending.staff.swept_before_dismissed == {"b"}


def test_no_agent_is_recalled_when_the_run_is_suspended(tmp_path: Path) -> None:
    ending = Ending(tmp_path, used=["a"], alive=["a"], suspended=True)
    end_run(ending)
    assert ending.staff.called == set()
