"""Write a coordinator's reports: the status file, the journal, and notes for the user."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from dalsegno.errors import DalsegnoError
from dalsegno.runs import journal
from dalsegno.runs.coordinator.agents.messages import AgentMessage, LogPiece, ParentDied, Ready, Signalled, UserNote
from dalsegno.runs.coordinator.generations.events import Event, Finish, WorkerEnded
from dalsegno.runs.coordinator.generations.generations import GenerationPhase, Run
from dalsegno.runs.coordinator.generations.group import in_order
from dalsegno.runs.coordinator.site import REFRESH_S, RunTerms
from dalsegno.runs.journal import RunEvent
from dalsegno.runs.status import NodeRole, RunNodeStatus, RunPhase, RunStatus, SlowRank, read_status, write_status
from dalsegno.system.machine import user_name
from dalsegno.train.contract import SAVED

# Shortage of nodes


MAX_NAMED = 3  # if there are more nodes, only their number is shown


def shortage(missing: int, coming: Collection[str], waits: bool, refused: str) -> str:
    """Return what an incomplete run waits for; "" if it waits for nothing.

    `coming` contains the nodes whose agents are starting.
    """
    beyond = missing - len(coming)
    more = f"{beyond} more node{'s' if beyond > 1 else ''}"
    if beyond > 0 and refused:
        return f"needs {more}, but Slurm has none available: {refused}"
    if beyond > 0:
        return f"waiting for {more} from Slurm" if waits else ""
    if missing <= 0 or not coming:
        return ""
    names = sorted(coming, key=in_order)
    return f"waiting for {', '.join(names) if len(names) <= MAX_NAMED else f'{len(names)} nodes'} to be ready"


# Status file and journal

log = logging.getLogger("coordinator")

NOTE_S = 30.0  # how long a note is shown in the status; the journal keeps it


@dataclass(frozen=True)
class RunFacts:
    """The facts from which the status of a run is computed."""

    run: Run
    started: float | None = None
    lost_nodes: int = 0
    ending: bool = False
    present: frozenset[str] = frozenset()  # nodes whose agents are connected
    jobs: tuple[int, ...] = ()
    has_nodes: bool = True
    coming: frozenset[str] = frozenset()  # nodes whose agents are connected or starting
    waits: bool = False  # whether the run waits for nodes from Slurm
    refused: str = ""  # why Slurm refused another node
    slow_rank: SlowRank | None = None  # a rank that the others wait for at every step


class StatusWriter:
    """Writes the journal, and the status file whenever the status has changed or the file is REFRESH_S old."""

    def __init__(self, site: RunTerms) -> None:
        self.site = site
        before = read_status(site.folder.status)
        self.created = before.created if before else time.time()
        self._note, self._noted = "", 0.0
        self._note_at: float | None = None
        self._written: RunStatus | None = None
        self._logged: dict[tuple[str, str], int] = {}  # log stream and file name -> number of bytes received

    def journal(self, event: RunEvent, **what: object) -> None:
        log.info("%s %s", event.value, " ".join(f"{name}={value}" for name, value in what.items()))
        with contextlib.suppress(OSError):  # a full disk must not end the run
            journal.append(self.site.folder.journal, time.time(), event, **what)

    def note(self, text: str) -> None:
        """Show a line in the status for some time, and write it to the journal."""
        self._note, self._noted = text, time.monotonic()
        self._note_at = time.time()
        self.journal(RunEvent.NOTE, text=text)

    def name_of(self, agent: str) -> str:
        """Return the name of an agent's node, for the user."""
        return agent

    def note_standby(self, text: str) -> None:
        """Show a line about standby workers, unless it is empty."""
        if text:
            self.note(text)

    @property
    def _fresh_note(self) -> str:
        return self._note if time.monotonic() - self._noted < NOTE_S else ""

    def generation(self, run: Run) -> None:
        """Record the members of a generation in the journal, from which `logs --node` reads them."""
        if run.group is not None:
            self.journal(
                RunEvent.GENERATION,
                generation=run.generation,
                nodes=list(run.group.agents),
                nproc_per_node=run.group.nproc_per_node,
                wanted=run.shape.max_nodes,
                restarts=run.restarts,
            )

    def lost(self, run: Run, node: str, why: str) -> None:
        """Record a lost node in the journal, with its role, because the loss of a spare causes no restart."""
        self.journal(
            RunEvent.LOST, node=node, why=why, was=_node(run, node, set(run.ready), _group_ranks(run)).state.value
        )

    def record_message(self, generation: int, node: str, message: AgentMessage, event: Event | None) -> None:
        """Handle an agent's message: write it to the journal or to a log, or show it as a note.

        Ignore the other kinds of messages.
        """
        if isinstance(message, Ready):
            self.journal(
                RunEvent.READY, node=node, warm=message.warm, seconds=message.seconds, threads=list(message.threads)
            )
            self._note_threads(node, message.threads)
        elif isinstance(message, ParentDied):
            self.journal(RunEvent.COLD, node=node, why=message.why)
        elif isinstance(message, Signalled):
            self.journal(RunEvent.SIGNAL, node=node, signal=message.name)
        elif isinstance(message, UserNote):
            self.note(message.text)
        elif isinstance(message, LogPiece):
            self._write_log(message)
        if isinstance(event, WorkerEnded) and event.failure and event.generation == generation and event.code != SAVED:
            failure = event.failure
            self.journal(RunEvent.FAILED, generation=generation, rank=failure.rank, node=node, code=failure.code,
                         what=failure.what(), signature=failure.signature, noise=failure.noise,
                         timed_out=failure.timed_out)  # fmt: skip

    def _write_log(self, piece: LogPiece) -> None:
        """Append log text from a node that has no access to the run folder.

        Agents repeat text whose receipt was not confirmed. Text that has already arrived is skipped, unless an
        earlier coordinator received it.
        """
        path, data = self.site.folder.inside(piece.name), piece.data
        known = self._logged.get((piece.stream, piece.name), 0)
        if path is not None and piece.at + len(data) > known:
            self._logged[piece.stream, piece.name] = piece.at + len(data)
            with contextlib.suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("ab") as file:
                    file.write(data[max(0, known - piece.at) :])

    def _note_threads(self, node: str, threads: Sequence[str]) -> None:
        if threads:
            names = ", ".join(sorted(set(threads)))
            self.note(f"threads of the warm parent on {node} do not exist in its workers: {names}")

    def status(self, facts: RunFacts) -> None:
        self._write(self._status(facts))

    def ended(self, facts: RunFacts, end: Finish) -> None:
        report = end.cause.traceback if end.cause else ""
        why = end.why or {0: "done", SAVED: "saved; can be resumed later"}.get(end.code, self._note)
        self.journal(RunEvent.ENDED, code=end.code, why=why)
        ended = replace(self._status(facts), phase=RunPhase.ENDED, ended=time.time(), exit_code=end.code)
        self._write(replace(ended, message=why, note_at=None, cause=end.about, report=report, nodes=(), jobs=()))

    def run_suspended(self, facts: RunFacts, why: str) -> None:
        """Report that this coordinator ends but the run does not.

        Another coordinator continues the run after the requeue.
        """
        self._write(replace(self._status(facts), phase=RunPhase.WAITING, message=why, note_at=None, nodes=()))
        self.journal(RunEvent.RESTS, why=why)

    def _status(self, facts: RunFacts) -> RunStatus:
        run, group, message = facts.run, facts.run.group, _message(facts)
        running = group is not None and run.phase is GenerationPhase.RUNNING
        return RunStatus(
            run=self.site.folder.run,
            name=self.site.name,
            user=user_name(),
            phase=_phase(facts),
            created=self.created,
            updated=time.time(),
            generation=run.generation,
            restarts=run.restarts,
            lost_nodes=facts.lost_nodes,
            wanted_nodes=run.shape.max_nodes,
            world_size=group.world_size if running and group else 0,
            nproc_per_node=run.shape.nproc_per_node,
            nodes=_nodes(facts),
            jobs=facts.jobs,
            message=message or self._fresh_note,
            note_at=self._note_at if not message and self._fresh_note else None,
            started=facts.started,
            coordinator_host=socket.gethostname(),
            coordinator_pid=os.getpid(),
            slow_rank=facts.slow_rank,
        )

    def _write(self, status: RunStatus) -> None:
        before = self._written
        same = before is not None and replace(status, updated=before.updated) == before
        if before is None or not same or status.updated - before.updated > REFRESH_S:
            self._written = status
            with contextlib.suppress(DalsegnoError):  # a full disk must not end the run
                write_status(self.site.folder.status, status)

    def last_output(self, generation: int) -> float:
        """Return the monotonic time at which any rank last wrote output."""
        newest = 0.0
        with contextlib.suppress(OSError), os.scandir(self.site.folder.generation(generation)) as entries:
            newest = max((entry.stat().st_mtime for entry in entries), default=0.0)
        return time.monotonic() - (time.time() - newest)


