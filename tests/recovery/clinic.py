"""A cluster in memory with a recovery loop and a journal on real SQLite, and short access to its state."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from dalsegno.recovery.act import ActionContext
from dalsegno.recovery.decisions.actions import Action, ChangePhase, Note
from dalsegno.recovery.decisions.decide import SETTLE_S
from dalsegno.recovery.decisions.phase import NodePhase
from dalsegno.recovery.decisions.policy import Policy
from dalsegno.recovery.fakes import FakeAgents, FakeCluster, FakeSlurm, FakeTarget
from dalsegno.recovery.journal.store import Journal
from dalsegno.recovery.watch import RecoveryLoop

STEP_S = 1.0
# Interval between rounds when nothing has happened for `BUSY_S`, because the controller also waits longer then.
QUIET_STEP_S = 5.0
BUSY_S = 20.0


def quick_folder() -> Path:
    """Return a folder in memory if possible: these tests do not depend on disks."""
    memory = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="ds-clinic-", dir=memory if memory.is_dir() else None))


@dataclass
class Clinic:
    cluster: FakeCluster
    policy: Policy = field(default_factory=Policy)
    folder: Path = field(default_factory=quick_folder)
    store_type: type[Journal] = Journal

    def __post_init__(self) -> None:
        self.folder.mkdir(exist_ok=True)
        self.open()
        self.done: list[Action] = []

    def open(self) -> None:
        """Start as a new controller does."""
        cluster = self.cluster
        context = ActionContext(FakeSlurm(cluster), FakeAgents(cluster), FakeTarget(cluster), self.folder / "evidence")
        self.store = self.store_type(self.folder / "recovery.sqlite")
        self.loop = RecoveryLoop(self.store, context, self.policy, lambda: self.cluster.now, lambda work: work())

    def round(self, step_s: float = STEP_S) -> list[Action]:
        self.cluster.now += step_s
        actions = self.loop.round(self.cluster.facts(frozenset(self.loop.underway)))
        self.loop.collect()
        self.done += actions
        return actions

    def rounds(self, count: int, step_s: float = STEP_S) -> None:
        for _ in range(count):
            self.round(step_s)

    def settle(self, most: int = 3000) -> None:
        """Run rounds until nothing has happened for longer than the longest wait."""
        quiet_s = 0.0
        for _ in range(most):
            step_s = STEP_S if quiet_s < BUSY_S else QUIET_STEP_S
            quiet_s = 0.0 if self.round(step_s) else quiet_s + step_s
            if quiet_s > self.patience():
                return
        raise AssertionError(f"it never settles: {self.done[-5:]}")

    def patience(self) -> float:
        return max(self.policy.boot_s + self.policy.validate_s, SETTLE_S) + 5

    def wait(self, seconds: float) -> None:
        self.cluster.now += seconds

    def phase(self, node: str) -> NodePhase:
        return self.store.records.get(node).phase

    def effects(self, node: str) -> list[str]:
        """Return the effects on the node, in order."""
        return self.cluster.nodes[node].effects

    def texts(self, node: str = "") -> list[str]:
        return [event.text for event in self.store.events(node=node)]

    def reason(self, node: str) -> str:
        return self.cluster.nodes[node].reason


MakeClinic = Callable[..., Clinic]


def deeds(actions: list[Action]) -> list[str]:
    """Return the kind and node of each action that has an effect."""
    return [f"{action.kind.value} {action.node}" for action in actions if not isinstance(action, (Note, ChangePhase))]
