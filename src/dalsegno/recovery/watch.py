"""The recovery loop: observe, decide, act, in its own thread, so that nothing else waits for Slurm."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path

from dalsegno.errors import DalsegnoError
from dalsegno.health import Finding, GpuIdentity
from dalsegno.recovery.act import ActionContext, NodeAgents, do
from dalsegno.recovery.decisions.actions import Action, ChangePhase, ContactChange, Note, RecordDone, Repeat
from dalsegno.recovery.decisions.change import record_seen
from dalsegno.recovery.decisions.decide import decide
from dalsegno.recovery.decisions.facts import NOTHING, Facts, gather
from dalsegno.recovery.decisions.phase import NodePhase
from dalsegno.recovery.decisions.policy import OFF, ControllerSite, Policy
from dalsegno.recovery.decisions.records import NodeRecords
from dalsegno.recovery.decisions.spares import is_owed
from dalsegno.recovery.journal.store import Journal
from dalsegno.recovery.runs.run_hints import CheckChanges, WrongResultReports, with_hint
from dalsegno.recovery.runs.run_records import RunRecord
from dalsegno.runs.coordinator.nodes.node_rules import drained_for_repair
from dalsegno.targets.base import CanSeePower

log = logging.getLogger("controller.recovery")

Work = Callable[[], None]
RECORDS = (ChangePhase, Note, ContactChange)  # actions that only change the journal


@dataclass(frozen=True)
class ActionOutcome:
    id: str
    action: Action
    text: str
    error: str


@dataclass
class RecoveryLoop:
    """Carries out rounds. `background` starts slow actions in other threads, so that they do not delay each other.

    The store is used only by the thread that calls `round`.
    """

    store: Journal
    context: ActionContext
    policy: Policy
    clock: Callable[[], float]
    background: Callable[[Work], None]
    underway: dict[str, str] = field(default_factory=dict)  # action id -> node
    outcomes: queue.SimpleQueue[ActionOutcome] = field(default_factory=queue.SimpleQueue)
    partitions: dict[str, tuple[str, ...]] = field(default_factory=dict)
    gpus: dict[str, tuple[GpuIdentity, ...]] = field(default_factory=dict)
    checks: CheckChanges = field(init=False)

    def __post_init__(self) -> None:
        self.checks = CheckChanges.after(self.store.last_verdicts())

    def round(self, facts: Facts) -> list[Action]:
        """Decide once, and act. Return the actions, or an empty list when nothing is left to do."""
        self.collect()
        self._record_seen(facts)
        actions = decide(facts, self.store.refresh(), self.policy, self.clock())
        for only_records, group in groupby(actions, key=lambda action: isinstance(action, RECORDS)):
            with self.store.together() if only_records else nullcontext():
                for action in group:
                    self._perform(action)
        return actions

    def record_gpus(self, node: str, gpus: tuple[GpuIdentity, ...]) -> None:
        if self.gpus.get(node) != gpus:
            self.gpus[node] = gpus
            self.store.record_gpus(node, gpus, self.clock())

    def record_findings(self, node: str, findings: tuple[Finding, ...]) -> None:
        now = self.clock()
        self.store.record_checks(self.checks.update(node, findings, now), now)

    def collect(self) -> bool:
        """Record the actions that finished in the background; return whether there were any."""
        found = False
        while not self.outcomes.empty():
            outcome = self.outcomes.get()
            self.underway.pop(outcome.id, None)
            self._end(outcome)
            found = True
        return found

    def _record_seen(self, facts: Facts) -> None:
        if facts.nodes is None:
            return
        self.partitions = {name: node.slurm.partitions for name, node in facts.nodes.items()}
        self.store.record_seen(record_seen(self.store.refresh(), facts))

    def _perform(self, action: Action) -> None:
        if isinstance(action, (ChangePhase, Note)):
            self.store.record_change(action, self.clock(), self._partitions(action.node))
        elif isinstance(action, ContactChange):
            self.store.record_contact(action, self.clock())
        elif isinstance(action, (Repeat, RecordDone)):
            self._resume(action)
        else:
            now = self.clock()
            self._run(self.store.begin(action, now, self._partitions(action.node)), action, now)

    def _resume(self, action: Repeat | RecordDone) -> None:
        known = self.store.action(action.id)
        if known is None:
            return
        begun, at = known
        if isinstance(action, RecordDone):
            self._end(ActionOutcome(action.id, begun, f"was done before the controller restarted: {begun.summary}", ""))
        else:
            self._run(action.id, begun, at)

    def _run(self, id: str, action: Action, at: float) -> None:
        if not action.slow:
            self._end(_outcome(id, action, at, self.context))
            return
        self.underway[id] = action.node
        self.background(lambda: self.outcomes.put(_outcome(id, action, at, self.context)))

    def _end(self, outcome: ActionOutcome) -> None:
        action = outcome.action
        partitions = self._partitions(action.node)
        self.store.end(outcome.id, action, outcome.text, outcome.error, self.clock(), self.policy, partitions)

    def _partitions(self, node: str) -> tuple[str, ...]:
        return self.partitions.get(node, ())


def _outcome(id: str, action: Action, at: float, context: ActionContext) -> ActionOutcome:
    try:
        return ActionOutcome(id, action, do(action, id, at, context), "")
    except DalsegnoError as error:
        return ActionOutcome(id, action, "", error.what.strip().splitlines()[-1].strip())  # the last line is the cause
    except Exception as error:  # a bug in a target must not stop the recovery of other nodes
        return ActionOutcome(id, action, "", f"{type(error).__name__}: {error}")


JOURNAL, EVIDENCE = "controller/recovery.sqlite", "controller/evidence"  # paths relative to the cluster's state folder
LARGE = 64  # number of nodes; in a larger cluster, a query for all nodes takes 0.1 s or more
# Time between rounds, in small and in large clusters
QUICK_S, LARGE_QUICK_S = 0.3, 2.0  # pause while a node is being repaired
MISSED_S, LARGE_MISSED_S = 0.1, 0.5  # pause while a node that was just lost is not out of service yet
CALM_S, LARGE_CALM_S = 3.0, 10.0  # pause if nothing happens; agents report changes at once
AFTER_SILENCE_S = 2.0  # pause if Slurm did not answer
# The pause is at least this many times the CPU time of the last rounds. With 4,096 nodes, that is 0.4 s.
RESTS = 2.0
AT_ONCE = 20  # maximum number of rounds without a pause
MAX_SLOW = 8  # maximum number of slow actions at a time

Runs = Callable[[], Mapping[str, RunRecord]]  # returns the runs that the controller supervises
TIDY_S = 24 * 3600.0  # old rows are deleted at this interval, and when a controller starts


class NodeWatch:
    """Watches and repairs the nodes of one cluster until it is closed."""

    def __init__(self, folder: Path, site: ControllerSite, agents: NodeAgents, runs: Runs = dict) -> None:
        self.folder, self.site, self.agents, self.runs = folder, site, agents, runs
        self.wrong_results = WrongResultReports(runs)
        self._round_requested, self._closed = threading.Event(), threading.Event()
        self._pool = ThreadPoolExecutor(MAX_SLOW, thread_name_prefix="repair")
        self._thread = threading.Thread(target=self._serve, name="watch", daemon=True)
        self._complaint, self._is_new = "", True
        self.policy = Policy(mode=OFF)  # recovery is off until the policy has been read
        self.partitions: Mapping[str, tuple[str, ...]] = {}  # node -> its partitions, from Slurm's last answer

    def start(self) -> None:
        self._thread.start()

    def request_round(self) -> None:
        """Request a round now. May be called from any thread."""
        self._round_requested.set()

    def close(self) -> bool:
        """Ask the thread to stop; return whether it has ended. The next controller handles unfinished actions."""
        self._closed.set()
        self.request_round()
        self._pool.shutdown(wait=False, cancel_futures=True)
        return not self._thread.is_alive()

    def _serve(self) -> None:
        try:
            store = Journal(self.folder / JOURNAL)
            store.tidy()
        except DalsegnoError as error:
            log.error("recovery is not running: %s. %s", error.what, error.hint)
            return
        site, evidence = self.site, self.folder / EVIDENCE
        context = ActionContext(site.slurm, self.agents, site.target, evidence, site.slurm_users)
        loop = RecoveryLoop(store, context, self.policy, time.time, self._run_in_background)
        tidy_at = time.monotonic() + TIDY_S
        while not self._closed.is_set():
            began_s = time.thread_time()
            try:
                if time.monotonic() >= tidy_at:
                    tidy_at = time.monotonic() + TIDY_S
                    store.tidy()
                pause_s = self._run_rounds(loop)
            except DalsegnoError as error:
                self._complain(f"no action on nodes: {error.what}")
                pause_s = CALM_S
            except Exception:  # an unexpected error must not end recovery for good
                log.exception("a recovery round failed")
                pause_s = CALM_S
            rest_s = RESTS * (time.thread_time() - began_s)
            self._closed.wait(rest_s)
            self._round_requested.wait(max(pause_s - rest_s, 0.0))
            self._round_requested.clear()
        store.close()

    def _run_in_background(self, work: Callable[[], None]) -> None:
        if not self._closed.is_set():
            self._pool.submit(work).add_done_callback(lambda done: self.request_round())

    def _run_rounds(self, loop: RecoveryLoop) -> float:
        """Run rounds until there is nothing to do; return how long to wait."""
        if self._is_new:
            self.agents.remember(nodes_in_service_before(loop.store.refresh()))
            self._is_new = False
        for _ in range(AT_ONCE):
            self._round_requested.clear()
            if self.site.is_being_changed():
                loop.collect()
                return QUICK_S
            loop.policy = self.policy = self.site.policy()
            facts = self.observe(frozenset(loop.underway))
            _record_reports(loop, facts)
            acted = loop.round(facts)
            if facts.nodes is None:
                return AFTER_SILENCE_S
            if not acted or self._closed.is_set():
                return pause_s(loop.store.records, facts)
        return QUICK_S

    def observe(self, underway: frozenset[str] = frozenset()) -> Facts:
        """Return the state of nodes and jobs; NOTHING if Slurm does not answer."""
        at = time.time()
        try:
            nodes, queue = self.site.slurm.nodes(), self.site.slurm.queue(ended=True)
        except DalsegnoError as error:
            self._complain(f"Slurm does not answer; no action on nodes: {error.what}")
            return NOTHING
        if queue.unreadable:
            self._complain(f"{queue.unreadable} jobs of Slurm's queue could not be parsed and are ignored")
        else:
            self._complaint = ""
        self.partitions = {node.name: node.partitions for node in nodes}
        self.agents.see(nodes)
        wanted, runs = drained_for_repair(nodes), self.runs()
        jobs, kept = [with_hint(job, wanted, runs) for job in queue.jobs], {run: each.uid for run, each in runs.items()}
        facts = gather(nodes, jobs, self.agents, at, underway, kept)
        return mark_powered_off(self.wrong_results.add_to(facts), self.site.target)

    def _complain(self, text: str) -> None:
        """Log a problem, unless the last logged problem had the same text."""
        if text != self._complaint:
            log.warning(text)
        self._complaint = text


def nodes_in_service_before(records: NodeRecords) -> list[str]:
    """Return the nodes whose agents had connected, and that were in service when the records were last written."""
    return [node.node for node in records.nodes.values() if node.seen and node.last_boot and not node.phase.out]


def _record_reports(loop: RecoveryLoop, facts: Facts) -> None:
    """Record the findings and GPUs that agents report."""
    with loop.store.together():
        for name, node in (facts.nodes or {}).items():
            report = node.agent.report
            if report and node.connected:
                loop.record_findings(name, report.findings)
                if report.gpus:
                    loop.record_gpus(name, report.gpus)


def pause_s(records: NodeRecords, facts: Facts) -> float:
    """Return the time until the next round. A reported change starts the round earlier."""
    nodes = facts.nodes or {}
    large = len(nodes) > LARGE
    known = [records.get(name) for name in nodes]
    phases = {own.phase for own in known if own.phase.out} - {NodePhase.NEEDS_ADMIN}
    busy = bool(phases) or any(own.pending or own.victims for own in known)
    missed = any(
        node.gone and node.agent.quiet_s < JUST_S and not records.get(name).phase.out for name, node in nodes.items()
    )
    wanted = any(is_owed(job, facts, records) for job in facts.jobs)
    if missed:
        return LARGE_MISSED_S if large else MISSED_S
    if busy or wanted:
        return LARGE_QUICK_S if large else QUICK_S
    return LARGE_CALM_S if large else CALM_S


# Nodes that are certainly off need no grace period


JUST_S = 10.0  # the target is queried only about nodes that were heard within this time
MAX_POWER_CHECK_S = 2.0  # time limit for all queries in a round, because the recovery of other nodes waits for them


def mark_powered_off(facts: Facts, target: object) -> Facts:
    """Return the facts with nodes marked as powered off, if they were just lost, are DOWN in Slurm, and the target
    confirms that they are off."""
    nodes = facts.nodes or {}
    lost = [name for name, node in nodes.items() if node.gone and node.slurm.down and node.agent.quiet_s < JUST_S]
    if not lost or not isinstance(target, CanSeePower):
        return facts
    until = time.monotonic() + MAX_POWER_CHECK_S
    off = {name: replace(nodes[name], off=True) for name in lost if time.monotonic() < until and target.is_off(name)}
    return replace(facts, nodes={**nodes, **off})
