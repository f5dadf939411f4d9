"""Cleanup of nodes whose agents were killed, at the end of a run."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any, cast

from dalsegno.runs.coordinator.agents.agents import RunAgents
from dalsegno.runs.coordinator.generations.events import Finish
from dalsegno.runs.coordinator.generations.memory import MemoryTable
from dalsegno.runs.coordinator.nodes.node_source import NoNodeSource
from dalsegno.runs.coordinator.shutdown import finish_agents


class Nodes(NoNodeSource):
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


class NoAgents:
    """The connections of a run that has no agents left."""

    peers: dict[str, object]

    def __init__(self) -> None:
        self.peers = {}

    def send_all(self, message: Any) -> None: ...


def end_run(used: Collection[str], alive: Collection[str], suspended: bool = False) -> Nodes:
    memory = MemoryTable()
    memory.used.update(used)
    nodes = Nodes(memory, alive)
    asyncio.run(finish_agents(cast(RunAgents, NoAgents()), memory, nodes, Finish(0), suspended=suspended))
    return nodes


def test_agent_is_recalled_to_sweep_a_node_whose_agent_was_killed() -> None:
    nodes = end_run(used=["b", "c"], alive=["a", "b"])
    assert nodes.called == nodes.swept_before_dismissed == {"b"}


def test_no_agent_is_recalled_when_the_run_is_suspended() -> None:
    assert end_run(used=["a"], alive=["a"], suspended=True).called == set()
