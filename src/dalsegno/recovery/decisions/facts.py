"""The observed state of the cluster at one moment. Unknown values are None and lead to no action."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from dalsegno.health import Finding, Remedy, Verdict
from dalsegno.health.result import SERVER_AWAY
from dalsegno.recovery.agents.view import AgentView
from dalsegno.runs.comment import JobRole, nodes_left, read_comment
from dalsegno.slurm.facts import JobInfo, JobState, NodeInfo, NodeState
from dalsegno.wire.cloud_notice import CHECK as CLOUD_NOTICE
from dalsegno.wire.cloud_notice import CloudNotice, parse_code
from dalsegno.wire.liveness import Presence

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
    """The result of a node's validation; `ask` is the id of the order."""

    ask: str
    findings: tuple[Finding, ...] = ()

    @property
    def passed(self) -> bool:
        """Return whether a check passed and none failed. Checks that could not be run do not count."""
        verdicts = [each.result.verdict for each in self.findings]
        return Verdict.PASSED in verdicts and Verdict.FAILED not in verdicts

    @property
    def proof(self) -> str:
        """Return the result of the strongest test that was run; "" if there is none."""
        results = {each.check: each.result for each in self.findings}
        for name in ("pair-collective", "pair", "load-collective"):
            if name in results:
                return f"{name} {results[name].verdict.value}: {results[name].text}"
        return ""


@dataclass(frozen=True)
class NodeFacts:
    """One node: the reports of Slurm and of the node's agent, and the jobs that Slurm has on the node."""

    slurm: NodeInfo
    jobs: tuple[JobInfo, ...] = ()
    agent: AgentView = field(default_factory=lambda: AgentView(""))
    validation: Validation | None = None  # result of the last validation
    validating: str = ""  # id of the validation in progress; "": none
    off: bool = False  # whether the target is certain that the machine is off
    wrong_result: str = ""  # evidence from a run that the node's GPUs or CPUs compute wrongly; "" if there is none
    reported_by_owner: bool = False  # whether that run belongs to root or to the cluster's owner

    @property
    def name(self) -> str:
        return self.slurm.name

    @property
    def connected(self) -> bool:
        return self.agent.presence is Presence.CONNECTED

    @property
    def gone(self) -> bool:
        """Return whether the node is lost: neither its agent nor slurmd answers."""
        return self.agent.presence is Presence.GONE and self.agent.slurmd_answers is not True

    @property
    def busy(self) -> bool:
        """Return whether Slurm has jobs on the node or is still removing them."""
        taken = self.slurm.state in (NodeState.ALLOCATED, NodeState.MIXED) or self.slurm.completing
        return bool(self.jobs) or taken

    @property
    def held(self) -> tuple[int, ...]:
        return tuple(job.id for job in self.jobs)

    @property
    def left(self) -> bool:
        """Return whether every job on the node belongs to a run that has left the node and continues without it."""
        return bool(self.jobs) and all(self.name in nodes_left(job.comment) for job in self.jobs)

    @property
    def ending(self) -> bool:
        """Return whether all jobs on the node have ended, and Slurm waits only for slurmd's confirmation."""
        return bool(self.jobs) and all(job.state is JobState.COMPLETING for job in self.jobs)


@dataclass(frozen=True)
class Facts:
    """The observed state. `nodes` is None if Slurm did not answer. `slurm_at` is when Slurm was queried."""

    nodes: Mapping[str, NodeFacts] | None
    jobs: tuple[JobInfo, ...] = ()  # pending, running and recently ended jobs
    slurm_at: float = 0.0
    underway: frozenset[str] = field(default_factory=frozenset)  # ids of actions that are being carried out
    runs: Mapping[str, int] = field(default_factory=dict)  # runs that the controller supervises -> uid of the owner

    def run_of(self, job: JobInfo) -> str:
        """Return the run that a job belongs to, or "".

        A job's name and comment are user input: they count only if the same user has started that run.
        """
        if is_plain(job) or job.uid is None or self.runs.get(job.name) != job.uid:
            return ""
        return f"{job.uid}:{job.name}"

    def runs_on(self, node: NodeFacts) -> tuple[str, ...]:
        """Return the runs that have jobs on a node."""
        return tuple(sorted({run for job in node.jobs if (run := self.run_of(job))}))


NOTHING = Facts(None)


def is_active(job: JobInfo) -> bool:
    """Return whether the job occupies its nodes now."""
    return not job.state.ended and job.state not in _WAITING


def is_join_job(job: JobInfo) -> bool:
    """Return whether a job adds a single node to a run. Arrays and jobs with several components do not qualify."""
    alone = job.node_count == 1 and job.array_id is None and job.het_id is None
    comment = read_comment(job.comment)
    return alone and comment is not None and comment.role is JobRole.JOIN


def is_plain(job: JobInfo) -> bool:
    """Return whether a job belongs to no run."""
    return read_comment(job.comment) is None


class AgentReports(Protocol):
    """The state of the agents and the results of validations."""

    def views(self) -> Mapping[str, AgentView]: ...

    def validations(self) -> Mapping[str, Validation]: ...

    def validating(self) -> Mapping[str, str]: ...


def gather(
    nodes: list[NodeInfo],
    jobs: list[JobInfo],
    agents: AgentReports,
    slurm_at: float,
    underway: frozenset[str] = frozenset(),
    runs: Mapping[str, int] | None = None,
) -> Facts:
    """Combine what Slurm and the agents report."""
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


# Faults of nodes


GONE, BLACK_HOLE, PASSPORT, VALIDATION, BOOT = "gone", "black-hole", "passport", "validation", "boot"
CORRUPTION = "corruption"  # a run has shown that the node computes wrong results
SLURMD = "slurmd"  # the health check of slurmd
FILE_SYSTEMS = "file-systems"  # the health check of shared file systems


@dataclass(frozen=True)
class NodeFault:
    """A fault of a node. `remedy` is the lightest remedy that should help."""

    check: str
    remedy: Remedy
    text: str
    code: str = ""
    gone: bool = False

    @property
    def key(self) -> str:
        return f"{self.check}[{self.code}]" if self.code else self.check

    @property
    def summary(self) -> str:
        """Return a line such as `disk: / is 97 % full`."""
        return f"{self.key}: {self.text}"

    @property
    def server_away(self) -> bool:
        """Whether the cause is a file server that does not answer. Then the node itself needs no repair."""
        return self.key == SERVER_AWAY_KEY

    @property
    def notice(self) -> CloudNotice | None:
        """The cloud provider's notice that it ends the instance; None for a fault of the node itself."""
        return parse_code(self.code) if self.check == CLOUD_NOTICE else None


SERVER_AWAY_KEY = f"{FILE_SYSTEMS}[{SERVER_AWAY}]"


def fault_of(finding: Finding) -> NodeFault:
    result = finding.result
    return NodeFault(finding.check, result.remedy, result.text, result.code)


def failures(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return the failed findings. Unknown results and warnings do not take a node out of service."""
    return tuple(each for each in findings if each.result.verdict is Verdict.FAILED)


def heaviest(faults: Iterable[NodeFault]) -> NodeFault | None:
    """Return the fault with the heaviest remedy; the first one if several are equal."""
    worst: NodeFault | None = None
    for fault in faults:
        if worst is None or worst.remedy < fault.remedy:
            worst = fault
    return worst
