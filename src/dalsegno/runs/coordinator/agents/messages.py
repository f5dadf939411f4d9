"""Parse the messages from run agents.

The senders have proved that they know the run's secret. An unreadable message raises an error and ends the connection.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dalsegno.printable import one_line
from dalsegno.runs.coordinator.generations.causes import Failure, read_failure
from dalsegno.runs.coordinator.generations.events import (
    AgentGone,
    AgentJoined,
    Event,
    GenerationStopped,
    StoreOpened,
    WorkerEnded,
)
from dalsegno.runs.coordinator.generations.snapshots import HeldSnapshot
from dalsegno.runs.coordinator.generations.standbys import GpuUse, StandbyLost, StandbyReady
from dalsegno.train.contract import DONE, SAVED
from dalsegno.train.memory.safe_steps import SafeSteps, parse_safe_steps
from dalsegno.wire.cloud_notice import CloudNotice, parse_code
from dalsegno.wire.frames import Message

MAX_EVIDENCE = 500  # maximum number of characters of an agent's explanation
UNREADABLE = (KeyError, TypeError, ValueError, AttributeError, OverflowError)


@dataclass(frozen=True)
class WorkerReport:
    """The end of a worker, with evidence of the cause."""

    generation: int
    rank: int
    code: int  # exit code; negative for a signal
    traceback: str = ""
    oom: bool = False


@dataclass(frozen=True)
class AgentHello:
    """An agent's first message: its identity and addresses, its workers, and the snapshots it holds."""

    agent: str
    probe: int  # a port on which the agent's host answers
    pid: int = 0
    job: int = 0  # the Slurm job that the agent runs in
    address: str = ""  # address for other nodes, if it differs from that of the connection
    found: Mapping[str, str] = field(default_factory=dict)  # variables of the agent that determine those of its workers
    generation: int = 0  # the generation of the agent's workers
    stopped: int = 0  # the last generation whose processes have all ended on the node
    reports: tuple[WorkerReport, ...] = ()
    held: tuple[HeldSnapshot, ...] = ()
    keeper: int = 0  # the port of the node's keeper
    safe: SafeSteps | None = None  # the last `SafeSteps` that the agent received

    def still_runs(self, generation: int) -> bool:
        """Return whether the agent still runs this generation's workers."""
        return self.generation == generation > self.stopped


@dataclass(frozen=True)
class Ready:
    """Workers can be started."""

    warm: bool = False
    seconds: float | None = None  # duration of the warm parent's imports
    threads: tuple[str, ...] = ()  # extra threads in the warm parent, which do not exist in its workers


@dataclass(frozen=True)
class ParentDied:
    """The warm parent has died, and its workers with it."""

    why: str


@dataclass(frozen=True)
class Broken:
    """The run cannot use this node."""

    why: str


@dataclass(frozen=True)
class StoreOpen:
    generation: int
    port: int


@dataclass(frozen=True)
class EndedWorker:
    """A worker ended, but not because its agent stopped it."""

    report: WorkerReport


@dataclass(frozen=True)
class AllStopped:
    """All processes of a generation on this node have ended. `reports` describe workers that had already failed."""

    generation: int
    reports: tuple[WorkerReport, ...] = ()
    held: tuple[HeldSnapshot, ...] = ()


@dataclass(frozen=True)
class Stepped:
    generation: int
    step: int
    progress: Mapping[str, float] = field(default_factory=dict)
    over: bool = False  # whether this was the last step; hang detection does not apply to the rest of the script
    busy_s: Mapping[int, float] = field(default_factory=dict)  # rank -> its step time without waiting for others


@dataclass(frozen=True)
class MemoryHeld:
    """The snapshots that the node's memory holds now."""

    held: tuple[HeldSnapshot, ...]


@dataclass(frozen=True)
class GrantRequested:
    """A worker of this generation asks for permission to commit its checkpoint."""

    number: int
    generation: int


@dataclass(frozen=True)
class StacksTaken:
    generation: int


@dataclass(frozen=True)
class WorkerActivity:
    """The resources that a worker and its child processes have used since it started, and the recent use of its GPUs.

    The percentages are None if they are unknown, or if no kernel has run.
    """

    cpu_s: float
    moved: int  # number of bytes read and written
    sm_percent: int | None = None  # lowest share of time in which a kernel ran, of several samples
    memory_percent: int | None = None  # highest share of time in which GPU memory was read or written


