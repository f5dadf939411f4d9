"""The snapshot of the cluster at one moment, as values that pages render. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from dalsegno.health.messages import GpuReading
from dalsegno.health.result import Verdict
from dalsegno.overview.conditions import is_held_back
from dalsegno.overview.facts import SLURM_USERS, FailingScrape, NodeRecovery
from dalsegno.overview.verdict import ClusterVerdict, VerdictCode
from dalsegno.recovery.decisions.phase import NodePhase
from dalsegno.recovery.decisions.reason import describe_reason
from dalsegno.recovery.journal.event import Event
from dalsegno.runs.coordinator.reports.goodput import TrainingProgress
from dalsegno.runs.status import RunStatus
from dalsegno.slurm.facts import JobInfo, NodeInfo, NodeState
from dalsegno.targets.base import DaemonStatus
from dalsegno.wire.liveness import Presence


class NodeTone(Enum):
    """The appearance of a node. The values are class names of the style sheet."""

    BUSY = "busy"
    MIXED = "mixed"
    IDLE = "idle"
    SPARE = "spare"
    SUSPECT = "suspect"
    DRAINED = "drained"
    REPAIRING = "repairing"
    VALIDATING = "validating"
    DOWN = "down"
    UNKNOWN = "unknown"


TONE_TEXT = {
    NodeTone.BUSY: "allocated",
    NodeTone.MIXED: "partly allocated",
    NodeTone.IDLE: "idle",
    NodeTone.SPARE: "spare",
    NodeTone.SUSPECT: "suspected",
    NodeTone.DRAINED: "drained",
    NodeTone.REPAIRING: "being repaired",
    NodeTone.VALIDATING: "being validated",
    NodeTone.DOWN: "down",
    NodeTone.UNKNOWN: "unknown",
}


@dataclass(frozen=True)
class NodeRecoveryDetail(NodeRecovery):
    """The controller's record of a node, and when the node last passed a validation."""

    validated_at: float | None = None


@dataclass(frozen=True)
class AgentReport:
    """The report of a node's agent. A finding is the name, verdict and text of a check that did not pass."""

    node: str
    presence: Presence = Presence.NEVER
    last_seen: float = 0.0
    checks: int = 0
    findings: tuple[tuple[str, Verdict, str], ...] = ()
    gpus: tuple[GpuReading, ...] = ()


@dataclass(frozen=True)
class Automation:
    """The state of automatic recovery."""

    paused: bool = False
    mode: str = ""
    per_hour: int = 0
    taken: Mapping[str, int] = field(default_factory=dict)  # nodes taken out in the last hour, by partition


@dataclass(frozen=True)
class SlurmPart:
    """The data from Slurm."""

    nodes: tuple[NodeInfo, ...] = ()
    jobs: tuple[JobInfo, ...] = ()


@dataclass(frozen=True)
class ControllerPart:
    """The data from the controller. `events` are the latest events, oldest first."""

    nodes: Mapping[str, NodeRecoveryDetail] = field(default_factory=dict)
    agents: Mapping[str, AgentReport] = field(default_factory=dict)
    automation: Automation = field(default_factory=Automation)
    events: tuple[Event, ...] = ()
    slurm_users: frozenset[str] = SLURM_USERS


@dataclass(frozen=True)
class HostPart:
    """The daemons that do not run, and the exporters that Prometheus cannot read."""

    dead: tuple[DaemonStatus, ...] = ()
    failing_scrapes: tuple[FailingScrape, ...] = ()


@dataclass(frozen=True)
class RunPicture:
    """A run, from the files in its folder. `kept` says whether the controller supervises it."""

    folder: str
    uid: int
    status: RunStatus
    progress: TrainingProgress | None = None
    kept: bool = True

    @property
    def run(self) -> str:
        return self.status.run


@dataclass(frozen=True)
class GpuView:
    """A GPU on the map. `jobs` are the jobs that may be using it: all jobs with GPUs on its node."""

    reading: GpuReading
    in_use: bool = False
    jobs: tuple[int, ...] = ()
    lost: bool = False  # whether the agent reports other GPUs of the node, but not this one


@dataclass(frozen=True)
class NodeView:
    """A node on the map."""

    name: str
    tone: NodeTone
    label: str  # the state as text for people
    partitions: tuple[str, ...] = ()
    gpu_type: str = ""
    gpus: tuple[GpuView, ...] = ()
    cpus: int = 0
    cpus_used: int = 0
    memory_mib: int = 0
    memory_used_mib: int = 0
    jobs: tuple[JobInfo, ...] = ()
    reason: str = ""
    since: float | None = None
    findings: tuple[tuple[str, Verdict, str], ...] = ()
    presence: Presence = Presence.NEVER
    validated_at: float | None = None


@dataclass(frozen=True)
class SourceTrouble:
    """A source that could not be read, with a text for people. `silent`: whether it does not answer at all."""

    source: str
    text: str
    silent: bool = False


