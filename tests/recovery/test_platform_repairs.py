"""Recovery on HyperPod: its agent replaces or reboots a node whose reason in Slurm asks for that, and may return it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator

import pytest

from dalsegno.health import Remedy
from dalsegno.recovery.act import ActionContext
from dalsegno.recovery.decisions.phase import NodePhase
from dalsegno.recovery.decisions.policy import Policy
from dalsegno.recovery.fakes import FakeAgents, FakeCluster, FakeSlurm, FakeTarget
from dalsegno.recovery.watch import RecoveryLoop
from dalsegno.slurm.facts import NodeFlag
from dalsegno.targets.hyperpod.head import HyperPodHead, repair_words
from dalsegno.targets.machines import InstanceAction, ReturnsNodes
from tests.recovery.clinic import Clinic


class OrderingTarget(FakeTarget):
    """A target whose repairs are only orders, as those of `HyperPodHead`. The platform carries them out later."""

    def _order(self, action: InstanceAction, node: str) -> None:
        self._touch(node, action.value)
        order(self.cluster, node, action)

    def replace(self, node: str) -> None:
        self._order(InstanceAction.REPLACE, node)

    def reboot(self, node: str) -> None:
        self._order(InstanceAction.REBOOT, node)


def order(cluster: FakeCluster, node: str, action: InstanceAction) -> None:
    """Do what slurmctld does with the arguments of the order."""
    *_, state, reason = repair_words(action, node)
    assert state == "State=FAIL"
    known = cluster.nodes[node]
    known.flags, known.reason, known.user = known.flags | {NodeFlag.FAIL}, reason.partition("=")[2], "root"


class HyperPodClinic(Clinic):
    def open(self) -> None:
        super().open()
        cluster = self.cluster
        target = OrderingTarget(cluster)
        context = ActionContext(FakeSlurm(cluster), FakeAgents(cluster), target, self.folder / "evidence")
        self.loop = RecoveryLoop(self.store, context, self.policy, lambda: self.cluster.now, lambda work: work())

    def platform_replaces(self, node: str) -> None:
        self.cluster.nodes[node].machine = self.cluster.machine()

    def platform_returns(self, node: str) -> None:
        known = self.cluster.nodes[node]
        known.flags, known.down, known.reason, known.user = frozenset(), False, "", ""


@pytest.fixture
def clinic() -> Iterator[HyperPodClinic]:
    made = HyperPodClinic(FakeCluster.of(4), Policy(boot_s=3600.0, platform_returns=True))
    made.round()
    yield made
    made.store.close()
    shutil.rmtree(made.folder)


def until(clinic: Clinic, done: Callable[[], bool]) -> None:
    for _ in range(200):
        if done():
            return
        clinic.round()
    raise AssertionError(clinic.texts())


def wait_for_order(clinic: HyperPodClinic, reason: str = "Action:Replace") -> None:
    clinic.cluster.break_gpu("n2", Remedy.REPLACE)
    until(clinic, lambda: clinic.reason("n2") == reason)
    assert clinic.phase("n2") is NodePhase.REPAIRING


def test_order_to_the_platform_is_not_mistaken_for_a_drain_of_an_administrator(clinic):
    wait_for_order(clinic)
    clinic.rounds(300)
    assert (clinic.reason("n2"), clinic.phase("n2")) == ("Action:Replace", NodePhase.REPAIRING)
    assert clinic.effects("n2").count("replace") == 1 and clinic.cluster.forbidden == []


def test_new_machine_is_validated_before_it_returns_to_service(clinic):
    wait_for_order(clinic)
    clinic.rounds(30)
    clinic.platform_replaces("n2")
    until(clinic, lambda: clinic.phase("n2") is NodePhase.IN_SERVICE)
    assert clinic.effects("n2")[-2:] == ["validate", "resume"]
    assert (clinic.cluster.nodes["n2"].flags, clinic.reason("n2")) == (frozenset(), "")


def test_node_that_the_platform_returns_to_service_is_watched_as_before(clinic):
    wait_for_order(clinic)
    clinic.platform_replaces("n2")
    clinic.platform_returns("n2")
    until(clinic, lambda: clinic.phase("n2") is NodePhase.IN_SERVICE)
    assert clinic.texts("n2")[-1] == "in service: the platform has repaired it and returned it to service"
    clinic.cluster.break_gpu("n2", Remedy.REPLACE)
    until(clinic, lambda: clinic.effects("n2").count("drain") == 2)


def test_replacement_that_the_platform_or_a_person_ordered_is_left_alone(clinic):
    order(clinic.cluster, "n2", InstanceAction.REBOOT)
    clinic.cluster.break_gpu("n2", Remedy.REPLACE)
    clinic.rounds(20)
    clinic.cluster.power_off("n2")
    clinic.rounds(100)
    assert (clinic.effects("n2"), clinic.reason("n2")) == ([], "Action:Reboot"), "no reason takes the order's place"


def test_platform_that_repairs_a_drained_node_takes_it_over(clinic):
    clinic.cluster.start(7, "n2")
    clinic.cluster.break_gpu("n2", Remedy.REPLACE)
    until(clinic, lambda: clinic.phase("n2") is NodePhase.DRAINED)
    order(clinic.cluster, "n2", InstanceAction.REPLACE)
    clinic.rounds(3)
    assert clinic.texts("n2")[-1] == "in service: the platform has taken it over: Action:Replace"
    assert "replace" not in clinic.effects("n2")


def test_machine_that_never_comes_is_ordered_again_after_the_time_limit(clinic):
    wait_for_order(clinic)
    clinic.wait(3700)
    until(clinic, lambda: clinic.effects("n2").count("replace") == 2)
    assert clinic.cluster.forbidden == []


def test_head_of_hyperpod_says_that_its_platform_returns_nodes(tmp_path):
    head = HyperPodHead(tmp_path)
    assert isinstance(head, ReturnsNodes) and head.returns_nodes