@dataclass(frozen=True)
class NodeActivity:
    """The activity of a node's running workers, by rank."""

    generation: int
    ranks: Mapping[int, WorkerActivity]


@dataclass(frozen=True)
class Signalled:
    """Slurm sent the agent a signal."""

    name: str


@dataclass(frozen=True)
class NoticeRead:
    """An agent has read that the cloud will reclaim its node.

    `notice` is None if this version does not know the notice.
    """

    notice: CloudNotice | None


@dataclass(frozen=True)
class UserNote:
    """A line for the user."""

    text: str


@dataclass(frozen=True)
class WorkersResumed:
    """The workers of a generation have loaded the state of a step, from memory or from disk."""

    generation: int
    step: int
    from_memory: bool


@dataclass(frozen=True)
class StepVerified:
    """All ranks computed the same gradients in this step."""

    generation: int
    step: int


@dataclass(frozen=True)
class CorruptionFound:
    """Ranks disagree about the gradients of a step.

    `ranks` lists the ranks with wrong gradients; it is empty if they are unknown.
    """

    generation: int
    step: int
    ranks: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class LogPiece:
    """Log text from a node that has no access to the run folder."""

    name: str
    text: str
    at: int = 0  # offset of the text in the node's file, in bytes
    stream: str = ""  # name of the agent's log stream, which is different for each agent

    @property
    def data(self) -> bytes:
        return self.text.encode("utf-8", "surrogateescape")


AgentMessage = (
    Ready | ParentDied | Broken | StoreOpen | EndedWorker | AllStopped | Stepped | MemoryHeld | GrantRequested
    | StacksTaken | NodeActivity | Signalled | NoticeRead | UserNote | WorkersResumed | LogPiece | GpuUse | StandbyReady
    | StandbyLost | StepVerified | CorruptionFound
)  # fmt: skip


def read_hello(message: Message) -> AgentHello:
    found: Mapping[str, str] = message["found"]
    return AgentHello(
        agent=str(message["agent"]),
        probe=int(message["probe"]),
        pid=_number(message, "pid"),
        job=_number(message, "job"),
        address=str(message.get("address") or ""),
        found={str(name): str(value) for name, value in found.items()},
        generation=_number(message, "generation"),
        stopped=_number(message, "stopped"),
        reports=_reports(message),
        held=_held(message.get("held")),
        keeper=_number(message, "keeper"),
        safe=parse_safe_steps(message["safe"]) if message.get("safe") else None,
    )


def read_message(message: Message) -> AgentMessage | None:
    """Return the parsed message; None for a heartbeat, and for a message that this version does not know."""
    return next((read(message) for key, read in _READERS.items() if key in message), None)


_READERS: dict[str, Callable[[Message], AgentMessage]] = {
    "ready": lambda message: _ready(message["ready"]),
    "cold": lambda message: ParentDied(str(message["cold"])),
    "broken": lambda message: Broken(str(message["broken"])),
    "store": lambda message: StoreOpen(int(message["store"]), int(message["port"])),
    "ended": lambda message: EndedWorker(_report(message["ended"])),
    "stopped": lambda message: AllStopped(int(message["stopped"]), _reports(message), _held(message.get("held"))),
    "step": lambda message: Stepped(
        _number(message, "generation"),
        int(message["step"]),
        _figures(message.get("progress")),
        bool(message.get("over")),
        _busy_times(message.get("busy")),
    ),
    "kept": lambda message: MemoryHeld(_held(message["kept"])),
    "grant": lambda message: GrantRequested(int(message["grant"]), int(message["generation"])),
    "stacks": lambda message: StacksTaken(int(message["stacks"])),
    "worked": lambda message: NodeActivity(int(message["worked"]), _works(message["ranks"])),
    "signal": lambda message: Signalled(str(message["signal"])),
    "notice": lambda message: NoticeRead(parse_code(str(message["notice"]))),
    "note": lambda message: UserNote(str(message["note"])),
    "resumed": lambda message: WorkersResumed(
        _number(message, "generation"), int(message["resumed"]), message.get("source") == "memory"
    ),
    "gpu": lambda message: _gpu_use(message["gpu"]),
    "standby": lambda message: _standby(message["standby"]),
    "verified": lambda message: StepVerified(_number(message, "generation"), int(message["verified"])),
    "corruption": lambda message: _corruption(_number(message, "generation"), message["corruption"]),
    "log": lambda message: LogPiece(
        str(message["log"]), str(message["text"]), int(message["at"]), str(message["stream"])
    ),
}


