"""Admit new agents to a run, and limit how long a run waits for nodes.

Several agents are admitted at once if that saves restarts.
"""

from __future__ import annotations

import asyncio

from dalsegno.runs.coordinator.generations.events import AgentJoined, GatherTimeout
from dalsegno.runs.coordinator.generations.generations import GenerationPhase
from dalsegno.runs.coordinator.nodes.node_source import RunControl

TOGETHER_S = 10.0  # how long a new agent waits for others that are connected but not ready


class NodeAdmission:
    """Admits new agents, and starts an elastic run with fewer nodes after `gather_s`."""

    def __init__(self, control: RunControl, gather_s: float) -> None:
        self._control, self._gather_s = control, gather_s
        self._newcomers: list[AgentJoined] = []
        self._waiting: asyncio.TimerHandle | None = None

    def admit(self, event: AgentJoined) -> None:
        """Admit a new agent.

        A run that trains with too few nodes first waits for other connected agents to be ready, so that it restarts
        only once.
        """
        run = self._control.run
        self._newcomers.append(event)
        smaller = run.phase is GenerationPhase.RUNNING and run.group and len(run.group.places) < run.shape.max_nodes
        if not (smaller and self._control.present - set(run.ready) - {each.agent for each in self._newcomers}):
            self._admit_all()
        elif len(self._newcomers) == 1:
            asyncio.get_running_loop().call_later(TOGETHER_S, self._admit_all)

    def _admit_all(self) -> None:
        newcomers, self._newcomers = self._newcomers, []
        for event in newcomers:
            if event.agent in self._control.present:
                self._control.apply(event)

    def watch(self) -> None:
        """Start or cancel the timer after which a run starts with fewer nodes. Call this after every event."""
        run = self._control.run
        could = run.phase is GenerationPhase.GATHERING and not run.smaller and len(run.ready) >= run.shape.min_nodes
        if could and self._waiting is None:
            self._waiting = asyncio.get_running_loop().call_later(self._gather_s, self._start_smaller)
        elif not could and self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _start_smaller(self) -> None:
        self._waiting = None
        self._control.apply(GatherTimeout())
