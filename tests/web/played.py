"""A generated cluster for tests, screenshots and the benchmark of the web page."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dalsegno.health.messages import GpuReading
from dalsegno.health.result import Verdict
from dalsegno.observe.http_server import HttpRequest, HttpResponse
from dalsegno.recovery.decisions.phase import NodePhase
from dalsegno.recovery.journal.event import Event, EventKind, EventStage
from dalsegno.runs.coordinator.reports.goodput import Goodput, TimeKind, TrainingProgress
from dalsegno.runs.coordinator.reports.history import StepPoint
from dalsegno.runs.status import NodeRole, RunNodeStatus, RunPhase, RunStatus
from dalsegno.slurm.facts import JobInfo, JobState, NodeFlag, NodeInfo, NodeState
from dalsegno.slurm.render import SPARE_REASON
from dalsegno.web.app import WebApp, WebSite
from dalsegno.web.live import LivePicture
from dalsegno.web.requests import WebAction
from dalsegno.web.sessions import Sessions, Visitor, WebRole
from dalsegno.web.snapshot import (
    AgentReport,
    Automation,
    ClusterPicture,
    ControllerPart,
    NodeRecoveryDetail,
    RunPicture,
    SlurmPart,
)
from dalsegno.web.sources import PlayedSources
from dalsegno.web.view import (
    CheckRecord,
    DrillSummary,
    EvidenceBundle,
    GpuPrice,
    GpuRecord,
    NodeDetails,
    RunDetails,
    UserHours,
)
from dalsegno.wire.liveness import Presence

NOW = 1_794_800_000.0
HOST = "127.0.0.1:6820"


def node(name: str, state: NodeState = NodeState.IDLE, *flags: NodeFlag, used: int = 0, **more: object) -> NodeInfo:
    known = NodeInfo(
        name, state, frozenset(flags), partitions=("train",), gpus=8, gpus_used=used, gpu_type="h100", cpus=96,
        cpus_used=used * 12, memory_mib=2_000_000, memory_used_mib=used * 200_000,
        gpu_indexes=tuple(range(used)),
    )  # fmt: skip
    return replace(known, **more)  # type: ignore[arg-type]


def job(id: int, name: str = "train", user: str = "ada", uid: int = 1001, **more: object) -> JobInfo:
    known = JobInfo(id, name, user, JobState.RUNNING, uid=uid, partition="train", gpus=8, node_count=1, priority=100)
    return replace(known, **more)  # type: ignore[arg-type]


def readings(seed: int, used: int) -> tuple[GpuReading, ...]:
    found = []
    for index in range(8):
        busy = index < used
        heat = 34 + (seed * 7 + index * 3) % 9 + (30 if busy else 0)
        memory = 81_920 * (0.55 + ((seed + index) % 5) * 0.08) if busy else 450
        found.append(GpuReading(index, heat, round(memory), 81_920, 95 if busy else 0))
    return tuple(found)


def run(
    name: str, user: str, uid: int, nodes: Sequence[str], phase: RunPhase = RunPhase.RUNNING, **more: object
) -> RunPicture:
    status = RunStatus(
        name, name.rpartition("-")[0], user, phase, NOW - 8000, NOW, generation=4, lost_nodes=2, restarts=1,
        wanted_nodes=len(nodes) or 4, world_size=8 * len(nodes), nproc_per_node=8,
        nodes=tuple(RunNodeStatus(each, NodeRole.MEMBER, rank) for rank, each in enumerate(nodes)), jobs=(101,),
        started=NOW - 7900,
    )  # fmt: skip
    spent = {
        TimeKind.PRODUCTIVE: 7400.0, TimeKind.LOST: 96.0, TimeKind.CHECKPOINTS: 61.0, TimeKind.WAITING: 40.0,
        TimeKind.STARTING: 83.0,
    }  # fmt: skip
    account = Goodput(NOW, spent, TimeKind.PRODUCTIVE, 18_240, 18_240, failures=3)
    progress = TrainingProgress(account, {"loss": 2.1387, "step_s": 0.412, "tokens_per_s": 512_300.0, "lr": 3e-4})
    return RunPicture(f"/home/{user}/runs/{name}", uid, replace(status, **more), progress)  # type: ignore[arg-type]


def event(
    id: int, text: str, node: str = "", kind: EventKind = EventKind.NOTE, ago_s: float = 60.0, **more: object
) -> Event:
    return Event(id, NOW - ago_s, node, kind, text, **more)  # type: ignore[arg-type]


def small_cluster() -> PlayedSources:
    """Return a cluster with ten nodes, some of which need attention, three runs and a queue."""
    names = [f"gpu-{number}" for number in range(1, 11)]
    infos = [node(name, NodeState.ALLOCATED, used=8) for name in names[:5]]
    infos += [
        node("gpu-6", NodeState.MIXED, used=3),
        node("gpu-7"),
        node("gpu-8", NodeState.DOWN, NodeFlag.DRAIN, NodeFlag.NOT_RESPONDING, reason="dalsegno:replace:gone"),
        node("gpu-9", NodeState.IDLE, NodeFlag.DRAIN, reason="fan is loud (by ada)", reason_at=int(NOW) - 4000),
        node("gpu-10", NodeState.IDLE, NodeFlag.DRAIN, reason=SPARE_REASON),
        node("cpu-1", NodeState.MIXED, partitions=("lab",), gpus=0, gpu_type="", cpus=64, cpus_used=20, gpu_indexes=()),
    ]  # fmt: skip
    jobs = (
        job(101, "llama-k3f9x", nodes=tuple(names[:4]), gpus=32, node_count=4, started_at=int(NOW - 7990)),
        job(102, "vit-q8m2z", "bob", 1002, nodes=("gpu-5",), started_at=int(NOW - 610)),
        job(103, "notebook", "cem", 1003, nodes=("gpu-6",), gpus=3, started_at=int(NOW - 12000)),
        job(104, "sweep <img src=x>", "bob", 1002, state=JobState.PENDING, reason="Resources", gpus=16, node_count=2,
            submitted_at=int(NOW - 300), priority=4200, time_limit_s=7200),
        job(105, "eval", "ada", 1001, state=JobState.PENDING, reason="Priority", gpus=8, submitted_at=int(NOW - 120)),
    )  # fmt: skip
    records = {
        "gpu-7": NodeRecoveryDetail(
            "gpu-7", NodePhase.SUSPECTED, NOW - 30, note="gpu-heating: GPU 5 reaches 90 °C in 12 min"
        ),
        "gpu-8": NodeRecoveryDetail(
            "gpu-8", NodePhase.REPAIRING, NOW - 8, "dalsegno:replace:gone no answer from host and slurmd"
        ),
        "gpu-10": NodeRecoveryDetail("gpu-10", NodePhase.SPARE, NOW - 9000, validated_at=NOW - 9000),
    }
    agents = {
        name: AgentReport(name, Presence.CONNECTED, NOW, 28, (), readings(at, info.gpus_used))
        for at, (name, info) in enumerate(zip(names, infos, strict=False))
    }
    agents["gpu-8"] = AgentReport("gpu-8", Presence.GONE, NOW - 10)
    agents["gpu-7"] = replace(
        agents["gpu-7"], findings=(("gpu-heating", Verdict.WARNED, "GPU 5 reaches 90 °C in 12 min"),)
    )
    events = (
        event(1, "GPU 3: Xid 79, fell off the bus", "gpu-4", EventKind.DRAIN, 5400),
        event(2, "evidence saved", "gpu-4", EventKind.EVIDENCE, 5398, stage=EventStage.DONE),
        event(3, "replaced by another machine", "gpu-4", EventKind.REPLACE, 5380, stage=EventStage.DONE),
        event(4, "validated alone and with gpu-5", "gpu-4", EventKind.VALIDATE, 5350, stage=EventStage.DONE),
        event(5, "returned to service", "gpu-4", EventKind.RETURN, 5349, stage=EventStage.DONE),
        event(
            6, "drained by ada in the web page: fan is loud", "gpu-9", EventKind.REQUEST, 4000, stage=EventStage.DONE
        ),
        event(7, "no answer from host and slurmd: the node is lost", "gpu-8", EventKind.SET_DOWN, 9),
        event(8, "starting to replace the machine", "gpu-8", EventKind.REPLACE, 8, stage=EventStage.BEGUN),
    )
    runs = (
        run("llama-k3f9x", "ada", 1001, names[:4]),
        run("vit-q8m2z", "bob", 1002, names[4:5], generation=1, lost_nodes=0, restarts=0),
        run("old-aaaaa", "ada", 1001, (), RunPhase.ENDED, ended=NOW - 90_000, exit_code=0, created=NOW - 100_000),
    )
    automation = Automation(False, "auto", 4, {"train": 1})
    controller = ControllerPart(records, agents, automation, events)
    return PlayedSources(SlurmPart(tuple(infos), jobs), controller, runs)


def large_cluster(nodes: int = 1000) -> PlayedSources:
    """Return a cluster with many nodes of eight GPUs each, most of which are busy."""
    names = [f"gpu-{number:04d}" for number in range(1, nodes + 1)]
    states = [
        (NodeState.ALLOCATED, (), 8) if at % 11 else (NodeState.IDLE, (), 0) if at % 3 else (NodeState.MIXED, (), 4)
        for at in range(nodes)
    ]
    infos = [node(name, state, *flags, used=used) for name, (state, flags, used) in zip(names, states, strict=True)]
    jobs = [
        job(1000 + at, f"job-{at}", f"user{at % 23}", 2000 + at % 23, nodes=tuple(names[at * 8 : at * 8 + 8]), gpus=64)
        for at in range(nodes // 8)
    ]
    agents = {
        info.name: AgentReport(info.name, Presence.CONNECTED, NOW, 28, (), readings(at, info.gpus_used))
        for at, info in enumerate(infos)
    }
    records = {
        name: NodeRecoveryDetail(name, NodePhase.REPAIRING, NOW - 5, "dalsegno:replace:xid[79]") for name in names[::97]
    }
    return PlayedSources(SlurmPart(tuple(infos), tuple(jobs)), ControllerPart(records, agents))


class PlayedData:
    """Details of the nodes and runs of a generated cluster."""

    gpu_price = GpuPrice(2.5, "at 2.5 per GPU hour, as the cluster file says")

    def node_details(self, node: str) -> NodeDetails:
        own = [event(at, text, node, kind, 600 - 30 * at) for at, (text, kind) in enumerate((
            ("GPU 3: Xid 79, fell off the bus", EventKind.DRAIN), ("replaced by another machine", EventKind.REPLACE),
            ("validated", EventKind.VALIDATE), ("returned to service", EventKind.RETURN),
        ))]  # fmt: skip
        gpus = [
            GpuRecord(at, f"GPU-5d2e1f0a-9b6c-4a1e-8f57-0a3c2b1d4e{at:02d}", "", "NVIDIA H100", NOW - 9000, None)
            for at in range(8)
        ]
        checks = (
            CheckRecord(NOW - 600, "xid", Verdict.FAILED, "79 on GPU 3"),
            CheckRecord(NOW - 400, "xid", Verdict.PASSED, "none"),
        )
        bundle = EvidenceBundle("20261117T201500Z", (("dmesg.txt", 9000), ("nvidia-smi.txt", 12000), ("jobs.txt", 300)))
        return NodeDetails(
            ("replace",), (), tuple(gpus), checks, tuple(own), (bundle,), ("power-off", "xid", "net-cut")
        )

    def run_details(self, view: RunPicture) -> RunDetails:
        return RunDetails(tuple(curve()), tuple(journal()))

    def gpus_of(self, view: RunPicture) -> int:
        return 8 * (len(view.status.nodes) or 4)

    def user_hours(self, days: int) -> Sequence[UserHours] | None:
        return [UserHours("ada", "nlp", 41, 812.4 * days, 101.5), UserHours("bob", "vision", 12, 96.2 * days, 12.1)]

    def drills(self) -> Sequence[DrillSummary]:
        return [DrillSummary("20261117T190000Z-7", NOW - 5000, True, 12, 0.913, 2.4, True)]


def curve() -> list[StepPoint]:
    """Return a loss curve that falls, with three restarts that repeat some steps."""
    points, step = [], 0
    for second in range(0, 7900, 10):
        generation = 1 + (second > 2000) + (second > 2600) + (second > 5200)
        step = step - 60 if second in (2010, 2610, 5210) else step + 24
        wave = 0.05 * math.sin(second / 37) * math.exp(-second / 6000)
        loss = 1.9 + 4.2 * math.exp(-step / 3600) + wave
        slow = 0.4 + 0.02 * math.sin(second / 91) + (0.35 if second in range(2010, 2040) else 0.0)
        points.append(StepPoint(NOW - 7900 + second, step, generation, loss, slow))
    return points


def journal() -> list[dict[str, object]]:
    began = NOW - 7900
    nodes = ["gpu-1", "gpu-2", "gpu-3", "gpu-4"]
    return [
        {"at": began - 60, "event": "granted", "job": 101, "nodes": nodes},
        {"at": began, "event": "generation", "generation": 1, "nodes": nodes},
        {"at": began + 2000, "event": "lost", "node": "gpu-4", "why": "no answer from host", "was": "member"},
        {"at": began + 2006, "event": "generation", "generation": 2, "nodes": nodes},
        {"at": began + 2600, "event": "failed", "rank": 3, "node": "gpu-2", "what": "was killed by signal 9"},
        {"at": began + 2603, "event": "generation", "generation": 3, "nodes": nodes},
        {"at": began + 5200, "event": "lost", "node": "gpu-3", "why": "its connection broke", "was": "member"},
        {"at": began + 5203, "event": "generation", "generation": 4, "nodes": nodes},
    ]


class RecordedActions:
    """Records the actions that were allowed."""

    def __init__(self) -> None:
        self.done: list[tuple[WebAction, Visitor]] = []

    def do(self, action: WebAction, visitor: Visitor, snapshot: ClusterPicture) -> str:
        self.done.append((action, visitor))
        return "done"


class PlayedSite:
    """The web application with generated sources, and a browser's side of it."""

    def __init__(
        self,
        sources: PlayedSources,
        folder: Path | None = None,
        name: str = "played",
        data: PlayedData | None = None,
    ) -> None:
        self.temporary = folder is None
        self.folder = folder or Path(tempfile.mkdtemp(prefix="ds-web-"))
        self.live = LivePicture(sources, name)
        self.live.start()
        self.sessions = Sessions(self.folder / "sessions.json")
        self.actions, self.data = RecordedActions(), data or PlayedData()
        site = WebSite(
            name, "dalsegno-1", frozenset({"127.0.0.1", "head"}), self.folder / "drills", self.folder / "evidence",
            f"dalsegno web --cluster {name}",
        )  # fmt: skip
        self.app = WebApp(site, self.live, self.sessions, self.data, self.actions)

    def close(self) -> None:
        self.live.close()
        if self.temporary:
            shutil.rmtree(self.folder, ignore_errors=True)

    def cookie(self, role: WebRole = WebRole.OPERATOR, uid: int = 0, user: str = "root") -> str:
        return self.sessions.exchange(self.sessions.issue(role, uid, user)) or ""

    def get(self, path: str, cookie: str = "", query: dict[str, str] | None = None, **headers: str) -> HttpResponse:
        sent = {
            "host": HOST,
            "cookie": f"dalsegno-1={cookie}",
            **{key.replace("_", "-"): value for key, value in headers.items()},
        }
        return self.app.handle(HttpRequest("GET", path, query or {}, sent))

    def post(self, path: str, cookie: str, form: str, **headers: str) -> HttpResponse:
        usual = {"host": HOST, "origin": f"http://{HOST}", "cookie": f"dalsegno-1={cookie}",
                 "content-type": "application/x-www-form-urlencoded"}  # fmt: skip
        sent = {**usual, **{key.replace("_", "-"): value for key, value in headers.items()}}
        return self.app.handle(HttpRequest("POST", path, {}, sent, form.encode()))

    def text(self, path: str, cookie: str, **query: str) -> str:
        body = self.get(path, cookie, query).body
        return (body if isinstance(body, bytes) else b"".join(body)).decode()
