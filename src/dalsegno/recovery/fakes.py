"""A small cluster in memory: fakes of Slurm, the node agents and a target, for tests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from dalsegno.errors import CommandFailed, DalsegnoError, NotThere
from dalsegno.health import Finding, GpuIdentity, NodeReport, Remedy, failed, passed, unknown
from dalsegno.recovery.agents.view import AgentView
from dalsegno.recovery.decisions.facts import Facts, Validation, gather, is_active
from dalsegno.recovery.journal.evidence import INCOMPLETE
from dalsegno.slurm.facts import JobInfo, JobState, NodeFlag, NodeInfo, NodeState
from dalsegno.slurm.parse.jobs import JobList
from dalsegno.wire.liveness import Presence

_NO_REQUEUE = "no-requeue"
SLURMD_TIMEOUT_S = 300.0


@dataclass
class FakeMachine:
    """The simulated machine of a node.

    `cured_by` is the lightest remedy that repairs the machine; None if it is healthy. `says` is the remedy that its
    checks report.
    """

    boot: str
    gpus: tuple[str, ...]
    on: bool = True
    cured_by: Remedy | None = None
    says: Remedy | None = None
    code: str = "79"
    check: str = "xid"  # the check that fails
    also: tuple[str, ...] = ()  # other checks that fail with it
    silent: bool = False  # whether all checks return unknown


@dataclass
class FakeNode:
    machine: FakeMachine
    partitions: tuple[str, ...] = ("train",)
    flags: frozenset[NodeFlag] = frozenset()
    down: bool = False
    reason: str = ""
    user: str = ""
    reason_at: int | None = None
    booted_at: int | None = None
    validation: Validation | None = None
    agent: bool = True
    was_connected: bool = False  # whether the agent was ever connected
    asked: str = ""  # id of the validation in progress; "": none
    resting: bool = False  # whether the agent has released the GPUs
    missed_at: float | None = None  # when slurmctld lost contact with the node
    late: bool = False  # whether the controller hears nothing from the machine although it is up
    lost_at: float | None = None  # when the controller lost contact with the node
    heard_at: float | None = None  # when the controller first heard the node, or heard it again
    quiet: bool = False  # whether the agent sends nothing
    effects: list[str] = field(default_factory=list)  # actions on the node


@dataclass
class FakeCluster:
    """The whole cluster. `now` is the only clock."""

    nodes: dict[str, FakeNode] = field(default_factory=dict)
    queue: dict[int, JobInfo] = field(default_factory=dict)
    runs: dict[str, int] = field(default_factory=dict)  # run -> uid of its owner
    now: float = 1_000_000.0
    slurm_answers: bool = True
    bad_replacements: int = 0  # how many of the next replacements are broken
    same_gpus_again: int = 0  # how many of the next replacements have the old machine's GPUs
    boots: int = 0
    validations: bool = True  # whether nodes answer validation orders
    tell_gpus: bool = True  # whether agents have reported their GPUs
    blind: bool = False  # whether the controller's own network has failed
    see_again_at: float | None = None  # when the controller's network works again
    slow: bool = False  # whether Slurm takes time to remove a node from its jobs
    updates: list[Mapping[str, str]] = field(default_factory=list)  # arguments of each `update`
    reservations: dict[str, str] = field(default_factory=dict)  # name of a reservation -> its users
    forbidden: list[str] = field(default_factory=list)  # forbidden actions that were carried out

    @classmethod
    def of(cls, count: int, partition: str = "train") -> FakeCluster:
        cluster = cls()
        for number in range(1, count + 1):
            cluster.nodes[f"n{number}"] = FakeNode(cluster.machine(), (partition,))
        return cluster

    def machine(self) -> FakeMachine:
        self.boots += 1
        return FakeMachine(f"boot-{self.boots}", (f"GPU-{self.boots}-a", f"GPU-{self.boots}-b"))

    def facts(self, underway: frozenset[str] = frozenset()) -> Facts:
        if not self.slurm_answers:
            return Facts(None)
        slurm, agents = FakeSlurm(self), FakeAgents(self)
        self._slurm_misses()
        if self.see_again_at is not None and self.now >= self.see_again_at:
            self.blind = False
        return gather(slurm.nodes(), slurm.jobs(ended=True), agents, self.now, underway, self.runs)

    def _slurm_misses(self) -> None:
        """Set down the nodes that have not answered slurmctld within its timeout, and remove them from their jobs."""
        for name, node in self.nodes.items():
            node.missed_at = None if node.machine.on else self.now if node.missed_at is None else node.missed_at
            missed = node.missed_at is not None and self.now - node.missed_at >= SLURMD_TIMEOUT_S
            if missed and not node.down and NodeFlag.POWERED_DOWN not in node.flags:
                node.down = True
                node.reason, node.user = node.reason or "Not responding", node.user or "slurm"
                FakeSlurm(self).remove_from_jobs(name)

    # Events that a test causes

    def break_gpu(self, node: str, cured_by: Remedy, code: str = "79", says: Remedy | None = None) -> None:
        machine = self.nodes[node].machine
        machine.cured_by, machine.code, machine.says = cured_by, code, says or cured_by

    def kill_slurmd(self, node: str) -> None:
        self.break_gpu(node, Remedy.REBOOT, code="")
        self.nodes[node].machine.check = "slurmd"

    def power_off(self, node: str) -> None:
        self.nodes[node].machine.on = False

    def start(
        self, job: int, *nodes: str, comment: str = "", name: str = "", requeue: bool = True, user: str = "ada",
        uid: int | None = None,
    ) -> None:  # fmt: skip
        """Start a job; without nodes it is pending."""
        state = JobState.RUNNING if nodes else JobState.PENDING
        self.queue[job] = JobInfo(
            job, name or f"job{job}", user, state, uid=uid or {"ada": 1000}.get(user, 1001), partition="train",
            nodes=nodes, node_count=len(nodes) or 1, comment=comment,
            reason="" if nodes else "Resources", batch_host=nodes[0] if nodes else "", started_at=int(self.now),
            qos="" if requeue else _NO_REQUEUE,
        )  # fmt: skip

    def start_run(self, job: int, *nodes: str, run: str = "train-k3f9", uid: int = 1000) -> None:
        """Start the main job of a run that the controller supervises for this user."""
        self.runs[run] = uid
        self.start(job, *nodes, comment="dalsegno:main", name=run, uid=uid)

    def join(self, job: int, *nodes: str, run: str = "train-k3f9", uid: int = 1000) -> None:
        """Start a job that adds a node to a run; without a node it is pending."""
        self.start(job, *nodes, comment="dalsegno:join", name=run, uid=uid)

    def end(self, job: int, state: JobState = JobState.COMPLETED, exit_code: int = 0) -> None:
        self.queue[job] = replace(self.queue[job], state=state, ends_at=int(self.now), exit_code=exit_code)

    def someone_drains(self, node: str, reason: str = "my own reason") -> None:
        old = self.nodes[node]
        old.flags, old.reason, old.user = old.flags | {NodeFlag.DRAIN}, reason, "admin"

    def someone_resumes(self, node: str) -> None:
        old = self.nodes[node]
        old.flags, old.down, old.reason, old.user = old.flags - {NodeFlag.DRAIN}, False, "", ""

    def slurm_drains(self, node: str, reason: str = "Prolog error") -> None:
        """Drain a node as slurmctld does. A node that is already drained keeps its reason."""
        old = self.nodes[node]
        if not old.flags and not old.down:
            old.flags, old.reason, old.user = old.flags | {NodeFlag.DRAIN}, reason, "slurm"


class FakeSlurm:
    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster

    def nodes(self, names: str | Iterable[str] = ()) -> list[NodeInfo]:
        self._answers()
        wanted = [names] if isinstance(names, str) and names else list(names)
        return [self._info(name) for name in wanted or self.cluster.nodes]

    def _info(self, name: str) -> NodeInfo:
        node = self.cluster.nodes[name]
        busy = any(is_active(job) and name in job.nodes for job in self.cluster.queue.values())
        state = NodeState.DOWN if node.down else NodeState.MIXED if busy else NodeState.IDLE
        flags = node.flags if node.machine.on else node.flags | {NodeFlag.NOT_RESPONDING}
        return NodeInfo(
            name, state, flags, reason=node.reason, reason_user=node.user, reason_at=node.reason_at,
            partitions=node.partitions, booted_at=node.booted_at, gpus=len(node.machine.gpus),
        )  # fmt: skip

    def queue(self, *, ended: bool = False) -> JobList:
        return JobList(tuple(self.jobs(ended=ended)))

    def jobs(self, *, ended: bool = False) -> list[JobInfo]:
        self._answers()
        return [job for job in self.cluster.queue.values() if ended or not job.state.ended]

    def drain(self, nodes: str | Iterable[str], reason: str) -> None:
        self._take(nodes, reason, "drain")

    def set_down(self, nodes: str | Iterable[str], reason: str) -> None:
        self._take(nodes, reason, "down")
        for name in [nodes] if isinstance(nodes, str) and not self.cluster.slow else ():
            self.remove_from_jobs(name)

    def _take(self, nodes: str | Iterable[str], reason: str, how: str) -> None:
        self._answers()
        for name in [nodes] if isinstance(nodes, str) else nodes:
            node = self.cluster.nodes[name]
            if node.user == "admin":
                self.cluster.forbidden.append(f"{how} of {name}, which an administrator keeps out")
            before = (node.flags, node.down, node.reason)
            node.flags = node.flags | {NodeFlag.DRAIN} if how == "drain" else node.flags
            node.down = node.down or how == "down"
            node.reason, node.user = reason, "root"
            if before != (node.flags, node.down, node.reason):
                node.effects.append(how)

    def remove_from_jobs(self, name: str) -> None:
        """Requeue batch jobs with Slurm's delay. A run's job continues without the node."""
        for job in [job for job in self.cluster.queue.values() if is_active(job) and name in job.nodes]:
            if job.comment:
                rest = tuple(each for each in job.nodes if each != name)
                self.cluster.queue[job.id] = replace(job, nodes=rest)
            else:
                waits = replace(job, state=JobState.PENDING, nodes=(), reason="BeginTime", restarts=job.restarts + 1)
                self.cluster.queue[job.id] = waits

    def resume(self, nodes: str | Iterable[str]) -> None:
        self._answers()
        for name in [nodes] if isinstance(nodes, str) else nodes:
            node = self.cluster.nodes[name]
            if node.user == "admin":
                self.cluster.forbidden.append(f"resume of {name}, which an administrator keeps out")
            if node.down or node.flags & {NodeFlag.DRAIN, NodeFlag.FAIL}:
                node.effects.append("resume")
            node.flags, node.down, node.reason, node.user = node.flags - {NodeFlag.DRAIN, NodeFlag.FAIL}, False, "", ""

    def requeue(self, *jobs: int | str) -> None:
        self._answers()
        for each in jobs:
            job = self.cluster.queue[int(each)]
            if job.qos == _NO_REQUEUE:
                raise DalsegnoError("Requested operation is presently disabled", hint="it was submitted so")
            self.cluster.queue[job.id] = replace(job, state=JobState.PENDING, nodes=(), reason="BeginTime")

    def update(self, **settings: str) -> None:
        self._answers()
        self.cluster.updates.append(settings)
        name = settings.get("ReservationName", "")
        if name and name not in self.cluster.reservations:
            raise CommandFailed(("scontrol", "update"), 1, "Requested reservation is invalid")
        if "JobId" not in settings:
            self.cluster.reservations[name] = settings["Users"]
            return
        job = self.cluster.queue[int(settings["JobId"])]
        if settings.get("StartTime") == "now" and job.state is JobState.PENDING:
            self.cluster.queue[job.id] = replace(job, reason="Priority")
        if "ReqNodeList" in settings:
            self.cluster.queue[job.id] = replace(job, reservation=settings["ReqNodeList"])

    def scontrol(self, *args: str) -> str:
        self._answers()
        settings = dict(word.split("=", 1) for word in args if "=" in word)
        if args[0] == "create":
            self.cluster.reservations[settings["ReservationName"]] = settings["Users"]
        elif args[0] == "delete" and self.cluster.reservations.pop(settings["ReservationName"], None) is None:
            raise CommandFailed(("scontrol", *args), 1, "Requested reservation is invalid")
        return " ".join(args)

    def _answers(self) -> None:
        if not self.cluster.slurm_answers:
            raise NotThere("Unable to contact slurm controller", hint="slurmctld does not answer")


class FakeAgents:
    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster

    def remember(self, nodes: Iterable[str]) -> None:
        """Do nothing: a lost node is detected at once here."""

    def see(self, nodes: Iterable[NodeInfo]) -> None:
        """Do nothing: these nodes have agents."""

    def views(self) -> Mapping[str, AgentView]:
        return {name: self._view(name, node) for name, node in self.cluster.nodes.items()}

    def _view(self, name: str, node: FakeNode) -> AgentView:
        machine, now = node.machine, self.cluster.now
        gone = not machine.on or self.cluster.blind or node.late
        if gone or node.quiet or not node.agent:
            node.lost_at = now if node.lost_at is None else node.lost_at
            node.heard_at = None
        if gone:
            boot = machine.boot if node.agent else ""
            return AgentView(
                name, Presence.GONE, node.lost_at or 0.0, boot=boot, host_answers=False, slurmd_answers=False
            )
        if not node.agent:
            known = Presence.AGENT_DEAD if node.was_connected else Presence.NEVER
            return AgentView(name, known, node.lost_at or 0.0, host_answers=True, slurmd_answers=True, answered=now)
        node.was_connected = True
        gpu_ids = machine.gpus if self.cluster.tell_gpus else ()
        gpus = tuple(GpuIdentity(index, uuid) for index, uuid in enumerate(gpu_ids))
        checks = (machine.check, *machine.also)
        report = NodeReport(name, machine.boot, tuple(self._finding(machine, check) for check in checks), gpus)
        if node.quiet:
            return AgentView(name, Presence.SILENT, node.lost_at or 0.0, now, report, machine.boot, True, True)
        node.lost_at = None
        node.heard_at = now if node.heard_at is None else node.heard_at
        return AgentView(name, Presence.CONNECTED, node.heard_at, now, report, machine.boot, True, True)

    def _finding(self, machine: FakeMachine, check: str) -> Finding:
        says = machine.says or machine.cured_by
        bad = machine.cured_by and says
        result = failed("GPU has fallen off the bus", bad, machine.code) if bad else passed("no Xid")
        return Finding(check, unknown("no answer") if machine.silent else result, self.cluster.now)

    def validations(self) -> Mapping[str, Validation]:
        return {name: node.validation for name, node in self.cluster.nodes.items() if node.validation}

    def validate(self, node: str, ask: str, partner: str) -> None:
        known = self.cluster.nodes[node]
        if known.validation and known.validation.ask == ask:
            return
        known.effects.append("validate")
        known.asked = "" if self.cluster.validations else ask
        if self.cluster.validations and known.machine.on:
            known.validation = Validation(ask, (self._finding(known.machine, known.machine.check),))

    def validating(self) -> Mapping[str, str]:
        nodes = self.cluster.nodes.items()
        return {name: node.asked for name, node in nodes if node.asked and node.machine.on}

    def rest(self, node: str, seconds: float) -> None:
        self.cluster.nodes[node].resting = seconds > 0

    def evidence(self, node: str) -> Mapping[str, str]:
        self.cluster.nodes[node].effects.append("evidence")
        on = self.cluster.nodes[node].machine.on
        return {"dmesg.txt": "NVRM: Xid"} if on else {INCOMPLETE: "agent: its agent is not connected"}


class FakeTarget:
    """A target. It records a repair as forbidden if the node has jobs, is in service, or was drained by a person."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster

    def read_logs(self, node: str) -> Mapping[str, str]:
        return {"console.log": "kernel panic"}

    def is_off(self, node: str) -> bool:
        return not self.cluster.nodes[node].machine.on

    def reset_gpus(self, node: str) -> None:
        if not self.cluster.nodes[node].resting:
            self.cluster.forbidden.append(f"the GPUs of {node} were reset while its agent held them")
        self._touch(node, "reset")
        self._cure(node, Remedy.RESET)

    def reboot(self, node: str) -> None:
        self._touch(node, "reboot")
        machine = self.cluster.nodes[node].machine
        machine.boot, machine.on = self.cluster.machine().boot, True
        self._cure(node, Remedy.REBOOT)

    def replace(self, node: str) -> None:
        self._touch(node, "replace")
        old, new = self.cluster.nodes[node].machine, self.cluster.machine()
        if self.cluster.same_gpus_again:
            self.cluster.same_gpus_again -= 1
            new.gpus = old.gpus
        if self.cluster.bad_replacements:
            self.cluster.bad_replacements -= 1
            new.cured_by = Remedy.RESET
        self.cluster.nodes[node].machine = new

    def _touch(self, node: str, how: str) -> None:
        known = self.cluster.nodes[node]
        known.effects.append(how)
        if any(is_active(job) and node in job.nodes for job in self.cluster.queue.values()):
            self.cluster.forbidden.append(f"{how} of {node}, which has jobs")
        if known.user == "admin":
            self.cluster.forbidden.append(f"{how} of {node}, which an administrator keeps out")
        if not (known.down or NodeFlag.DRAIN in known.flags):
            self.cluster.forbidden.append(f"{how} of {node}, which is in service")

    def _cure(self, node: str, by: Remedy) -> None:
        machine = self.cluster.nodes[node].machine
        if machine.cured_by and not by < machine.cured_by:
            machine.cured_by = None
