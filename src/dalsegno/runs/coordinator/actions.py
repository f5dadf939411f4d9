"""Execution of the state machine's orders: messages to agents, pauses, releasing nodes, the end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Protocol

from dalsegno.runs.coordinator.agents import Peer, RunAgents
from dalsegno.runs.coordinator.events import (
    Exclude,
    Finish,
    GaveUpWaiting,
    Joined,
    OpenStore,
    Order,
    ReleaseNodes,
    Start,
    StopGeneration,
    Wait,
    Waited,
)
from dalsegno.runs.coordinator.generations import GenerationPhase, Run
from dalsegno.runs.coordinator.hangs import HangWatch
from dalsegno.runs.coordinator.memory import MemoryTable
from dalsegno.runs.coordinator.report import StatusWriter
from dalsegno.runs.coordinator.site import RunTerms, Seats
from dalsegno.runs.coordinator.staff import Boss, Staff
from dalsegno.runs.journal import RunEvent
from dalsegno.train.contract import GENERATION, RUN, WANTED_NODES
from dalsegno.wire.frames import Message

# Start message


def start_message(
    site: RunTerms, order: Start, peers: Mapping[str, Peer], in_memory: Message | None = None
) -> Message | None:
    """Return the message that starts a node's workers; None while a member is being lost, as a stop follows."""
    group = order.group
    if any(agent not in peers for agent in group.agents):
        return None
    hosts = tuple(peers[agent].host for agent in group.agents)
    seats = Seats(group.generation, hosts, group.nproc_per_node, order.store_port, order.restarts)
    first = next(place.first_rank for place in group.places if place.agent == order.agent)
    found = peers[order.agent].hello.found
    own = {RUN: site.folder.run, GENERATION: str(group.generation), WANTED_NODES: str(site.shape.max_nodes)}
    workers = [
        {"rank": rank, "env": {**site.worker_env(seats, rank, found), **own}}
        for rank in range(first, first + group.nproc_per_node)
    ]
    others = [list(peer.probe) for name, peer in peers.items() if name != order.agent]
    return {"start": {"generation": group.generation, "workers": workers, "peers": others, **(in_memory or {})}}


# Orders


class Doer(Boss, Protocol):
    """The coordinator as far as executing orders needs it."""

    run: Run
    site: RunTerms
    agents: RunAgents
    staff: Staff
    hangs: HangWatch
    memory: MemoryTable
    status_writer: StatusWriter

    def finish(self, order: Finish) -> None: ...


def execute(coordinator: Doer, order: Order) -> None:
    if isinstance(order, OpenStore):
        coordinator.status_writer.generation(coordinator.run)
        coordinator.agents.send(order.agent, {"open_store": order.generation})
    elif isinstance(order, Start):
        _start(coordinator, order)
    elif isinstance(order, StopGeneration):
        coordinator.agents.send(order.agent, {"stop": order.generation})
    elif isinstance(order, Wait):
        coordinator.journal(RunEvent.PAUSE, seconds=order.seconds)
        asyncio.get_running_loop().call_later(order.seconds, coordinator.apply, Waited())
    elif isinstance(order, Exclude):
        _leave(coordinator, order)
    elif isinstance(order, ReleaseNodes):
        coordinator.run_in_background(_move(coordinator))
    elif isinstance(order, Finish):
        coordinator.finish(order)


def _start(coordinator: Doer, order: Start) -> None:
    coordinator.hangs.generation_started()
    in_memory = coordinator.memory.start(order.group, order.agent, time.monotonic())
    message = start_message(coordinator.site, order, coordinator.agents.peers, in_memory)
    if message is not None:
        coordinator.agents.send(order.agent, message)


def _leave(coordinator: Doer, order: Exclude) -> None:
    if not order.until_repaired:
        exclude(coordinator, order.agent, order.why)
        return
    coordinator.staff.leave_for_repair(order.agent)
    coordinator.continue_without(order.agent, order.why)


def exclude(coordinator: Doer, agent: str, why: str) -> None:
    """Do not use the node of this agent again."""
    coordinator.note(f"{agent}: {why}; the run continues without it")
    coordinator.staff.excluded.append(agent)
    coordinator.agents.send(agent, {"finish": 0})


async def _move(coordinator: Doer) -> None:
    coordinator.agents.send_all({"finish": 0})
    await coordinator.staff.move()


# Newcomers


TOGETHER_S = 10.0  # how long a newcomer waits for another that is starting


class Gatherer(Boss, Protocol):
    """The coordinator as far as newcomers need it."""

    run: Run


class Gathering:
    """Admits newcomers, and starts an elastic run with fewer nodes after `gather_s`."""

    def __init__(self, coordinator: Gatherer, gather_s: float) -> None:
        self._coordinator, self._gather_s = coordinator, gather_s
        self._newcomers: list[Joined] = []
        self._waiting: asyncio.TimerHandle | None = None

    def admit(self, event: Joined) -> None:
        """Admit a newcomer. While a run is too small, newcomers that arrive together are admitted together."""
        run = self._coordinator.run
        self._newcomers.append(event)
        smaller = (
            run.phase is GenerationPhase.RUNNING and run.group and len(run.group.places) < self._coordinator.wanted
        )
        others = self._coordinator.present - set(run.ready) - {each.agent for each in self._newcomers}
        if not (smaller and others):
            self._admit_all()
        elif len(self._newcomers) == 1:
            asyncio.get_running_loop().call_later(TOGETHER_S, self._admit_all)

    def _admit_all(self) -> None:
        newcomers, self._newcomers = self._newcomers, []
        for event in newcomers:
            if event.agent in self._coordinator.present:
                self._coordinator.apply(event)

    def watch(self) -> None:
        """Let a run that could start with fewer nodes do so after a while. Called after every event."""
        run = self._coordinator.run
        could = run.phase is GenerationPhase.GATHERING and not run.smaller and len(run.ready) >= run.shape.min_nodes
        if could and self._waiting is None:
            self._waiting = asyncio.get_running_loop().call_later(self._gather_s, self._start_smaller)
        elif not could and self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _start_smaller(self) -> None:
        self._waiting = None
        self._coordinator.apply(GaveUpWaiting())
