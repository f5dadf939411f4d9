"""One round: decide, and do what was decided, each action written down before and after."""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass, field

from dalsegno.errors import DalsegnoError
from dalsegno.health import Finding, Gpu
from dalsegno.recovery.act import Hands, do
from dalsegno.recovery.actions import Action, Again, Found, Note, Sight, Turn
from dalsegno.recovery.change import noticed
from dalsegno.recovery.check_news import CheckNews
from dalsegno.recovery.decide import decide
from dalsegno.recovery.facts import Facts
from dalsegno.recovery.policy import Policy
from dalsegno.recovery.store import Store

Work = Callable[[], None]


@dataclass(frozen=True)
class Outcome:
    id: str
    action: Action
    told: str
    error: str


@dataclass
class Healer:
    """`beside` has work done elsewhere, so that a machine that boots for minutes keeps no other node waiting.

    The store is used by the thread that calls `round` and by no other.
    """

    store: Store
    hands: Hands
    policy: Policy
    clock: Callable[[], float]
    beside: Callable[[Work], None]
    underway: dict[str, str] = field(default_factory=dict)  # id -> node
    outcomes: queue.SimpleQueue[Outcome] = field(default_factory=queue.SimpleQueue)
    partitions: dict[str, tuple[str, ...]] = field(default_factory=dict)
    gpus: dict[str, tuple[Gpu, ...]] = field(default_factory=dict)
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

    def note_gpus(self, node: str, gpus: tuple[Gpu, ...]) -> None:
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
            self._end(Outcome(action.id, begun, f"was done before the controller was started again: {begun.words}", ""))
        else:
            self._run(action.id, begun, at)

    def _run(self, id: str, action: Action, at: float) -> None:
        if not action.slow:
            self._end(_outcome(id, action, at, self.hands))
            return
        self.underway[id] = action.node
        self.beside(lambda: self.outcomes.put(_outcome(id, action, at, self.hands)))

    def _end(self, outcome: Outcome) -> None:
        action = outcome.action
        partitions = self._partitions(action.node)
        self.store.end(outcome.id, action, outcome.told, outcome.error, self.clock(), self.policy, partitions)

    def _partitions(self, node: str) -> tuple[str, ...]:
        return self.partitions.get(node, ())


def _outcome(id: str, action: Action, at: float, hands: Hands) -> Outcome:
    try:
        return Outcome(id, action, do(action, id, at, hands), "")
    except DalsegnoError as error:
        return Outcome(id, action, "", error.what.strip().splitlines()[-1].strip())  # what the command said
    except Exception as error:  # a target's own bug must not stop the care for all other nodes
        return Outcome(id, action, "", f"{type(error).__name__}: {error}")
