"""The status of a run: one small file that the coordinator replaces atomically."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from dalsegno.runs.files import read_value
from dalsegno.runs.folder import repair_hint
from dalsegno.runs.journal import MAX_TIME
from dalsegno.spec.facts import facts_from_json, facts_to_json
from dalsegno.system.children import start_ticks
from dalsegno.system.files import damaged, write_atomic


class RunPhase(Enum):
    """What a run is doing, as shown to users."""

    WAITING = "waiting"  # the run waits in Slurm's queue
    STARTING = "starting"  # nodes are granted, but not all agents are ready
    RUNNING = "running"
    STOPPING = "stopping"  # a worker has failed; whether to restart is decided when its generation has ended
    RESTARTING = "restarting"  # a generation has ended and the next one is being formed
    ENDING = "ending"  # the run is over, and its nodes are being released
    ENDED = "ended"
    UNKNOWN = "unknown"  # the status was written by another version

    @classmethod
    def _missing_(cls, value: object) -> RunPhase:
        return cls.UNKNOWN


class NodeRole(Enum):
    """The role of a node in a run."""

    STARTING = "starting"
    READY = "ready"
    MEMBER = "member"  # the node belongs to the current generation
    SPARE = "spare"
    UNKNOWN = "unknown"  # the status was written by another version

    @classmethod
    def _missing_(cls, value: object) -> NodeRole:
        return cls.UNKNOWN


class RunCause(Enum):
    """The cause behind a status message. Code depends on this value, never on the message text."""

    OTHER = ""
    HANDED_OVER = "handed-over"  # the run was submitted, and no coordinator has taken it over yet
    REFUSED = "refused"  # Slurm refused the run's job
    CANCELLED = "cancelled"
    TAKEN_DOWN = "taken-down"  # `dalsegno down` cancelled the run
    CLUSTER_GONE = "cluster-gone"  # the cluster no longer exists, and the end of the run was never recorded

    @classmethod
    def _missing_(cls, value: object) -> RunCause:
        return cls.OTHER

    @property
    def cancelled(self) -> bool:
        return self in (RunCause.CANCELLED, RunCause.TAKEN_DOWN)


# Old status files have no cause. The cause is derived from the first words of the message.
_OLD_MESSAGES = {
    "handed over": RunCause.HANDED_OVER,
    "Slurm refused": RunCause.REFUSED,
    "cancelled: its cluster": RunCause.TAKEN_DOWN,
    "cancelled": RunCause.CANCELLED,
}


LOST_S = 120.0  # silence after which the coordinator counts as lost; a live one writes its status every ten seconds


@dataclass(frozen=True)
class RunNodeStatus:
    """A node of the run. `group_rank` is None unless the node belongs to the current generation."""

    name: str
    state: NodeRole
    group_rank: int | None = None


@dataclass(frozen=True)
class SlowRank:
    """A rank that the others wait for.

    `ratio` is its step time, without waiting, divided by the median of all ranks.
    """

    rank: int
    node: str
    ratio: float

    def sentence(self) -> str:
        on = f" on {self.node}" if self.node else ""
        return (
            f"rank {self.rank}{on} takes {self.ratio:.1f} times as long for a step as the median of all ranks,"
            " which wait for it"
        )


@dataclass(frozen=True)
class RunStatus:
    """Everything that users are shown about a run."""

    run: str
    name: str
    user: str
    phase: RunPhase
    created: float
    updated: float
    generation: int = 0
    restarts: int = 0  # restarts after failures of the script
    lost_nodes: int = 0
    wanted_nodes: int = 1
    world_size: int = 0  # number of processes in the current generation
    nproc_per_node: int = 1
    nodes: tuple[RunNodeStatus, ...] = ()
    jobs: tuple[int, ...] = ()  # Slurm jobs, the main one first
    message: str = ""  # one line that says what the run waits for, or why it ended
    note_at: float | None = None  # when `message` was written to the journal as a note; None if it is not a note
    started: float | None = None  # when the first generation started
    ended: float | None = None
    exit_code: int | None = None
    report: str = ""  # traceback of the rank that failed first
    coordinator_host: str = ""
    coordinator_pid: int = 0
    cause: RunCause = RunCause.OTHER  # the cause behind `message`
    slow_rank: SlowRank | None = None  # a rank that the others wait for at every step

    @property
    def group_size(self) -> int:
        """The number of nodes in the current generation."""
        return self.world_size // max(1, self.nproc_per_node)

    @property
    def over(self) -> bool:
        return self.phase is RunPhase.ENDED


def is_over(status: RunStatus) -> bool:
    """Return whether the run has ended and is cleaned up. The coordinator writes the exit code last."""
    return status.over and status.exit_code is not None


def silent_s(status: RunStatus, now: float) -> float | None:
    """Return how long the coordinator has been silent; None if the silence is not a sign of its loss.

    A run that waits in the queue may have no coordinator, and a run that is over needs none.
    """
    silence = now - status.updated
    speaks = not status.coordinator_pid or status.phase is RunPhase.WAITING or is_over(status) or silence < LOST_S
    return None if speaks else silence


def coordinator_is_dead(status: RunStatus) -> bool:
    """Return whether the coordinator has died; False on any host but the coordinator's, where this is unknown."""
    here = status.coordinator_host == socket.gethostname()
    return bool(status.coordinator_pid) and here and not is_over(status) and start_ticks(status.coordinator_pid) is None


def read_status(path: Path) -> RunStatus | None:
    """Return the status of a run; None if none has been written yet."""
    data = read_value(path)
    status = status_from_json(data) if isinstance(data, Mapping) else None
    if status and not has_valid_times(status):
        raise damaged(path, "a time is not a number", repair_hint(path))
    return status


def has_valid_times(status: RunStatus) -> bool:
    """Return whether all times are within the calendar's range, because users can write these files."""
    times = (status.created, status.updated, status.started or 0.0, status.ended or 0.0)
    return all(abs(at) < MAX_TIME for at in times)


def status_from_json(data: Mapping[str, object]) -> RunStatus:
    """Parse a status. In old files, the cause is missing and is derived from the message."""
    status = facts_from_json(RunStatus, data)
    if "cause" in data:
        return status
    causes = [cause for text, cause in _OLD_MESSAGES.items() if status.message.startswith(text)]
    return replace(status, cause=causes[0]) if causes else status


def write_status(path: Path, status: RunStatus) -> None:
    write_atomic(path, json.dumps(facts_to_json(status), indent=1), mode=0o644, durable=status.over)
