"""Tests of the recovery loop in its own thread, with a cluster in memory."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from dalsegno.recovery.decisions.phase import NodePhase
from dalsegno.recovery.decisions.policy import Policy
from dalsegno.recovery.decisions.reason import SLURM_USERS
from dalsegno.recovery.decisions.records import BudgetMark, MarkKind, NodeRecord, NodeRecords
from dalsegno.recovery.fakes import FakeAgents, FakeCluster, FakeSlurm, FakeTarget
from dalsegno.recovery.journal.store import Journal
from dalsegno.recovery.watch import (
    CALM_S,
    JOURNAL,
    LARGE_CALM_S,
    LARGE_MISSED_S,
    LARGE_QUICK_S,
    MISSED_S,
    QUICK_S,
    NodeWatch,
    pause_s,
)
from tests.recovery.clinic import quick_folder
from tests.waiting import eventually


@dataclass
class FakeSite:
    cluster: FakeCluster
    changing: bool = False
    watch: NodeWatch | None = None

    def run_round(self) -> None:
        """Request a round and wait until it starts."""
        watch = self.watch
        assert watch is not None
        watch.request_round()
        eventually(lambda: not watch._round_requested.is_set())

    @property
    def slurm(self) -> FakeSlurm:
        return FakeSlurm(self.cluster)

    @property
    def target(self) -> object:
        return FakeTarget(self.cluster)

    @property
    def slurm_users(self) -> frozenset[str]:
        return SLURM_USERS

    def policy(self) -> Policy:
        return Policy(boot_s=5, validate_s=5)

    def is_being_changed(self) -> bool:
        return self.changing


@pytest.fixture
def folder() -> Iterator[Path]:
    root = quick_folder()
    (root / "controller").mkdir()
    yield root
    shutil.rmtree(root)


@pytest.fixture
def site(folder: Path) -> Iterator[FakeSite]:
    """A cluster of four nodes with a running recovery loop."""
    one = FakeSite(FakeCluster.of(4))
    one.watch = NodeWatch(folder, one, FakeAgents(one.cluster))
    one.watch.start()
    eventually(lambda: _seen(folder))
    yield one
    eventually(one.watch.close)


def _seen(folder: Path) -> bool:
    store = Journal(folder / JOURNAL)
    try:
        return len(store.records.nodes) == 4
    finally:
        store.close()


def test_a_request_starts_a_round_at_once_and_a_lost_node_returns(site: FakeSite, caplog: pytest.LogCaptureFixture):
    site.cluster.power_off("n2")
    site.run_round()
    eventually(lambda: site.cluster.nodes["n2"].effects[-1:] == ["resume"])
    assert site.cluster.nodes["n2"].effects == ["down", "evidence", "replace", "validate", "resume"]
    assert site.cluster.forbidden == [] and caplog.messages == []


def test_nothing_is_done_while_up_is_running(site: FakeSite):
    site.changing = True
    site.run_round()
    site.cluster.power_off("n2")
    for _ in range(3):
        site.run_round()
    assert site.cluster.nodes["n2"].effects == []
    site.changing = False
    eventually(lambda: "resume" in site.cluster.nodes["n2"].effects)


def test_a_missing_answer_of_slurm_is_logged_once_and_nothing_is_done(site: FakeSite, caplog: pytest.LogCaptureFixture):
    site.cluster.slurm_answers = False
    site.cluster.power_off("n2")
    for _ in range(3):
        site.run_round()
    eventually(lambda: caplog.messages)
    assert len(caplog.messages) == 1 and "no action on nodes" in caplog.messages[0]
    assert site.cluster.nodes["n2"].effects == []
    site.cluster.slurm_answers = True
    site.run_round()
    eventually(lambda: "resume" in site.cluster.nodes["n2"].effects)


def test_a_missing_node_is_checked_again_very_soon():
    for count, soon_s, later_s in ((4, MISSED_S, QUICK_S), (256, LARGE_MISSED_S, LARGE_QUICK_S)):
        cluster = FakeCluster.of(count)
        cluster.power_off("n2")
        assert pause_s(NodeRecords(), cluster.facts()) == soon_s
        assert pause_s(NodeRecords({"n2": NodeRecord("n2", NodePhase.DOWN)}), cluster.facts()) == later_s


def test_slurm_is_asked_often_only_during_repairs():
    small, large = FakeCluster.of(4).facts(), FakeCluster.of(256).facts()
    repairing = NodeRecords({"n2": NodeRecord("n2", NodePhase.REPAIRING)})
    waiting = NodeRecords({"n2": NodeRecord("n2", NodePhase.NEEDS_ADMIN)})
    joining = FakeCluster.of(4)
    joining.start_run(8, "n1")
    joining.join(9)
    owed = NodeRecords(marks=(BudgetMark(MarkKind.TAKEN, "n3", 1.0, runs=("1000:train-k3f9",)),))
    assert (pause_s(NodeRecords(), small), pause_s(NodeRecords(), large)) == (CALM_S, LARGE_CALM_S)
    assert (pause_s(repairing, small), pause_s(repairing, large)) == (QUICK_S, LARGE_QUICK_S)
    assert pause_s(waiting, small) == CALM_S
    assert (pause_s(owed, joining.facts()), pause_s(NodeRecords(), joining.facts())) == (QUICK_S, CALM_S)
    assert pause_s(NodeRecords(), replace(small, nodes=None)) == CALM_S
