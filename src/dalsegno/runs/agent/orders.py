"""Orders of the coordinator to its agents, parsed once on arrival."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dalsegno.train.keeper.plan import KeeperAddress
from dalsegno.train.memory.safe import Safe, parse_word
from dalsegno.wire.frames import Message

ABSENCE_S = 60.0  # how long an agent continues without a coordinator, unless the setup says otherwise


@dataclass(frozen=True)
class Setup:
    """What an agent needs to know before anything starts."""

    python: str = ""
    modules: tuple[str, ...] = ()  # to import ahead
    script: str = ""
    args: tuple[str, ...] = ()
    module: bool = False  # the script is a module name
    is_python: bool = True
    cwd: str = "/"
    folder: str = ""  # the run folder; "": nothing is written there
    store: bool = False  # the ranks meet in torch's store
    env: Mapping[str, str] = field(default_factory=dict)
    stdin: bool = False  # workers inherit the agent's stdin; otherwise it is empty
    gone_s: float = 0.0  # timeout for a silent host; 0: never
    absence_s: float = ABSENCE_S
    last_word: tuple[str, ...] = ()  # a command to run when no coordinator returns


@dataclass(frozen=True)
class WorkerOrder:
    """One worker to start."""

    rank: int
    env: Mapping[str, str]
    args: tuple[str, ...] = ()  # replace the setup's arguments, if not empty
    files: Mapping[str, str] = field(default_factory=dict)  # where it writes, if not in the run folder


Address = tuple[str, int]


@dataclass(frozen=True)
class ResumeOrder:
    """The snapshot from which all workers resume, and which keepers hold it."""

    generation: int
    step: int
    own: Mapping[int, tuple[KeeperAddress, ...]]  # by rank
    shared: tuple[KeeperAddress, ...]
    of: Mapping[int, int] = field(default_factory=dict)  # ranks that take another rank's own part


@dataclass(frozen=True)
class StartOrder:
    """A node's part of a generation; `peers` are addresses that show whether the other hosts are alive."""

    generation: int
    workers: tuple[WorkerOrder, ...]
    peers: tuple[Address, ...] = ()
    resume: ResumeOrder | None = None
    buddy: KeeperAddress | None = None  # the keeper that holds copies of this node's snapshots
    safe: Safe | None = None  # what must not be overwritten; None: there are no copies


def read_setup(told: Message) -> Setup:
    return Setup(
        python=str(told["python"]),
        modules=tuple(told["modules"]),
        script=str(told["script"]),
        args=tuple(told["args"]),
        module=bool(told["module"]),
        is_python=bool(told["is_python"]),
        cwd=str(told["cwd"]),
        folder=str(told["folder"]),
        store=bool(told["store"]),
        env=dict(told["env"]),
        stdin=bool(told.get("stdin")),
        gone_s=float(told.get("gone_s", 0.0)),
        absence_s=float(told.get("absence_s", ABSENCE_S)),
        last_word=tuple(told.get("last_word") or ()),
    )


def read_start(told: Message) -> StartOrder:
    workers = tuple(_worker(each) for each in told["workers"])
    resume = _resume(told["resume"]) if told.get("resume") else None
    safe = parse_word(told["safe"]) if told.get("safe") else None
    peers = tuple((str(host), int(port)) for host, port in told.get("peers") or ())
    buddy = read_keeper(told.get("buddy"))
    return StartOrder(int(told["generation"]), workers, peers, resume, buddy, safe)


def read_keeper(told: Sequence[Any] | None) -> KeeperAddress | None:
    return _keepers([told])[0] if told else None


def _keepers(told: Sequence[Sequence[Any]]) -> tuple[KeeperAddress, ...]:
    return tuple(KeeperAddress(str(host), int(port), str(node)) for host, port, node in told)


def _resume(told: Message) -> ResumeOrder:
    own = {int(rank): _keepers(found) for rank, found in told["own"].items()}
    of = {int(rank): int(other) for rank, other in told.get("of", {}).items()}
    return ResumeOrder(int(told["generation"]), int(told["step"]), own, _keepers(told["shared"]), of)


def _worker(told: Message) -> WorkerOrder:
    return WorkerOrder(
        int(told["rank"]), dict(told["env"]), tuple(told.get("args") or ()), dict(told.get("files") or {})
    )
