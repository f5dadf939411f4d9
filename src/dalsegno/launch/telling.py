"""What a coordinator tells people: the status file, the journal, the notes."""

from __future__ import annotations

import contextlib
import getpass
import os
import socket
import time
from typing import TYPE_CHECKING

from dalsegno.launch import journal
from dalsegno.launch.events import Finish
from dalsegno.launch.generations import Phase, Run
from dalsegno.launch.site import Site
from dalsegno.launch.status import (
    ENDED,
    RESTARTING,
    RUNNING,
    STARTING,
    WAITING,
    NodeStatus,
    Status,
    read_status,
    write_status,
)

if TYPE_CHECKING:
    from dalsegno.launch.coordinator import Coordinator


class Teller:
    """Writes only what has changed."""

    def __init__(self, site: Site) -> None:
        self.site = site
        before = read_status(site.folder.status)
        self.created = before.created if before else time.time()
        self.message = ""
        self._written: Status | None = None

    def journal(self, event: str, **what: object) -> None:
        with contextlib.suppress(OSError):  # a full disk must not end the run
            journal.append(self.site.folder.journal, time.time(), event, **what)

    def note(self, text: str) -> None:
        """A line for people, once."""
        self.message = text
        self.journal("note", text=text)

    def status(self, of: Coordinator) -> None:
        self._write(self._status(of))

    def ended(self, of: Coordinator, end: Finish) -> None:
        report = end.cause.traceback if end.cause else ""
        why = end.why or ("done" if end.code == 0 else self.message)
        self.journal("ended", code=end.code, why=why)
        status = self._status(of)
        self._write(
            Status(**{**vars(status), "phase": ENDED, "ended": time.time(), "exit_code": end.code, "message": why,
                      "report": report, "nodes": ()})
        )  # fmt: skip

    def _status(self, of: Coordinator) -> Status:
        run, group = of.run, of.run.group
        running = group is not None and run.phase is Phase.RUNNING
        return Status(
            run=self.site.folder.run,
            name=self.site.name,
            user=getpass.getuser(),
            phase=_phase(of),
            created=self.created,
            updated=time.time(),
            generation=run.generation,
            restarts=run.restarts,
            lost_nodes=of.lost_nodes,
            wanted_nodes=run.shape.max_nodes,
            world_size=group.world_size if running and group else 0,
            nproc_per_node=run.shape.nproc_per_node,
            nodes=_nodes(of),
            jobs=tuple(job.id for job in of.jobs.jobs if job.id is not None),
            message=_message(of) or self.message,
            started=of.started,
            coordinator_host=socket.gethostname(),
            coordinator_pid=os.getpid(),
        )

    def _write(self, status: Status) -> None:
        same = self._written is not None and {**vars(self._written), "updated": 0} == {**vars(status), "updated": 0}
        if not same:
            self._written = status
            with contextlib.suppress(OSError):
                write_status(self.site.folder.status, status)

    def last_output(self, generation: int) -> float:
        """When any rank last wrote something, on the monotonic clock."""
        newest = 0.0
        with contextlib.suppress(OSError), os.scandir(self.site.folder.generation(generation)) as entries:
            newest = max((entry.stat().st_mtime for entry in entries), default=0.0)
        return time.monotonic() - (time.time() - newest)


def _phase(of: Coordinator) -> str:
    if of.end is not None:
        return ENDED
    if of.run.phase is Phase.RUNNING:
        return RUNNING
    if not any(job.nodes for job in of.jobs.jobs):
        return WAITING
    return RESTARTING if of.run.generation else STARTING


def _message(of: Coordinator) -> str:
    run = of.run
    missing = run.shape.max_nodes - len(run.ready)
    asked = any(job.role == "join" and not job.nodes for job in of.jobs.jobs)
    if run.phase is Phase.GATHERING and missing > 0 and run.generation and asked:
        return f"waits for {missing} more node{'s' if missing > 1 else ''} from Slurm"
    if run.phase is Phase.RUNNING and run.group and len(run.group.places) < run.shape.max_nodes:
        return f"runs on {len(run.group.places)} of {run.shape.max_nodes} nodes: the effective batch is smaller"
    return ""


def _nodes(of: Coordinator) -> tuple[NodeStatus, ...]:
    run = of.run
    seats = {place.agent: place.group_rank for place in run.group.places} if run.group else {}
    return tuple(_node(run, name, seats) for name in sorted(of.peers, key=lambda name: (len(name), name)))


def _node(run: Run, name: str, seats: dict[str, int]) -> NodeStatus:
    if name not in run.ready:
        return NodeStatus(name, "starting")
    if name in seats:
        return NodeStatus(name, "member", seats[name])
    return NodeStatus(name, "spare" if run.generation else "ready")
