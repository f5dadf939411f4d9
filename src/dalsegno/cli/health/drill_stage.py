"""The cluster of a drill, into which faults are injected, and the run that trains on it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dalsegno import drill
from dalsegno.cli import out
from dalsegno.cli.health.drill_traces import (
    JournalReader,
    Traces,
    clear_leftovers,
    drill_folder,
    held_back,
    nodes_known_to,
)
from dalsegno.drill.impacts import Drill, DrillMark, FaultImpact, TrainedStep, TrainingNotes, describe_run_failures
from dalsegno.drill.play import play
from dalsegno.drill.report import counted
from dalsegno.drill.schedule import (
    FaultKind,
    ScheduledFault,
    choose_size,
    describe_waiting,
    find_existing_faults,
    find_repairable,
    find_unreturned,
    repairs_nodes,
    warn_of_missing_repairs,
)
from dalsegno.errors import DalsegnoError
from dalsegno.runs import journal
from dalsegno.runs.coordinator.reports.goodput import read_progress
from dalsegno.runs.folder import RunFolder
from dalsegno.runs.journal import RunEvent
from dalsegno.runs.status import NodeRole, RunPhase, RunStatus, read_status
from dalsegno.system.hanging_calls import slowness

if TYPE_CHECKING:
    from dalsegno.cluster import ClusterPlace, SlurmHere

Say = Callable[[FaultImpact | str], None]
PAUSE_S = 0.05  # pause between steps, so that faults hit the run while it trains
EXTRA_STEPS = 30  # additional steps per fault, so that the run continues for a while after each fault
# the same with `--with-spares`: enough steps for a node to be repaired and to rejoin the run
EXTRA_STEPS_WITH_SPARES = 200
END_TIMEOUT_S = 300.0
REPAIR_TIMEOUT_S = 90.0
REPORT_INTERVAL_S = 5.0
ORPHANS_TIMEOUT_S = 5.0
MAX_RESTARTS = 1000
SCRIPT = Path(drill.__file__).with_name("training.py")


@dataclass
class Training:
    """The run of a drill's training script, as `play` uses it."""

    folder: RunFolder
    notes: TrainingNotes
    traces: Traces
    journal_reader: JournalReader
    spares: int  # number of spares that the run requested
    tell: Callable[[Training, list[DrillMark]], None]  # called with this run and its new marks

    def look(self, at_once: bool = False) -> None:
        self.notes.read()
        self.tell(self, self.journal_reader.listen(at_once))

    def members(self) -> Sequence[str]:
        status = self.status()
        if status.phase is not RunPhase.RUNNING:
            return []
        return [node.name for node in status.nodes if node.state is NodeRole.MEMBER]

    def lacks_spare(self) -> bool:
        return self.spares > 0 and all(node.state is not NodeRole.SPARE for node in self.status().nodes)

    def newest(self) -> TrainedStep | None:
        return self.notes.last

    def over(self) -> bool:
        return self.status().over

    def inject(self, kind: FaultKind, node: str) -> None:
        self.traces.inject(kind, node)

    def status(self) -> RunStatus:
        status = read_status(self.folder.status)
        if status is None:
            raise DalsegnoError(
                f"run {self.folder.run} no longer exists",
                hint="its folder may have been removed; start the drill again",
            )
        return status

    def end(self, timeout_s: float) -> int:
        until = time.monotonic() + timeout_s
        while not (status := self.status()).over or status.exit_code is None:
            if time.monotonic() > until:
                raise DalsegnoError(
                    f"run {self.folder.run} has not ended within {timeout_s:.0f} s",
                    hint=f"`dalsegno why {self.folder.run}` shows what it is waiting for",
                )
            self.look()
            time.sleep(0.1)
        self.look()
        return status.exit_code

    def all_back(self, impacts: Sequence[FaultImpact], timeout_s: float, say: Say) -> dict[str, str]:
        """Wait until every node that needs a repair is in service again, or until the timeout.

        Do not wait for nodes that the controller will not repair. Return the nodes that the controller holds back, each
        with the reason.
        """
        until, reported_at, held = time.monotonic() + timeout_s, time.monotonic(), dict[str, str]()
        while (missing := find_unreturned(impacts, self.journal_reader.marks)) and time.monotonic() < until:
            nodes = {str(node["node"]): node for node in self.journal_reader.nodes()}
            # read the marks after the nodes, so that the marks are not older than the nodes' states
            self.look(at_once=True)
            missing = find_unreturned(missing, self.journal_reader.marks)
            held = held_back(nodes.values())
            coming = [impact for impact in find_repairable(missing, nodes, time.time()) if impact.node not in held]
            if not coming:
                break
            if time.monotonic() - reported_at >= REPORT_INTERVAL_S:
                reported_at = time.monotonic()
                say(describe_waiting(coming, nodes))
            time.sleep(0.1)
        return {impact.node: held[impact.node] for impact in missing if impact.node in held}


