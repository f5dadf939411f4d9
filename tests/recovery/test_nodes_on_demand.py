"""Recovery of nodes that Slurm powers down when they are idle, and boots for jobs."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator

import pytest

from dalsegno.health import Remedy
from dalsegno.recovery.act import ActionContext
from dalsegno.recovery.decisions.actions import ContactChange
from dalsegno.recovery.decisions.phase import NodePhase
from dalsegno.recovery.decisions.policy import Policy
from dalsegno.recovery.fakes import FakeAgents, FakeCluster, FakeSlurm, FakeTarget
from dalsegno.recovery.watch import RecoveryLoop
from dalsegno.slurm.facts import NodeFlag
from tests.recovery.clinic import Clinic

BOOT_S = 1800.0


class PowerSavingTarget(FakeTarget):
    """A target that replaces a node with Slurm's POWER_DOWN_FORCE, as ParallelCluster's dynamic nodes are replaced."""

    def replace(self, node: str) -> None:
        self._touch(node, "replace")
        power_down(self.cluster, node)


def power_down(cluster: FakeCluster, node: str) -> None:
    known = cluster.nodes[node]
    known.machine.on, known.down, known.flags = False, False, frozenset({NodeFlag.POWERED_DOWN})


def power_up(cluster: FakeCluster, node: str) -> None:
    known = cluster.nodes[node]
    known.machine, known.flags, known.reason, known.user = cluster.machine(), frozenset(), "", ""


class OnDemandClinic(Clinic):
    def open(self) -> None:
        super().open()
        cluster = self.cluster
        context = ActionContext(
            FakeSlurm(cluster), FakeAgents(cluster), PowerSavingTarget(cluster), self.folder / "evidence"
        )
        self.loop = RecoveryLoop(self.store, context, self.policy, lambda: self.cluster.now, lambda work: work())


@pytest.fixture
def clinic() -> Iterator[OnDemandClinic]:
    made = OnDemandClinic(FakeCluster.of(4), Policy(boot_s=BOOT_S))
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


def test_idle_node_that_slurm_powers_down_and_boots_again_is_neither_lost_nor_repaired(clinic):
    power_down(clinic.cluster, "n2")
    clinic.rounds(100)
    clinic.wait(2 * BOOT_S)
    clinic.rounds(100)
    power_up(clinic.cluster, "n2")
    clinic.rounds(20)
    assert (clinic.effects("n2"), clinic.texts("n2"), clinic.phase("n2")) == ([], [], NodePhase.IN_SERVICE)


def test_lost_node_is_repaired_while_most_others_are_powered_down():
    """Their silence says nothing about the controller's network."""
    clinic = OnDemandClinic(FakeCluster.of(10), Policy(boot_s=BOOT_S))
    clinic.rounds(3)
    for number in range(1, 9):
        power_down(clinic.cluster, f"n{number}")
    clinic.rounds(60)
    clinic.cluster.power_off("n9")
    clinic.rounds(60)
    said = [action for action in clinic.done if isinstance(action, ContactChange)]
    assert said == [] and clinic.effects("n9")[:1] == ["down"], clinic.texts()
    clinic.store.close()
    shutil.rmtree(clinic.folder)


def test_replaced_node_that_no_job_needs_is_not_replaced_again(clinic):
    """Its machine boots only for the next job, which may be tomorrow."""
    clinic.cluster.break_gpu("n2", Remedy.REPLACE)
    until(clinic, lambda: "replace" in clinic.effects("n2"))
    clinic.rounds(3)
    assert clinic.texts("n2")[-1] == "in service: Slurm has powered it down, and boots it for the next job"
    clinic.wait(2 * BOOT_S)
    clinic.rounds(300)
    assert clinic.effects("n2").count("replace") == 1 and clinic.phase("n2") is NodePhase.IN_SERVICE


def test_new_machine_of_a_replaced_node_is_watched_as_before(clinic):
    clinic.cluster.break_gpu("n2", Remedy.REPLACE)
    until(clinic, lambda: "replace" in clinic.effects("n2"))
    clinic.rounds(3)
    power_up(clinic.cluster, "n2")
    clinic.rounds(20)
    assert clinic.phase("n2") is NodePhase.IN_SERVICE and clinic.effects("n2").count("replace") == 1
    clinic.cluster.break_gpu("n2", Remedy.REPLACE)
    until(clinic, lambda: clinic.effects("n2").count("replace") == 2)


def test_drained_node_that_its_platform_powers_down_is_in_service_again(clinic):
    """clustermgtd powers down what is drained and idle, before the controller orders a replacement."""
    clinic.cluster.start(7, "n2")
    clinic.cluster.break_gpu("n2", Remedy.REPLACE)
    until(clinic, lambda: clinic.phase("n2") is NodePhase.DRAINED)
    clinic.cluster.queue.clear()
    power_down(clinic.cluster, "n2")
    clinic.rounds(5)
    assert clinic.phase("n2") is NodePhase.IN_SERVICE and "replace" not in clinic.effects("n2")
