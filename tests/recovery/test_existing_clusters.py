"""Tests of recovery on a cluster without node agents, and of partitions that are armed one by one."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from dalsegno.health import Remedy
from dalsegno.recovery.decisions.actions import Action, ChangePhase, Drain, Note, SetDown
from dalsegno.recovery.decisions.change import apply_change, begin_action, end_action, record_seen
from dalsegno.recovery.decisions.decide import decide
from dalsegno.recovery.decisions.facts import gather
from dalsegno.recovery.decisions.phase import HeldAction, NodePhase
from dalsegno.recovery.decisions.policy import Policy
from dalsegno.recovery.decisions.records import NodeRecords
from dalsegno.recovery.watcher import CONFIRM_S, MAX_PROBES, SlurmLossDetector
from dalsegno.slurm.facts import JobInfo, JobState, NodeFlag, NodeInfo, NodeState
from dalsegno.wire.liveness import Presence
from tests.recovery.clinic import MakeClinic

WATCHER = Policy(mode="observe", agents=False, gone_remedy=Remedy.DRAIN, can=frozenset())
SILENT = frozenset({NodeFlag.NOT_RESPONDING})


def node(name: str, **facts: object) -> NodeInfo:
    plain = {"state": NodeState.IDLE, "partitions": ("train",), "booted_at": 7, **facts}
    return NodeInfo(name, **plain)  # type: ignore[arg-type]


@dataclass
class Watched:
    """A cluster that Dal Segno did not create. `dead` contains the nodes whose slurmd accepts no connection."""

    policy: Policy = WATCHER
    nodes: dict[str, NodeInfo] = field(default_factory=lambda: {f"n{at}": node(f"n{at}") for at in range(1, 5)})
    jobs: list[JobInfo] = field(default_factory=list)
    dead: set[str] = field(default_factory=set)
    now: float = 1000.0
    records: NodeRecords = field(default_factory=NodeRecords)

    def __post_init__(self) -> None:
        self.detector = SlurmLossDetector(lambda each: each.name not in self.dead, lambda: self.now)
        self.round()

    def set(self, name: str, **facts: object) -> None:
        self.nodes[name] = replace(self.nodes[name], **facts)  # type: ignore[arg-type]

    def round(self, pass_s: float = CONFIRM_S + 1) -> list[Action]:
        """Decide once, and record the actions as if they had succeeded."""
        self.now += pass_s
        self.detector.see(self.nodes.values())
        facts = gather(list(self.nodes.values()), self.jobs, self.detector, self.now)
        self.records = record_seen(self.records, facts)
        actions = decide(facts, self.records, self.policy, self.now)
        for action in actions:
            if isinstance(action, (ChangePhase, Note)):
                self.records = apply_change(self.records, action, self.now)
            else:
                begun = begin_action(self.records, action, "1", self.now, ("train",))
                self.records = end_action(begun, action, "1", "", self.now, self.policy)
        return actions

    def lose(self, name: str) -> None:
        self.dead.add(name)
        self.set(name, flags=SILENT)

    def phase(self, name: str) -> NodePhase:
        return self.records.get(name).phase


def test_lost_node_is_reported_once():
    cluster = Watched()
    cluster.lose("n2")
    assert cluster.round() == [], "one failed connection is not enough"
    (action,) = cluster.round()
    assert isinstance(action, ChangePhase) and action.to is NodePhase.SUSPECTED
    assert action.why == "only observing; would set it down: slurmd answers neither Slurm nor a probe"
    assert action.held_back is HeldAction.OBSERVING
    assert cluster.round() == []


def test_node_whose_slurmd_answers_is_not_lost():
    cluster = Watched()
    cluster.set("n2", flags=SILENT)
    assert [cluster.round(), cluster.round()] == [[], []]


def test_node_that_returns_is_in_service_again():
    cluster = Watched()
    cluster.lose("n2")
    cluster.round()
    cluster.round()
    cluster.dead.clear()
    cluster.set("n2", flags=frozenset())
    cluster.round()
    cluster.round()
    assert cluster.phase("n2") is NodePhase.IN_SERVICE


def test_lost_node_of_an_armed_partition_is_set_down_and_left_to_an_administrator():
    cluster = Watched(replace(WATCHER, armed=frozenset({"train"})))
    cluster.lose("n2")
    cluster.round()
    (action,) = cluster.round()
    assert isinstance(action, SetDown)
    reason = "dalsegno:drain:gone slurmd answers neither Slurm nor a probe"
    cluster.set("n2", state=NodeState.DOWN, reason=reason, reason_user="root")
    (action,) = cluster.round()
    assert isinstance(action, ChangePhase) and action.to is NodePhase.NEEDS_ADMIN
    assert action.why.endswith("an administrator must return it to service")
    assert cluster.round() == []
    cluster.dead.clear()
    cluster.set("n2", state=NodeState.IDLE, flags=frozenset(), reason="", reason_user="")
    cluster.round()
    assert cluster.phase("n2") is NodePhase.IN_SERVICE


def test_accepted_fault_counts_again_once_it_was_over():
    cluster = Watched(replace(WATCHER, armed=frozenset({"train"})))
    cluster.lose("n2")
    for _ in range(3):
        cluster.round()
    cluster.dead.clear()
    cluster.set("n2", flags=frozenset())
    for _ in range(3):
        cluster.round()
    cluster.lose("n2")
    cluster.round()
    assert any(isinstance(action, SetDown) for action in cluster.round())


def test_node_in_a_partition_that_is_not_armed_is_only_observed():
    cluster = Watched(replace(WATCHER, armed=frozenset({"train"})))
    cluster.set("n2", partitions=("train", "other"))
    cluster.lose("n2")
    cluster.round()
    assert [type(action) for action in cluster.round()] == [ChangePhase]


def test_powered_down_node_is_not_lost():
    cluster = Watched()
    cluster.lose("n2")
    cluster.set("n2", flags=frozenset({NodeFlag.NOT_RESPONDING, NodeFlag.POWERED_DOWN}))
    assert [cluster.round() for _ in range(3)] == [[], [], []]


def test_nodes_that_all_fall_silent_are_not_declared_lost():
    cluster = Watched()
    for name in cluster.nodes:
        cluster.lose(name)
    cluster.round()
    (action,) = cluster.round()
    assert action.node == "" and "the controller's own network" in action.summary


def test_drain_by_slurm_itself_is_reported():
    cluster = Watched()
    drained = {"flags": frozenset({NodeFlag.DRAIN}), "reason": "Kill task failed", "reason_user": "root"}
    cluster.set("n3", **drained)
    (action,) = cluster.round()
    assert isinstance(action, Note) and action.held_back is HeldAction.OBSERVING
    assert action.text == "Slurm has taken it out of service (Kill task failed); would validate it and return it"
    armed = Watched(replace(WATCHER, armed=frozenset({"train"})))
    armed.set("n3", **drained)
    assert [type(each) for each in armed.round()] == [Note], "without an agent, its reason is not overwritten"


def test_node_on_which_jobs_of_several_users_fail_would_be_drained():
    cluster = Watched()
    cluster.jobs = [
        JobInfo(at, f"job-{at}", f"u{at}", JobState.FAILED, uid=at, nodes=("n4",), started_at=1000, ends_at=1003)
        for at in (1, 2, 3)
    ]
    (action,) = cluster.round()
    assert isinstance(action, ChangePhase)
    assert action.why == "only observing; would drain it: black-hole: 3 jobs failed here right after they started"
    armed = Watched(replace(WATCHER, armed=frozenset({"train"})))
    armed.jobs = cluster.jobs
    assert [type(each) for each in armed.round()] == [Drain]


def test_few_nodes_are_probed_in_one_round():
    asked: list[str] = []
    detector = SlurmLossDetector(lambda each: bool(asked.append(each.name)), lambda: 1.0)
    detector.see(node(f"n{at}", flags=SILENT) for at in range(100))
    assert len(asked) == MAX_PROBES
    assert {view.presence for view in detector.views().values()} == {Presence.NEVER}


@pytest.mark.parametrize(
    ("mode", "armed", "partitions", "observes"),
    [
        ("auto", (), ("a",), False),
        ("observe", (), ("a",), True),
        ("observe", ("a",), ("a",), False),
        ("observe", ("a",), ("a", "b"), True),
        ("observe", ("a", "b"), ("b",), False),
        ("observe", ("a",), (), True),
        ("off", ("a",), ("a",), True),
    ],
)
def test_policy_observes_unless_all_partitions_are_armed(mode, armed, partitions, observes):
    assert Policy(mode=mode, armed=frozenset(armed)).observes(partitions) is observes


def test_arming_works_on_a_cluster_with_agents_too(clinic_of: MakeClinic):
    clinic = clinic_of(mode="observe", armed=frozenset({"train"}))
    clinic.cluster.break_gpu("n2", Remedy.REBOOT)
    clinic.settle()
    assert clinic.effects("n2")[-1] == "resume" and clinic.phase("n2") is NodePhase.IN_SERVICE