def _corruption(generation: int, data: Message) -> CorruptionFound:
    ranks = tuple(int(rank) for rank in data["ranks"])
    return CorruptionFound(generation, int(data["step"]), ranks, one_line(str(data["text"]))[:MAX_EVIDENCE])


def _ready(data: Message) -> Ready:
    return Ready(bool(data.get("warm")), data.get("seconds"), tuple(map(str, data.get("threads") or ())))


def _gpu_use(data: Message) -> GpuUse:
    changes = {str(name): None if value is None else str(value) for name, value in data["env"].items()}
    return GpuUse(changes, str(data.get("backend") or ""), str(data.get("unfit") or ""), data.get("reporter") is True)


def _standby(data: Message) -> StandbyReady | StandbyLost:
    if data.get("lost"):
        return StandbyLost(one_line(str(data["lost"]))[:MAX_EVIDENCE], _optional_int(data.get("local_rank")))
    return StandbyReady(_optional_int(data.get("mib")))


def _optional_int(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _held(data: Sequence[Message] | None) -> tuple[HeldSnapshot, ...]:
    return tuple(
        HeldSnapshot(
            rank=int(each["rank"]),
            step=int(each["step"]),
            generation=int(each["generation"]),
            world=int(each["world"]),
            own=bool(each["own"]),
            shared=bool(each["shared"]),
            sharded=bool(each["sharded"]),
        )
        for each in data or ()
    )


def _works(data: Mapping[str, Sequence[float]]) -> dict[int, WorkerActivity]:
    return {
        int(rank): WorkerActivity(float(cpu_s), int(moved), *map(int, gpus[:2]))
        for rank, (cpu_s, moved, *gpus) in data.items()
    }


def _figures(data: Message | None) -> dict[str, float]:
    """Return the figures that a worker reports. Values that are not numbers are dropped."""
    found = (data or {}).items()
    return {str(name): float(value) for name, value in found if isinstance(value, (int, float))}


def _busy_times(data: Message | None) -> dict[int, float]:
    return {int(rank): float(seconds) for rank, seconds in (data or {}).items()}


def _reports(message: Message) -> tuple[WorkerReport, ...]:
    return tuple(_report(each) for each in message.get("reports") or ())


def _report(data: Message) -> WorkerReport:
    return WorkerReport(
        generation=int(data["generation"]),
        rank=int(data["rank"]),
        code=int(data["code"]),
        traceback=str(data.get("traceback") or ""),
        oom=bool(data.get("oom")),
    )


def _number(message: Message, name: str) -> int:
    return int(message.get(name) or 0)


# Converting messages to events


def to_event(agent: str, message: AgentMessage, age_s: float, healthy: bool = True) -> Event | None:
    """Convert a message into an event for the state machine; None if it causes no event.

    `age_s` is the age of the generation. `healthy` says whether the agent's node is in service in Slurm.
    """
    if isinstance(message, Ready):
        return AgentJoined(agent)
    if isinstance(message, ParentDied):  # count the node as lost, because a spare with a warm parent is ready earlier
        return AgentGone(agent)
    if isinstance(message, StoreOpen):
        return StoreOpened(agent, message.generation, message.port)
    if isinstance(message, EndedWorker):
        return _ended(agent, message.report, age_s, healthy)
    if isinstance(message, AllStopped):
        return GenerationStopped(
            agent, message.generation, tuple(_failure(agent, report, healthy) for report in message.reports)
        )
    return None


def _ended(agent: str, report: WorkerReport, age_s: float, healthy: bool) -> WorkerEnded:
    failure = _failure(agent, report, healthy) if report.code not in (DONE, SAVED) else None
    return WorkerEnded(agent, report.generation, report.rank, report.code, failure, age_s)


def _failure(agent: str, report: WorkerReport, healthy: bool) -> Failure:
    failure = read_failure(report.rank, agent, report.code, report.traceback, oom=report.oom)
    return replace(failure, healthy=healthy)
