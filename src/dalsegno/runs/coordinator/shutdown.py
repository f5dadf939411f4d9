"""The end of a run: the agents clean up their nodes and end, then the nodes are released."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable

from dalsegno.runs.coordinator.agents.agents import RunAgents
from dalsegno.runs.coordinator.generations.events import Finish
from dalsegno.runs.coordinator.generations.memory import MemoryTable
from dalsegno.runs.coordinator.nodes.node_source import NodeSource
from dalsegno.runs.coordinator.site import RunTerms
from dalsegno.train.contract import TERMINATED
from dalsegno.wire.frames import Message

SHUTDOWN_S = 3.0
SWEEP_START_S = 10.0  # timeout for agents that are started only to clean up their node


def catch_signals(site: RunTerms, leave: Callable[[], None]) -> None:
    """Handle Slurm's signals in a batch step. On the head node, signals end the coordinator, and a new one starts."""
    if site.own_job is not None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGUSR2):
            loop.add_signal_handler(number, leave)


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
    """Return a message that says how the run ended, for agents that report it to their users."""
    cause = end.cause
    if cause is None:
        return {"code": end.code, "why": end.why}
    if cause.why:  # the coordinator has ended all workers, so no rank has a report
        return {"code": end.code, "why": cause.why}
    return {"code": end.code, "why": end.why, "rank": cause.rank, "node": cause.node}
