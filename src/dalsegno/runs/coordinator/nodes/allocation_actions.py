"""The data classes of the allocation state machine: jobs and steps, inputs, and actions."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from dalsegno.runs.comment import JobRole
from dalsegno.runs.coordinator.generations.events import Event
from dalsegno.runs.journal import RunEvent
from dalsegno.runs.status import RunCause
from dalsegno.slurm.facts import NodeInfo

# Jobs and steps


ARRIVAL_S = 20.0  # a node without an agent is checked this long after the start of srun or the last check
MAX_START_S = 1800.0  # time limit for an agent's start, which includes the image import and the prolog


@dataclass(eq=False)
class AgentStep:
    """A running srun that starts agents.

    `left` contains the nodes on which the agent has ended. The srun does not start another agent there.
    """

    number: int
    nodes: tuple[str, ...]
    began: float
    left: set[str] = field(default_factory=set)
    looked: dict[str, float] = field(default_factory=dict)  # node with a slow agent -> when it was last seen healthy
    adopted: bool = False  # whether a previous coordinator started this step

    def will_bring(self, node: str, clock: float) -> bool:
        return self._may_bring(node) and clock - self.looked.get(node, self.began) < ARRIVAL_S

    def is_slow(self, node: str, clock: float) -> bool:
        """Return whether the agent on this node is slow to start but may still connect."""
        return self._may_bring(node) and not self.adopted and clock - self.began < MAX_START_S

    def _may_bring(self, node: str) -> bool:
        return node in self.nodes and node not in self.left


@dataclass(eq=False)
class Job:
    """One job of the run. The coordinator assigns `number`; Slurm assigns `id` and `nodes` when it grants the job."""

    role: JobRole
    number: int
    id: int | None = None
    nodes: tuple[str, ...] = ()
    steps: list[AgentStep] = field(default_factory=list)
    adopted: bool = False  # whether the job was granted to a previous coordinator
    ends_at: int | None = None
    left: frozenset[str] = frozenset()  # nodes that the job's comment lists as no longer needed


class RunJobs(list[Job]):
    """All jobs that a run has or requests, oldest first."""

    def find(self, number: int) -> Job | None:
        return next((job for job in self if job.number == number), None)

    def has(self, role: JobRole) -> bool:
        return any(job.role is role for job in self)

    @property
    def nodes(self) -> list[str]:
        return [node for job in self for node in job.nodes]

    @property
    def has_nodes(self) -> bool:
        return any(job.nodes for job in self)

    @property
    def waits(self) -> bool:
        """Whether a job has been requested but not granted yet."""
        return any(not job.nodes for job in self)

    @property
    def waiting_joins(self) -> list[Job]:
        return [job for job in self if job.role is JobRole.JOIN and not job.nodes]

    @property
    def steps(self) -> list[AgentStep]:
        return [step for job in self for step in job.steps]

    def promote_join(self) -> bool:
        """Replace the run's own job, which has ended, with the oldest one-node job. Return False if there is none."""
        joined = next((job for job in self if job.role is JobRole.JOIN and job.nodes), None)
        if joined is not None:
            joined.role = JobRole.MAIN
        return joined is not None

    def expected(self, view: RunView) -> set[str]:
        """Return the nodes whose agents are starting and not late."""
        due = {node for step in self.steps for node in step.nodes if step.will_bring(node, view.clock)}
        return (due & {*self.nodes}) - view.present

    def nodes_without_agent(self, job: Job, view: RunView, without: Collection[str]) -> list[str]:
        """Return the nodes of a job, except those in `without`, that have no agent and on which none is starting."""
        coming = {*view.present, *self.expected(view), *without}
        return [node for node in job.nodes if node not in coming]

    def all_without_agent(
        self, nodes: Collection[str], view: RunView, without: Collection[str]
    ) -> dict[int, list[str]]:
        """Return, by job number, the nodes in `nodes` that have no agent and on which none is starting.

        Nodes in `without` are excluded.
        """
        found = {job.number: self.nodes_without_agent(job, view, without) for job in self}
        return {number: [node for node in each if node in nodes] for number, each in found.items()}


# Inputs of the state machine


@dataclass(frozen=True)
class AllocationTerms:
    """The settings of a run that do not change."""

    max_nodes: int
    spares: int = 0
    own_job: int | None = None  # the job whose batch step runs the coordinator
    gone_s: float = 0.0  # maximum time until a lost host is detected
    log: str = ""  # path of the agents' log, for messages
    min_nodes: int = 0  # the smallest number of nodes with which the run continues; 0 means max_nodes
    home: str = ""  # the node that runs the coordinator, in a batch step


