"""Takeover after a coordinator's death: what its successor restores, and how it meets the agents that reconnect."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from typing import Protocol

from dalsegno.errors import DalsegnoError
from dalsegno.runs.coordinator.actions import Doer, execute
from dalsegno.runs.coordinator.agents import Peer
from dalsegno.runs.coordinator.causes import first_cause
from dalsegno.runs.coordinator.events import Finish, Left, Order, ReleaseNodes, RunMoved, Waited
from dalsegno.runs.coordinator.generations import GenerationPhase, Run
from dalsegno.runs.coordinator.saved_state import Saved, read_saved
from dalsegno.runs.coordinator.site import RunTerms
from dalsegno.runs.journal import RunEvent

ADOPT_S = 10.0  # agents that have not reconnected by then are lost


class Successor(Doer, Protocol):
    """A coordinator that takes over a run."""

    lost_nodes: int
    started: float | None
    granted: int


async def find_saved(
    site: RunTerms, release: Callable[[], Awaitable[None]], note: Callable[[str], None]
) -> Saved | None:
    """Return the previous coordinator's state. If it is unreadable the run starts over and must not hold its nodes
    twice.

    Agents of the old jobs must not find this coordinator then. Those in its own job reconnect and start over.
    """
    try:
        return read_saved(site.folder.state, Run(site.shape, site.max_restarts))
    except DalsegnoError as error:
        by_hand = f"`scancel --name={site.folder.run}`"
        note(f"{error.what}; the run starts over and its jobs are cancelled, as with {by_hand}")
    if site.own_job is None:
        site.folder.connect.unlink(missing_ok=True)
    await release()
    return None


async def take_over(coordinator: Successor, saved: Saved) -> None:
    """Continue the run from a saved state. Agents reconnect by themselves; those that do not are lost."""
    coordinator.run, coordinator.lost_nodes, coordinator.started, coordinator.granted = (
        saved.run,
        saved.lost_nodes,
        saved.started,
        saved.granted,
    )
    coordinator.staff.excluded, coordinator.staff.silent = list(saved.excluded), dict(saved.silent)
    coordinator.memory.used.update(saved.used)
    coordinator.journal(RunEvent.CAME_BACK, host=socket.gethostname(), pid=os.getpid())
    if await coordinator.staff.adopt(saved.jobs):
        asyncio.get_running_loop().call_later(ADOPT_S, _lose_missing, coordinator)
    else:
        _start_over(coordinator)
    for order in unfinished(coordinator.run):
        execute(coordinator, order)
    if coordinator.run.pausing:
        coordinator.apply(Waited())


def _start_over(coordinator: Successor) -> None:
    for agent in coordinator.run.ready:
        coordinator.apply(Left(agent))
    coordinator.apply(RunMoved())
    coordinator.staff.begin()


def _lose_missing(coordinator: Successor) -> None:
    for agent in [agent for agent in coordinator.run.ready if agent not in coordinator.agents.peers]:
        coordinator.agents.lose(agent, "its agent did not reconnect", silent=False)


def unfinished(run: Run) -> list[Order]:
    """Return orders that the previous coordinator may not have completed: shutdown, or requesting the next job."""
    if run.phase is GenerationPhase.ENDED:
        return [Finish(run.exit_code or 0, first_cause(run.failures), run.why)]
    return [ReleaseNodes()] if run.leaving and run.phase is GenerationPhase.GATHERING else []


def reconcile(coordinator: Successor, peer: Peer) -> None:
    """Bring an agent that the previous coordinator knew to the run's present state, without touching its workers."""
    run = coordinator.run
    if run.group is None or peer.name not in run.group.agents:
        return
    if run.phase is GenerationPhase.OPENING and run.group.store_agent == peer.name:
        peer.send({"open_store": run.generation})
    elif run.phase is GenerationPhase.STOPPING and peer.name in run.waiting_for:
        peer.send({"stop": run.generation})
    elif run.phase is GenerationPhase.RUNNING and not peer.hello.still_runs(run.generation):
        coordinator.apply(Left(peer.name))  # its peers wait for workers that no longer exist
        peer.send({"reset": True})