@dataclass(frozen=True)
class ClusterPicture:
    """The data that the pages show. `troubles` are the sources that cannot be read; their last known data is kept.
    `verdict` is the same as in `dalsegno status`."""

    number: int = 0
    at: float = 0.0
    cluster: str = ""
    nodes: Mapping[str, NodeView] = field(default_factory=dict)
    jobs: tuple[JobInfo, ...] = ()
    runs: tuple[RunPicture, ...] = ()
    events: tuple[Event, ...] = ()
    automation: Automation = field(default_factory=Automation)
    troubles: tuple[SourceTrouble, ...] = ()
    verdict: ClusterVerdict = field(default_factory=lambda: ClusterVerdict((VerdictCode.HEALTHY,)))

    def run(self, name: str) -> RunPicture | None:
        return next((each for each in self.runs if each.run == name), None)

    def job(self, id: int) -> JobInfo | None:
        return next((each for each in self.jobs if each.id == id), None)


def node_views(slurm: SlurmPart, controller: ControllerPart) -> dict[str, NodeView]:
    """Combine the data of Slurm and the controller about each node, in Slurm's order. Nodes that only the controller
    knows come last."""
    jobs: dict[str, list[JobInfo]] = {}
    for job in slurm.jobs:
        for node in job.nodes if not job.state.ended else ():
            jobs.setdefault(node, []).append(job)
    infos = {info.name: info for info in slurm.nodes}
    names = [*infos, *(name for name in controller.nodes if name not in infos)]
    return {
        name: node_view(
            infos.get(name) or NodeInfo(name, NodeState.UNKNOWN),
            controller.nodes.get(name, NodeRecoveryDetail(name)),
            controller.agents.get(name, AgentReport(name)),
            jobs.get(name, ()),
        )
        for name in names
    }


def node_view(info: NodeInfo, record: NodeRecoveryDetail, agent: AgentReport, jobs: Sequence[JobInfo]) -> NodeView:
    """Return the view of one node."""
    tone = tone_of(info, record, agent)
    state = record.phase.value if record.phase.out or record.phase is NodePhase.LENT else TONE_TEXT[tone]
    if agent.presence is Presence.GONE and not record.phase.out:
        state = "lost"
    elif is_held_back(record):
        state = "not repaired"
    return NodeView(
        info.name,
        tone,
        state,
        info.partitions,
        info.gpu_type,
        gpu_views(info, agent, jobs),
        info.cpus,
        info.cpus_used,
        info.memory_mib,
        info.memory_used_mib,
        tuple(jobs),
        describe_reason(record.reason or info.reason) or record.note,
        record.since if record.phase.out else info.reason_at,
        agent.findings,
        agent.presence,
        record.validated_at,
    )


_PHASE_TONES = {
    NodePhase.REPAIRING: NodeTone.REPAIRING,
    NodePhase.VALIDATING: NodeTone.VALIDATING,
    NodePhase.NEEDS_ADMIN: NodeTone.DOWN,
    NodePhase.DOWN: NodeTone.DOWN,
    NodePhase.DRAINED: NodeTone.DRAINED,
}
_STATE_TONES = {
    NodeState.ALLOCATED: NodeTone.BUSY,
    NodeState.MIXED: NodeTone.MIXED,
    NodeState.IDLE: NodeTone.IDLE,
}


def tone_of(info: NodeInfo, record: NodeRecoveryDetail, agent: AgentReport) -> NodeTone:
    """Return a node's appearance. The controller's phase decides, then whether the agent is lost, then Slurm's
    state."""
    if record.phase in _PHASE_TONES:
        return _PHASE_TONES[record.phase]
    if agent.presence is Presence.GONE or info.down:
        return NodeTone.DOWN
    if info.draining:
        return NodeTone.SPARE if record.phase is NodePhase.SPARE else NodeTone.DRAINED
    if not info.responding:
        return NodeTone.UNKNOWN
    if record.phase is NodePhase.SUSPECTED:
        return NodeTone.SUSPECT
    return _STATE_TONES.get(info.state, NodeTone.UNKNOWN)


def gpu_views(info: NodeInfo, agent: AgentReport, jobs: Sequence[JobInfo]) -> tuple[GpuView, ...]:
    """Return the GPUs that Slurm has configured, with the readings that the agent reports."""
    readings = {reading.index: reading for reading in agent.gpus}
    # Without accounting, Slurm does not report how many GPUs a job has, so any job on the node may be using them.
    with_gpus = tuple(job.id for job in jobs if job.gpus) or tuple(job.id for job in jobs)
    used = set(info.gpu_indexes) if info.gpu_indexes else set(range(info.gpus_used))
    answers = bool(readings) and agent.presence is Presence.CONNECTED
    return tuple(
        GpuView(
            readings.get(index) or GpuReading(index),
            index in used,
            with_gpus if index in used else (),
            answers and index not in readings,
        )
        for index in range(info.gpus)
    )


def order_of(name: str) -> tuple[str, int]:
    """Return a key that sorts n2 before n10."""
    stem = name.rstrip("0123456789")
    return stem, int(name[len(stem) :][:18] or 0)
