"""Decide which checkpoints of a run may be committed, and which saved states may be loaded.

A generation may commit checkpoints until a later generation is allowed to, or the run ends. After data corruption, only
states up to the last verified step are loaded.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from dataclasses import replace

from dalsegno.runs.coordinator.agents.messages import CorruptionFound, GrantRequested, StepVerified
from dalsegno.runs.coordinator.generations.generations import GenerationPhase
from dalsegno.runs.coordinator.generations.memory import MemoryTable
from dalsegno.runs.coordinator.nodes.node_source import NodeSource, RunControl
from dalsegno.runs.coordinator.saved_state import SavedTrust
from dalsegno.runs.journal import RunEvent
from dalsegno.wire.frames import BadFrame, Message, Reader, pack

CONTROLLER = "DALSEGNO_CONTROLLER"  # variable with the path of the controller's socket
TELL_S = 10.0


class StateTrust:
    """Answers requests to commit, and excludes nodes that compute wrong gradients."""

    def __init__(self, control: RunControl, memory: MemoryTable, socket: str | None = None) -> None:
        self._control, self._memory = control, memory
        self._socket = os.environ.get(CONTROLLER, "") if socket is None else socket
        self.state = SavedTrust()

    def restore(self, state: SavedTrust) -> None:
        self.state = state
        self._memory.distrusted = state.distrusted[0] if state.distrusted else 0

    def answer_grant(self, asked: GrantRequested, ended: bool, write: Callable[[], bool]) -> Message:
        """Allow or deny a commit. A generation may commit, even after its end, until a later one is allowed to or the
        run ends.

        `write` saves the state durably, so that the next coordinator does not let an earlier generation commit.
        """
        ok = self.state.granted <= asked.generation <= self._control.run.generation and not ended
        why = "" if ok else f"generation {asked.generation} is over"
        if ok and asked.generation > self.state.granted:
            before, self.state = self.state, replace(self.state, granted=asked.generation)
            if not write():
                self.state, ok, why = before, False, "the run's folder cannot be written"
        return {"granted": {"number": asked.number, "ok": ok, "why": why}}

    def record_verified(self, message: StepVerified) -> None:
        if message.generation == self._control.run.generation:
            self.state = replace(self.state, verified=message.step)
            self._control.save_state()

    def judge(self, found: CorruptionFound, source: NodeSource) -> None:
        """Handle a report of wrong gradients.

        If exactly one node is wrong, the run leaves that node and no longer trusts states after the last verified step.
        Otherwise, the report is only recorded.
        """
        run = self._control.run
        if found.generation != run.generation or run.phase is not GenerationPhase.RUNNING or run.group is None:
            return
        nodes = {run.group.agent_of(rank) for rank in found.ranks if rank in run.group.ranks}
        details = {"step": found.step, "ranks": list(found.ranks), "trusted": self.state.verified}
        if len(nodes) != 1:
            self._control.note(found.text)
            self._control.journal(RunEvent.CORRUPTION, generation=run.generation, node="", text=found.text, **details)
            return
        node = nodes.pop()
        self._control.journal(RunEvent.CORRUPTION, generation=run.generation, node=node, text=found.text, **details)
        distrusted = run.generation, self.state.verified
        self.restore(replace(self.state, granted=max(self.state.granted, run.generation + 1), distrusted=distrusted))
        if self._socket:
            self._control.run_in_background(self._tell_controller(node, found.text))
        source.exclude(node)
        source.leave_for_repair(node)
        self._control.continue_without(node, found.text)

    async def _tell_controller(self, node: str, text: str) -> None:
        """Ask the controller to drain the node. The controller drains only nodes that this run holds."""
        request = {"corrupt": {"run": self._control.folder.run, "node": node, "text": text}}
        try:
            answer = await asyncio.wait_for(_ask(self._socket, request), TELL_S)
        except (OSError, BadFrame, asyncio.TimeoutError) as error:
            answer = {"error": str(error) or "no answer"}
        if "error" in answer:
            self._control.note(f"the controller was not asked to drain {node}: {answer['error']}")


async def _ask(path: str, request: Message) -> Mapping[str, object]:
    stream, writer = await asyncio.open_unix_connection(path)
    try:
        writer.write(pack(request))
        reader = Reader()
        while data := await stream.read(65536):
            for answer in reader.feed(data):
                return answer
        raise BadFrame("the connection was closed")
    finally:
        writer.close()
