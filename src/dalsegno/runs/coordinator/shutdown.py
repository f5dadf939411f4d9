"""The end of a run: the agents clean up their nodes and end, then the nodes are released."""

from __future__ import annotations

import asyncio
import time

from dalsegno.runs.coordinator.agents.agents import RunAgents
from dalsegno.runs.coordinator.generations.events import Finish
from dalsegno.runs.coordinator.generations.memory import MemoryTable
from dalsegno.runs.coordinator.nodes.node_source import NodeSource
from dalsegno.train.contract import TERMINATED
from dalsegno.wire.frames import Message

SHUTDOWN_S = 3.0
SWEEP_START_S = 10.0  # timeout for agents that are started only to clean up their node


async def finish_agents(
    agents: RunAgents, memory: MemoryTable, node_source: NodeSource, end: Finish, *, suspended: bool
) -> None:
    """End all agents and release the nodes. A suspended run keeps its nodes for the next coordinator."""
    agents.send_all({"end": _end_message(end), "finish": end.code})
    called = set() if suspended else await node_source.recall_agents(memory.used)
    until = time.monotonic() + (SWEEP_START_S if called else SHUTDOWN_S)
    while (agents.peers or called & memory.used) and time.monotonic() < until:
        await asyncio.sleep(0.01)
    if not suspended:
        await node_source.release_all(None if end.code == TERMINATED else end.code)


def _end_message(end: Finish) -> Message:
    """Return how the run ended, for agents that report it to their own users."""
    cause = end.cause
    where = {"rank": cause.rank, "node": cause.node} if cause else {}
    return {"code": end.code, "why": end.why, **where}