def _phase(facts: RunFacts) -> RunPhase:
    if facts.ending:
        return RunPhase.ENDING
    if facts.run.phase is GenerationPhase.RUNNING:
        return RunPhase.RUNNING
    if not facts.has_nodes:
        return RunPhase.WAITING
    if facts.run.phase is GenerationPhase.STOPPING and facts.run.failures:
        return RunPhase.STOPPING
    return RunPhase.RESTARTING if facts.started else RunPhase.STARTING


def _message(facts: RunFacts) -> str:
    run = facts.run
    if run.phase is GenerationPhase.GATHERING and facts.has_nodes:
        return _shortage(facts)
    if run.phase is GenerationPhase.RUNNING and run.group and len(run.group.places) < run.shape.max_nodes:
        return f"running on {len(run.group.places)} of {run.shape.max_nodes} nodes: the effective batch is smaller"
    return ""


def _shortage(facts: RunFacts) -> str:
    run = facts.run
    coming = facts.coming - set(run.ready)
    if not run.generation and len(run.ready) + len(coming) >= run.shape.max_nodes:
        return ""  # no message while the first agents are starting
    return shortage(run.shape.max_nodes - len(run.ready), coming, facts.waits, facts.refused)


def _nodes(facts: RunFacts) -> tuple[RunNodeStatus, ...]:
    ready, group_ranks = set(facts.run.ready), _group_ranks(facts.run)
    return tuple(_node(facts.run, name, ready, group_ranks) for name in sorted(facts.present, key=in_order))


def _group_ranks(run: Run) -> dict[str, int]:
    return {place.agent: place.group_rank for place in run.group.places} if run.group else {}


def _node(run: Run, name: str, ready: Collection[str], group_ranks: dict[str, int]) -> RunNodeStatus:
    if name not in ready:
        return RunNodeStatus(name, NodeRole.STARTING)
    if name in group_ranks:
        return RunNodeStatus(name, NodeRole.MEMBER, group_ranks[name])
    return RunNodeStatus(name, NodeRole.SPARE if run.generation else NodeRole.READY)
