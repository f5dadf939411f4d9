"""The loop that looks after nodes: look, decide, do; in a thread of its own, so that nobody waits for Slurm."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from dalsegno.errors import DalsegnoError
from dalsegno.health import Finding, GpuIdentity
from dalsegno.recovery.act import Hands, NodeAgents, do
from dalsegno.recovery.actions import Action, Again, Found, Note, Sight, Turn
from dalsegno.recovery.book import Book
from dalsegno.recovery.change import noticed
from dalsegno.recovery.coordinators import RunRecord
from dalsegno.recovery.decide import decide
from dalsegno.recovery.facts import NOTHING, Facts, gather
from dalsegno.recovery.phase import NodePhase
from dalsegno.recovery.policy import OFF, ControllerSite, Policy
from dalsegno.recovery.presence import JUST_S, look_at_power
from dalsegno.recovery.run_hints import CheckNews, with_hint
from dalsegno.recovery.spares import is_owed
from dalsegno.recovery.store import Journal
from dalsegno.runs.coordinator.node_loss import to_be_mended

# ---- One round: decide, and do what was decided, each action written down before and after.


Work = Callable[[], None]


@dataclass(frozen=True)
class ActionOutcome:
    id: str
    action: Action
    told: str
    error: str


@dataclass
class Healer:
    """`beside` has work done elsewhere, so that a machine that boots for minutes keeps no other node waiting.

    The store is used by the thread that calls `round` and by no other.
    """

    store: Journal
    hands: Hands
    policy: Policy
    clock: Callable[[], float]
    beside: Callable[[Work], None]
    underway: dict[str, str] = field(default_factory=dict)  # id -> node
    outcomes: queue.SimpleQueue[ActionOutcome] = field(default_factory=queue.SimpleQueue)
    partitions: dict[str, tuple[str, ...]] = field(default_factory=dict)
    gpus: dict[str, tuple[GpuIdentity, ...]] = field(default_factory=dict)
    checks: CheckNews = field(init=False)

    def __post_init__(self) -> None:
        self.checks = CheckNews.after(self.store.last_verdicts())

    def round(self, facts: Facts) -> list[Action]:
        """Gives what was decided; none is left to do when nothing changes any more."""
        self.collect()
        self._notice(facts)
        actions = decide(facts, self.store.look(), self.policy, self.clock())
        for action in actions:
            self._perform(action)
        return actions

    def note_gpus(self, node: str, gpus: tuple[GpuIdentity, ...]) -> None:
        if self.gpus.get(node) != gpus:
            self.gpus[node] = gpus
            self.store.notice_gpus(node, gpus, self.clock())

    def note_findings(self, node: str, findings: tuple[Finding, ...]) -> None:
        now = self.clock()
        self.store.notice_checks(self.checks.hear(node, findings, now), now)

    def collect(self) -> bool:
        """Write down what was done beside us since; True if there was any."""
        found = False
        while not self.outcomes.empty():
            outcome = self.outcomes.get()
            self.underway.pop(outcome.id, None)
            self._end(outcome)
            found = True
        return found

    def _notice(self, facts: Facts) -> None:
        if facts.nodes is None:
            return
        self.partitions = {name: node.slurm.partitions for name, node in facts.nodes.items()}
        self.store.notice(noticed(self.store.look(), facts))

    def _perform(self, action: Action) -> None:
        if isinstance(action, (Turn, Note)):
            self.store.turn(action, self.clock(), self._partitions(action.node))
        elif isinstance(action, Sight):
            self.store.sight(action, self.clock())
        elif isinstance(action, (Again, Found)):
            self._resume(action)
        else:
            now = self.clock()
            self._run(self.store.begin(action, now, self._partitions(action.node)), action, now)

    def _resume(self, action: Again | Found) -> None:
        known = self.store.action(action.id)
        if known is None:
            return
        begun, at = known
        if isinstance(action, Found):
            self._end(
                ActionOutcome(action.id, begun, f"was done before the controller was started again: {begun.words}", "")
            )
        else:
            self._run(action.id, begun, at)

    def _run(self, id: str, action: Action, at: float) -> None:
        if not action.slow:
            self._end(_outcome(id, action, at, self.hands))
            return
        self.underway[id] = action.node
        self.beside(lambda: self.outcomes.put(_outcome(id, action, at, self.hands)))

    def _end(self, outcome: ActionOutcome) -> None:
        action = outcome.action
        partitions = self._partitions(action.node)
        self.store.end(outcome.id, action, outcome.told, outcome.error, self.clock(), self.policy, partitions)

    def _partitions(self, node: str) -> tuple[str, ...]:
        return self.partitions.get(node, ())


def _outcome(id: str, action: Action, at: float, hands: Hands) -> ActionOutcome:
    try:
        return ActionOutcome(id, action, do(action, id, at, hands), "")
    except DalsegnoError as error:
        return ActionOutcome(id, action, "", error.what.strip().splitlines()[-1].strip())  # what the command said
    except Exception as error:  # a target's own bug must not stop the care for all other nodes
        return ActionOutcome(id, action, "", f"{type(error).__name__}: {error}")


# ---- The loop that looks after nodes: look, decide, do; in a thread of its own, so that nobody waits for Slurm.


JOURNAL, EVIDENCE = "controller/recovery.sqlite", "controller/evidence"  # below the cluster's state folder
LARGE = 64  # nodes: asking Slurm for all of them costs a tenth of a second and more from here on
QUICK_S, LARGE_QUICK_S = 0.3, 2.0  # while a node is under our hands
MISSED_S, LARGE_MISSED_S = 0.1, 0.5  # while one is missed, and a word of another must show that we hear
CALM_S, LARGE_CALM_S = 3.0, 10.0  # else: agents ring at once when something happens
AFTER_SILENCE_S = 2.0  # Slurm did not answer
AT_ONCE = 20  # rounds without a pause while each brings something
HANDS = 8  # slow things at a time

Say = Callable[[str], None]
Runs = Callable[[], Mapping[str, RunRecord]]  # those that the controller keeps
TIDY_S = 24 * 3600.0  # how often the journal is tidied, beside when a controller starts


class NodeWatch:
    """Looks after the nodes of one cluster until it is closed."""

    def __init__(self, folder: Path, site: ControllerSite, agents: NodeAgents, say: Say, runs: Runs = dict) -> None:
        self.folder, self.site, self.agents, self.say, self.runs = folder, site, agents, say, runs
        self._rung, self._closed = threading.Event(), False
        self._pool = ThreadPoolExecutor(HANDS, thread_name_prefix="mend")
        self._thread = threading.Thread(target=self._serve, name="watch", daemon=True)
        self._complaint, self._is_new = "", True
        self.policy = Policy(mode=OFF)  # until it was read
        self.partitions: Mapping[str, tuple[str, ...]] = {}  # of each node, as Slurm said last

    def start(self) -> None:
        self._thread.start()

    def ring(self) -> None:
        """Something has happened: look now. From any thread."""
        self._rung.set()

    def close(self) -> bool:
        """True when it has come to rest. What is under way is not waited for: the next one finds it in the journal."""
        self._closed = True
        self.ring()
        self._pool.shutdown(wait=False, cancel_futures=True)
        return not self._thread.is_alive()

    def _serve(self) -> None:
        try:
            store = Journal(self.folder / JOURNAL)
            store.tidy()
        except DalsegnoError as error:
            self.say(f"nodes are not looked after: {error.what}. {error.hint}")
            return
        site, evidence = self.site, self.folder / EVIDENCE
        hands = Hands(site.slurm, self.agents, site.target, evidence, site.slurm_users)
        healer = Healer(store, hands, self.policy, time.time, self._beside)
        tidy_at = time.monotonic() + TIDY_S
        while not self._closed:
            try:
                if time.monotonic() >= tidy_at:
                    tidy_at = time.monotonic() + TIDY_S
                    store.tidy()
                pause_s = self._look_after(healer)
            except DalsegnoError as error:
                self._complain(f"nodes are left as they are: {error.what}")
                pause_s = CALM_S
            except Exception:  # nodes must be looked after tomorrow too, whatever today's surprise is
                import traceback

                self.say(f"a round of looking after nodes went wrong\n{traceback.format_exc()}")
                pause_s = CALM_S
            self._rung.wait(pause_s)
            self._rung.clear()
        store.close()

    def _beside(self, work: Callable[[], None]) -> None:
        if not self._closed:
            self._pool.submit(work).add_done_callback(lambda done: self.ring())

    def _look_after(self, healer: Healer) -> float:
        """Rounds until none brings anything; returns how long nobody needs to look."""
        if self._is_new:
            self.agents.remember(known_before(healer.store.look()))
            self._is_new = False
        for _ in range(AT_ONCE):
            self._rung.clear()
            if self.site.is_being_changed():
                healer.collect()
                return QUICK_S
            healer.policy = self.policy = self.site.policy()
            facts = self.look(frozenset(healer.underway))
            _note_reports(healer, facts)
            acted = healer.round(facts)
            if facts.nodes is None:
                return AFTER_SILENCE_S
            if not acted or self._closed:
                return pause_s(healer.store.book, facts)
        return QUICK_S

    def look(self, underway: frozenset[str] = frozenset()) -> Facts:
        """What is so now. An answer that does not come is no answer."""
        at = time.time()
        try:
            nodes, queue = self.site.slurm.nodes(), self.site.slurm.queue(ended=True)
        except DalsegnoError as error:
            self._complain(f"Slurm does not answer; nodes are left as they are: {error.what}")
            return NOTHING
        if queue.unreadable:
            self._complain(f"{queue.unreadable} jobs of Slurm's queue could not be read, and are left out")
        else:
            self._complaint = ""
        self.partitions = {node.name: node.partitions for node in nodes}
        wanted, runs = to_be_mended(nodes), self.runs()
        jobs, kept = [with_hint(job, wanted, runs) for job in queue.jobs], {run: each.uid for run, each in runs.items()}
        facts = gather(nodes, jobs, self.agents, at, underway, kept)
        return look_at_power(facts, self.site.target)

    def _complain(self, text: str) -> None:
        """Once, until something else is wrong."""
        if text != self._complaint:
            self.say(text)
        self._complaint = text


def known_before(book: Book) -> list[str]:
    """Nodes that were heard of and in service when this was last written."""
    return [node.node for node in book.nodes.values() if node.seen and node.last_boot and not node.phase.out]


def _note_reports(healer: Healer, facts: Facts) -> None:
    """What agents say that must not be forgotten with them."""
    for name, node in (facts.nodes or {}).items():
        report = node.agent.report
        if report and node.connected:
            healer.note_findings(name, report.findings)
            if report.gpus:
                healer.note_gpus(name, report.gpus)


def pause_s(book: Book, facts: Facts) -> float:
    """How soon to look again if nobody rings."""
    nodes = facts.nodes or {}
    large = len(nodes) > LARGE
    known = [book.of(name) for name in nodes]
    busy = any(own.pending or own.victims or (own.phase.out and own.phase is not NodePhase.GIVEN_UP) for own in known)
    missed = any(
        node.gone and node.agent.quiet_s < JUST_S and not book.of(name).phase.out for name, node in nodes.items()
    )
    wanted = any(is_owed(job, facts, book) for job in facts.jobs)
    if missed:
        return LARGE_MISSED_S if large else MISSED_S
    if busy or wanted:
        return LARGE_QUICK_S if large else QUICK_S
    return LARGE_CALM_S if large else CALM_S