@dataclass(frozen=True)
class Reference:
    """The result of the undisturbed run."""

    weights: str
    troubles: str  # failures that occurred although no fault was injected


@dataclass(frozen=True)
class DrillCluster:
    """The cluster of a drill, the size of the drill's run, and the options of the drill."""

    place: ClusterPlace
    slurm: SlurmHere
    traces: Traces
    nodes: int
    spares: int
    waits_for_repairs: bool = True  # whether to wait until broken nodes are back in service
    with_spares: bool = False  # whether to inject a fault only while at least one spare is ready
    exclusive: bool = False  # whether no other job may use the nodes of the run

    @classmethod
    def open(
        cls, name: str | None, nodes: int | None, spares: int | None, with_spares: bool = False, exclusive: bool = False
    ) -> DrillCluster:
        from dalsegno.cli.health.inject import open_injectable
        from dalsegno.cluster import find_place, find_slurm

        place = find_place(name)
        traces, slurm = Traces(open_injectable(place)), find_slurm(place.name)
        size = choose_size(_in_service(slurm), nodes, spares)
        return cls(place, slurm, traces, *size, with_spares=with_spares, exclusive=exclusive)

    def perform(
        self,
        faults: Sequence[ScheduledFault],
        seed: int,
        compare: bool,
        say: Say,
        tell: Callable[[Training, list[DrillMark]], None],
    ) -> Drill:
        from dalsegno.cluster import runs_home

        extra = EXTRA_STEPS_WITH_SPARES if self.with_spares else EXTRA_STEPS
        total = sum(fault.after_steps + extra for fault in faults)
        home = runs_home()
        clear_leftovers(home, _end_abandoned)
        for line in find_existing_faults(self.traces.target.injected(), nodes_known_to(self.slurm.controller)):
            say(line)
        with drill_folder(home) as folder, self.traces.removed(say):
            reference = self._undisturbed(folder, total, say, tell) if compare else None
            where = f"{counted(self.nodes, 'node')} with {counted(self.spares, 'spare')}"
            say(f"{total} steps on {where}, {counted(len(faults), 'fault')}, seed {seed}")
            started = time.time()
            training = self._start(folder / "disturbed", total, PAUSE_S, tell)
            repairs = self._warn_of_missing_repairs(training, faults, say)
            impacts = play(training, faults, say, with_spares=self.with_spares, slowness=slowness())
            if len(impacts) < len(faults):
                why = "the run ended before the others" if training.over() else "the run did not train in time"
                say(f"injected {len(impacts)} of {len(faults)} faults: {why}")
            code = training.end((END_TIMEOUT_S + total * PAUSE_S) * slowness())
            held = training.all_back(impacts, REPAIR_TIMEOUT_S * slowness() if repairs else 0.0, say)
            return _account(training, seed, started, impacts, code, reference, held)

    def _warn_of_missing_repairs(self, training: Training, faults: Sequence[ScheduledFault], say: Say) -> bool:
        """Warn about faults that will not be repaired; return whether to wait for repairs."""
        automation = training.journal_reader.automation()
        if warning := warn_of_missing_repairs(faults, automation, _default_partitions(self.slurm)):
            say(warning)
        return self.waits_for_repairs and repairs_nodes(automation)

    def _undisturbed(
        self, folder: Path, total: int, say: Say, tell: Callable[[Training, list[DrillMark]], None]
    ) -> Reference:
        say(f"the undisturbed run to compare with: {total} steps")
        training = self._start(folder / "undisturbed", total, 0.0, tell)
        code = training.end((END_TIMEOUT_S + total) * slowness())
        troubles = describe_run_failures(journal.read(training.folder.journal))
        if code or not training.notes.weights:
            how = f"ended with code {code}" if code else "wrote no weights to compare with"
            raise DalsegnoError(
                f"the undisturbed run {how}" + (f": {troubles}" if troubles else ""),
                hint=f"`dalsegno why {training.folder.run}`",
            )
        if troubles:
            say(f"without any injected fault, {troubles}")
        return Reference(training.notes.weights, troubles)

    def _start(
        self, folder: Path, total: int, pause_s: float, tell: Callable[[Training, list[DrillMark]], None]
    ) -> Training:
        from dalsegno.cli.training.submission import make_plan, start
        from dalsegno.cluster import runs_home
        from dalsegno.runs.submit.request import RunRequest
        from dalsegno.runs.submit.values import NodeCount

        folder.mkdir()
        request = RunRequest(
            str(SCRIPT),
            (str(folder / "ckpt"), str(folder / "notes"), str(total), str(pause_s)),
            nodes=NodeCount(self.nodes, self.nodes),
            nproc_per_node=1,
            spares=self.spares,
            max_restarts=MAX_RESTARTS,
            name="drill",
            chdir=str(folder),
            sbatch_args=("--exclusive",) if self.exclusive else (),
        )
        home = runs_home()
        plan = make_plan(request, self.slurm, home)
        self.traces.runs.append(RunFolder(Path(plan.folder)))
        run = start(plan, self.slurm, home)
        self.traces.journal_reader = journal_reader = JournalReader(run, self.slurm.controller)
        return Training(run, TrainingNotes(folder / "notes"), self.traces, journal_reader, self.spares, tell)


