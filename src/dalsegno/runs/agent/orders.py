"""The coordinator's orders to an agent, and how they are parsed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dalsegno.runs.agent.link import INTERVAL_S
from dalsegno.runs.agent.step_reports import REPORT_EVERY_S
from dalsegno.train.keeper.plan import KeeperAddress
from dalsegno.train.memory.safe_steps import SafeSteps, parse_safe_steps
from dalsegno.wire.frames import Message

ABSENCE_S = 60.0  # how long an agent continues without a coordinator, unless the setup says otherwise


@dataclass(frozen=True)
class Setup:
    """The settings that an agent needs before it starts any process."""

    python: str = ""
    modules: tuple[str, ...] = ()  # modules that the warm parent imports
    script: str = ""
    args: tuple[str, ...] = ()
    module: bool = False  # whether `script` is the name of a module
    is_python: bool = True
    cwd: str = "/"
    folder: str = ""  # the run folder; "" if there is none
    store: bool = False  # whether the agent runs torch's store for the ranks
    env: Mapping[str, str] = field(default_factory=dict)
    stdin: bool = False  # whether workers inherit the agent's stdin; if not, they get /dev/null
    gone_s: float = 0.0  # timeout for a silent host; 0 means no timeout
    beat_s: float = INTERVAL_S  # interval between heartbeats
    report_s: float = REPORT_EVERY_S  # minimum time between two step reports of the node
    absence_s: float = ABSENCE_S
    final_command: tuple[str, ...] = ()  # a command to run if no coordinator returns


@dataclass(frozen=True)
class WorkerOrder:
    """One worker to start."""

    rank: int
    env: Mapping[str, str]
    args: tuple[str, ...] = ()  # if not empty, replaces the setup's arguments
    files: Mapping[str, str] = field(default_factory=dict)  # log files, if they are not in the run folder


Address = tuple[str, int]


@dataclass(frozen=True)
class ResumeOrder:
    """The snapshot from which all workers resume, and the keepers that hold its parts."""

    generation: int
    step: int
    own: Mapping[int, tuple[KeeperAddress, ...]]  # rank -> keepers of its own part
    shared: tuple[KeeperAddress, ...]  # keepers of the part shared by all ranks
    source_ranks: Mapping[int, int] = field(default_factory=dict)  # rank -> the other rank whose own part it loads


@dataclass(frozen=True)
class StartOrder:
    """A node's part of a generation. `peers` are the addresses to probe to find out whether other hosts are alive."""

    generation: int
    workers: tuple[WorkerOrder, ...]
    peers: tuple[Address, ...] = ()
    resume: ResumeOrder | None = None
    buddy: KeeperAddress | None = None  # the keeper that holds copies of this node's snapshots
    safe: SafeSteps | None = None  # the snapshots that must not be overwritten; None if snapshots are not replicated


@dataclass(frozen=True)
class StandbyOrder:
    """An order to prepare standby workers. It contains one environment for each local rank."""

    envs: tuple[Mapping[str, str], ...]
    gpu: bool  # whether to start CUDA; if not, the processes only wait
    backend: str = ""  # the backend of the script's process group; "" if it need not be loaded
    # Settings that the script changes. None means that the script removes the setting.
    changes: Mapping[str, str | None] = field(default_factory=dict)


def read_setup(data: Message) -> Setup:
    return Setup(
        python=str(data["python"]),
        modules=tuple(data["modules"]),
        script=str(data["script"]),
        args=tuple(data["args"]),
        module=bool(data["module"]),
        is_python=bool(data["is_python"]),
        cwd=str(data["cwd"]),
        folder=str(data["folder"]),
        store=bool(data["store"]),
        env=dict(data["env"]),
        stdin=bool(data.get("stdin")),
        gone_s=float(data.get("gone_s", 0.0)),
        beat_s=float(data.get("beat_s", INTERVAL_S)),
        report_s=float(data.get("report_s", REPORT_EVERY_S)),
        absence_s=float(data.get("absence_s", ABSENCE_S)),
        final_command=tuple(data.get("last_word") or ()),
    )


def read_start(data: Message) -> StartOrder:
    common = data.get("env") or {}  # the variables that all workers of the node share
    workers = tuple(_worker({**each, "env": {**common, **each["env"]}}) for each in data["workers"])
    resume = _resume(data["resume"]) if data.get("resume") else None
    safe = parse_safe_steps(data["safe"]) if data.get("safe") else None
    peers = tuple((str(host), int(port)) for host, port in data.get("peers") or ())
    buddy = read_keeper(data.get("buddy"))
    return StartOrder(int(data["generation"]), workers, peers, resume, buddy, safe)


def read_standby(data: Message) -> StandbyOrder:
    changes = {str(name): None if value is None else str(value) for name, value in data["changes"].items()}
    envs = tuple(dict(each) for each in data["envs"])
    return StandbyOrder(envs, bool(data["gpu"]), str(data["backend"]), changes)


def read_keeper(data: Sequence[Any] | None) -> KeeperAddress | None:
    return _keepers([data])[0] if data else None


def _keepers(data: Sequence[Sequence[Any]]) -> tuple[KeeperAddress, ...]:
    return tuple(KeeperAddress(str(host), int(port), str(node)) for host, port, node in data)


def _resume(data: Message) -> ResumeOrder:
    own = {int(rank): _keepers(found) for rank, found in data["own"].items()}
    source_ranks = {int(rank): int(other) for rank, other in data.get("of", {}).items()}
    return ResumeOrder(int(data["generation"]), int(data["step"]), own, _keepers(data["shared"]), source_ranks)


def _worker(data: Message) -> WorkerOrder:
    return WorkerOrder(
        int(data["rank"]), dict(data["env"]), tuple(data.get("args") or ()), dict(data.get("files") or {})
    )
