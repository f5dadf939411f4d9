"""What is known of the cluster at one moment. What is not known is None, and nothing is done for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from dalsegno.health import Finding, Remedy, Verdict
from dalsegno.recovery.agent_view import AgentView, Presence
from dalsegno.runs.comment import JobRole, nodes_left, read_comment
from dalsegno.slurm.facts import JobInfo, JobState, NodeInfo, NodeState

_WAITING = (
    JobState.PENDING,
    JobState.EXPEDITING,
    JobState.REQUEUED,
    JobState.REQUEUE_HOLD,
    JobState.REQUEUE_FED,
    JobState.SPECIAL_EXIT,
)


@dataclass(frozen=True)
class Validation:
    """What a node found out about itself when it was told to; `ask` is the id of that order."""

    ask: str
    findings: tuple[Finding, ...] = ()

    @property
    def passed(self) -> bool:
        """Something passed and nothing failed. Checks that could not be run prove nothing, either way."""
        verdicts = [each.result.verdict for each in self.findings]
        return Verdict.PASSED in verdicts and Verdict.FAILED not in verdicts

    @property
    def proof(self) -> str:
        """What says most for the node, or why that could not be tried."""
        said = {each.check: each.result for each in self.findings}
        for name in ("pair-collective", "pair", "load-collective"):
            if name in said:
                return f"{name} {said[name].verdict.value}: {said[name].text}"
        return ""


@dataclass(frozen=True)
class NodeFacts:
    """One node: what Slurm says of it, the jobs Slurm has on it, and what its agent says."""

    slurm: NodeInfo
    jobs: tuple[JobInfo, ...] = ()
    agent: AgentView = field(default_factory=lambda: AgentView(""))
    validation: Validation | None = None  # its last one
    validating: str = ""  # the order to validate itself that it is carrying out
    off: bool = False  # whoever keeps the machine is certain that it is

    @property
    def name(self) -> str:
        return self.slurm.name

    @property
    def connected(self) -> bool:
        return self.agent.presence is Presence.CONNECTED

    @property
    def gone(self) -> bool:
        """By two witnesses: its agent, and slurmd's port."""
        return self.agent.presence is Presence.GONE and self.agent.slurmd_answers is not True

    @property
    def busy(self) -> bool:
        """Slurm has work on it, or has not finished taking it away."""
        taken = self.slurm.state in (NodeState.ALLOCATED, NodeState.MIXED) or self.slurm.completing
        return bool(self.jobs) or taken

    @property
    def held(self) -> tuple[int, ...]:
        return tuple(job.id for job in self.jobs)

    @property
    def left(self) -> bool:
        """All that Slurm has on it are runs, and they go on without it."""
        return bool(self.jobs) and all(self.name in nodes_left(job.comment) for job in self.jobs)

    @property
    def ending(self) -> bool:
        """All that Slurm has on it is over, and waits for slurmd's word that it is."""
        return bool(self.jobs) and all(job.state is JobState.COMPLETING for job in self.jobs)


@dataclass(frozen=True)
class Facts:
    """All nodes that Slurm knows, or None where Slurm did not answer. `slurm_at`: when Slurm was asked."""

    nodes: Mapping[str, NodeFacts] | None
    jobs: tuple[JobInfo, ...] = ()  # those that wait, run, or ended a little while ago
    slurm_at: float = 0.0
    underway: frozenset[str] = field(default_factory=frozenset)  # ids of actions that are being done now
    runs: Mapping[str, int] = field(default_factory=dict)  # that the controller keeps, and whose they are (uid)

    def run_of(self, job: JobInfo) -> str:
        """Return the run that a job belongs to, or "".

        Name and comment are what its user wrote: they count only for a run that the same user has us keep.
        """
        if is_plain(job) or job.uid is None or self.runs.get(job.name) != job.uid:
            return ""
        return f"{job.uid}:{job.name}"

    def runs_on(self, node: NodeFacts) -> tuple[str, ...]:
        """Return the runs that Slurm has on a node."""
        return tuple(sorted({run for job in node.jobs if (run := self.run_of(job))}))


NOTHING = Facts(None)


def is_active(job: JobInfo) -> bool:
    """Whether Slurm has the job on its nodes now."""
    return not job.state.ended and job.state not in _WAITING


def joins(job: JobInfo) -> bool:
    """Whether a job says that it is one node more for a run. Not one with which several would be had."""
    alone = job.node_count == 1 and job.array_id is None and job.het_id is None
    comment = read_comment(job.comment)
    return alone and comment is not None and comment.role is JobRole.JOIN


def is_plain(job: JobInfo) -> bool:
    """A job that nobody but Slurm looks after."""
    return read_comment(job.comment) is None


class Heard(Protocol):
    """What the agents say."""

    def views(self) -> Mapping[str, AgentView]: ...

    def validations(self) -> Mapping[str, Validation]: ...

    def validating(self) -> Mapping[str, str]: ...


def gather(
    nodes: list[NodeInfo],
    jobs: list[JobInfo],
    agents: Heard,
    slurm_at: float,
    underway: frozenset[str] = frozenset(),
    runs: Mapping[str, int] | None = None,
) -> Facts:
    """One picture of what Slurm and the agents say."""
    views, validations, validating = agents.views(), agents.validations(), agents.validating()
    held: dict[str, list[JobInfo]] = {}
    for job in jobs:
        for name in job.nodes if is_active(job) else ():
            held.setdefault(name, []).append(job)
    known = {
        node.name: NodeFacts(
            node,
            tuple(held.get(node.name, ())),
            views.get(node.name, AgentView(node.name)),
            validations.get(node.name),
            validating.get(node.name, ""),
        )
        for node in nodes
    }
    return Facts(known, tuple(jobs), slurm_at, underway, runs or {})


# ---- What is wrong with a node, as one value: the heaviest of what its checks found, or that it is gone.


GONE, BLACK_HOLE, PASSPORT, VALIDATION, BOOT = "gone", "black-hole", "passport", "validation", "boot"
SLURMD = "slurmd"  # the check of that name


@dataclass(frozen=True)
class NodeFault:
    """`remedy` is what helps, by what is known so far."""

    check: str
    remedy: Remedy
    text: str
    code: str = ""
    gone: bool = False

    @property
    def key(self) -> str:
        return f"{self.check}[{self.code}]" if self.code else self.check

    @property
    def words(self) -> str:
        """`disk: / is 97 % full`"""
        return f"{self.key}: {self.text}"


def fault_of(finding: Finding) -> NodeFault:
    result = finding.result
    return NodeFault(finding.check, result.remedy, result.text, result.code)


def failures(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """What failed. Unknown is not failed, and for a warning no node is taken."""
    return tuple(each for each in findings if each.result.verdict is Verdict.FAILED)


def heaviest(faults: Iterable[NodeFault]) -> NodeFault | None:
    """The first of those that need most."""
    worst: NodeFault | None = None
    for fault in faults:
        if worst is None or worst.remedy < fault.remedy:
            worst = fault
    return worst