def _end_abandoned(run: RunFolder) -> None:
    from dalsegno.cli.training.cancel import end_run

    end_run(run, lambda text: None)
    out.step(f"run {run.run} is cancelled: the drill it belonged to was killed")


def _in_service(slurm: SlurmHere) -> int:
    """Return the number of nodes in service in the default partition, which the drill's run uses. Without a default
    partition, count the nodes of the whole cluster."""
    from dalsegno.cluster import silence

    if (silent := silence(slurm)) is not None:
        raise silent
    default = set(_default_partitions(slurm))
    return sum(node.in_service for node in slurm.client.nodes() if not default or default & set(node.partitions))


def _default_partitions(slurm: SlurmHere) -> list[str]:
    return [partition.name for partition in slurm.client.partitions() if partition.default]


def _account(
    training: Training,
    seed: int,
    started: float,
    impacts: Sequence[FaultImpact],
    code: int,
    reference: Reference | None,
    held_back: dict[str, str],
) -> Drill:
    progress = read_progress(training.folder.progress)
    entries = list(journal.read(training.folder.journal))
    return Drill(
        seed,
        _nodes_of(entries),
        started,
        time.time(),
        tuple(impacts),
        tuple(training.journal_reader.marks),
        tuple(training.notes.steps),
        {kind.value: spent_s for kind, spent_s in progress.account.spent.items()} if progress else {},
        code,
        orphans=_orphans(training.folder.run),
        exact=training.notes.weights == reference.weights if reference else None,
        held_back=held_back,
        troubles=reference.troubles if reference else "",
    )


def _orphans(run: str) -> int:
    """Return how many processes of the run are left a few seconds after its end. All jobs of a run have its name."""
    from dalsegno.system.children import environment, find

    until = time.monotonic() + ORPHANS_TIMEOUT_S
    name = f"SLURM_JOB_NAME={run}".encode()
    while (left := find(lambda pid: name in environment(pid))) and time.monotonic() < until:
        time.sleep(0.1)
    return len(left)


def _nodes_of(entries: Sequence[journal.Entry]) -> tuple[str, ...]:
    """Return all nodes that Slurm granted to the run at any time."""
    return tuple(
        sorted({node for entry in entries if entry.get("event") == RunEvent.GRANTED for node in entry["nodes"]})
    )