@dataclass(frozen=True)
class RunView:
    """The state of the run and the time at which an event is handled."""

    now: float  # Unix time, as in Slurm's output
    clock: float  # monotonic time in seconds
    present: frozenset[str] = frozenset()  # nodes whose agents are connected
    ready: tuple[str, ...] = ()
    started: bool = False  # whether a generation was ever formed
    closing: bool = False  # whether no more agents are needed: the run is ending or leaving its nodes
    ending: bool = False  # whether the run is ending and will not continue on other nodes


@dataclass(frozen=True)
class ProbeResult:
    """The result of probing nodes before agents are started there."""

    found: tuple[NodeInfo, ...] = ()  # the nodes as Slurm reports them; empty if Slurm does not respond
    dead: tuple[str, ...] = ()  # nodes whose hosts do not answer
    step_output: Mapping[int, str] = field(default_factory=dict)  # output of each step on these nodes, by step number
    log: str = ""  # output of all steps


# Actions on Slurm. Jobs and steps are identified by the coordinator's own numbers.


@dataclass(frozen=True)
class RequestJob:
    """Request a job with salloc, excluding `suspects` and the nodes that the run already has (`members`)."""

    number: int
    role: JobRole
    suspects: tuple[str, ...] = ()
    members: tuple[str, ...] = ()


@dataclass(frozen=True)
class LoadJob:
    """Ask Slurm for the nodes of a job that exists already."""

    number: int
    id: int


@dataclass(frozen=True)
class ProbeNodes:
    """Find out which of these nodes respond."""

    number: int
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class StartAgents:
    number: int
    step: int
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class ShrinkJob:
    """Reduce a job to these nodes."""

    number: int
    id: int
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class ReleaseJob:
    """End a job or withdraw its request. Without `code`, the job is cancelled."""

    number: int
    code: int | None = None


@dataclass(frozen=True)
class EndSteps:
    """End the agents in the coordinator's own job, but not the job itself."""

    number: int


@dataclass(frozen=True)
class CommentJob:
    """Tell the controller, in the job's comment, which nodes of the job the run no longer needs."""

    number: int
    id: int
    role: JobRole
    left: frozenset[str]


@dataclass(frozen=True)
class CheckJobs:
    """Ask Slurm for the state of the run's jobs, then call `jobs_checked`."""


@dataclass(frozen=True)
class RequeueOwnJob:
    id: int


# Actions on the run


@dataclass(frozen=True)
class ApplyEvent:
    event: Event


@dataclass(frozen=True)
class LeaveNode:
    """Continue without this node, although it is alive."""

    node: str
    why: str


@dataclass(frozen=True)
class StopRun:
    """End the run for good."""

    code: int
    why: str
    about: RunCause = RunCause.OTHER


@dataclass(frozen=True)
class SuspendRun:
    """End the coordinator but not the run."""

    why: str


@dataclass(frozen=True)
class WriteNote:
    text: str


@dataclass(frozen=True)
class WriteJournal:
    event: RunEvent
    what: Mapping[str, object]


@dataclass(frozen=True)
class SaveState:
    """Save the current state for the next coordinator."""


# Events that the state machine sends to itself after earlier actions, because they depend on the actions' results.


@dataclass(frozen=True)
class CheckAgents:
    after_s: float = 0.0


@dataclass(frozen=True)
class ReleaseLostNodes:
    """Release lost nodes, so that Slurm can repair them or give them to other jobs."""


@dataclass(frozen=True)
class ReportLeftNodes:
    """Update the job comments that list the nodes no longer needed."""


@dataclass(frozen=True)
class RequestNext:
    """Request the next job again."""

    after_s: float


@dataclass(frozen=True)
class WidenNext:
    """Request the next job again, if it still waits, because it excludes nodes that have been replaced."""

    after_s: float


@dataclass(frozen=True)
class MoveRun:
    """Move the run to its next job."""

    after_s: float


SlurmAction = (
    RequestJob
    | LoadJob
    | ProbeNodes
    | StartAgents
    | ShrinkJob
    | ReleaseJob
    | EndSteps
    | CommentJob
    | CheckJobs
    | RequeueOwnJob
)
RunAction = ApplyEvent | LeaveNode | StopRun | SuspendRun | WriteNote | WriteJournal | SaveState
OwnEvent = CheckAgents | ReleaseLostNodes | ReportLeftNodes | RequestNext | WidenNext | MoveRun
Action = SlurmAction | RunAction | OwnEvent
