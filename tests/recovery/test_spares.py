"""Tests of spares of a partition: validated, kept, lent to a job that joins a run, and taken back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dalsegno.errors import CommandFailed
from dalsegno.health import Remedy
from dalsegno.recovery.act import loan_name
from dalsegno.recovery.decisions.phase import NodePhase
from dalsegno.recovery.decisions.spares import LOAN_S
from dalsegno.slurm.facts import JobState, NodeFlag
from dalsegno.slurm.parse.messages import PendingReason
from dalsegno.slurm.render import SPARE_REASON
from tests.recovery.clinic import Clinic, MakeClinic

LOAN = loan_name("n4")


def spare_clinic(clinic_of: MakeClinic) -> Clinic:
    clinic = clinic_of(4, spares=frozenset({"n4"}))
    node = clinic.cluster.nodes["n4"]
    node.flags, node.reason, node.effects[:] = frozenset({NodeFlag.DRAIN}), SPARE_REASON, []
    clinic.settle()
    return clinic


def lose_a_node(clinic: Clinic, node: str = "n3") -> None:
    """Let a run on three nodes lose one; the node is back in service afterwards."""
    if 8 not in clinic.cluster.queue:
        clinic.cluster.start_run(8, "n1", "n2", "n3")
    clinic.cluster.power_off(node)
    clinic.settle()


def test_a_spare_is_validated_and_kept(clinic_of: MakeClinic):
    clinic = spare_clinic(clinic_of)
    assert (clinic.phase("n4"), clinic.reason("n4")) == (NodePhase.SPARE, SPARE_REASON)
    assert clinic.effects("n4") == ["validate"]
    clinic.wait(86400)
    clinic.settle()
    assert clinic.effects("n4") == ["validate", "validate"], "it is validated again every day"


def test_a_spare_is_lent_to_a_join_job_and_kept_again_afterwards(clinic_of: MakeClinic):
    clinic = spare_clinic(clinic_of)
    lose_a_node(clinic)
    clinic.cluster.join(9)
    clinic.round()
    assert (clinic.phase("n4"), clinic.reason("n4")) == (NodePhase.LENT, "")
    assert clinic.cluster.queue[9].reservation == "n4", "for this job"
    assert clinic.cluster.reservations == {LOAN: "1000"}, "no other user may have it meanwhile"
    clinic.cluster.join(9, "n4")
    clinic.rounds(20)
    assert clinic.cluster.reservations == {LOAN: "root"}, "closed to other jobs of the same user once the job runs"
    clinic.cluster.end(9)
    clinic.settle()
    assert clinic.cluster.reservations == {}
    assert (clinic.phase("n4"), clinic.reason("n4")) == (NodePhase.SPARE, SPARE_REASON)


def test_a_spare_is_reserved_before_it_is_resumed(clinic_of: MakeClinic):
    clinic = spare_clinic(clinic_of)
    lose_a_node(clinic)
    clinic.cluster.join(9)
    node = clinic.cluster.nodes["n4"]
    seen: list[bool] = []

    class Watched(dict[str, str]):
        def __setitem__(self, name: str, users: str) -> None:
            seen.append(NodeFlag.DRAIN in node.flags)
            super().__setitem__(name, users)

    clinic.cluster.reservations = Watched()
    clinic.round()
    assert seen == [True] and node.flags == frozenset()


@pytest.mark.parametrize("reason", ["JobHeldUser", "Resources"])
def test_a_spare_is_taken_back_from_a_job_that_does_not_start(clinic_of: MakeClinic, reason: str):
    clinic = spare_clinic(clinic_of)
    lose_a_node(clinic)
    clinic.cluster.join(9)
    clinic.round()
    clinic.cluster.queue[9] = replace(clinic.cluster.queue[9], reason=reason)
    clinic.wait(1.0 if reason in [each.value for each in PendingReason if each.held_back] else LOAN_S)
    clinic.round()
    assert (clinic.phase("n4"), clinic.reason("n4")) == (NodePhase.SPARE, SPARE_REASON)
    assert clinic.cluster.reservations == {} and clinic.cluster.queue[9].reservation == ""
    clinic.cluster.queue[9] = replace(clinic.cluster.queue[9], reason="Priority")
    clinic.rounds(3)
    assert clinic.phase("n4") is NodePhase.LENT, "its run still lacks a node"


def test_a_run_that_withdrew_its_request_before_the_job_started_is_lent_a_spare_again(clinic_of: MakeClinic):
    """A coordinator withdraws its request when a lost node is usable again.

    Another job may take that node first.
    """
    clinic = spare_clinic(clinic_of)
    lose_a_node(clinic)
    clinic.cluster.join(9)
    clinic.round()
    assert clinic.phase("n4") is NodePhase.LENT
    clinic.cluster.end(9)
    clinic.settle()
    assert clinic.phase("n4") is NodePhase.SPARE
    clinic.cluster.join(10)
    clinic.settle()
    assert clinic.phase("n4") is NodePhase.LENT and clinic.cluster.queue[10].reservation == "n4"
    clinic.cluster.join(10, "n4")
    clinic.rounds(20)
    clinic.cluster.end(10)
    clinic.settle()
    clinic.cluster.join(11)
    clinic.settle()
    assert clinic.phase("n4") is NodePhase.SPARE, "it lost one node, and had a spare for it"


def test_a_spare_is_lent_even_if_it_cannot_be_reserved(clinic_of: MakeClinic):
    """Another reservation may have the node already; the run must not wait for that."""

    class Refusing(dict[str, str]):
        def __setitem__(self, name: str, users: str) -> None:
            raise CommandFailed(("scontrol",), 1, "Requested reservation overlaps with another reservation")

    clinic = spare_clinic(clinic_of)
    lose_a_node(clinic)
    clinic.cluster.join(9)
    clinic.cluster.reservations = Refusing()
    clinic.round()
    assert clinic.phase("n4") is NodePhase.LENT and "refused to reserve it" in " ".join(clinic.texts("n4"))


@pytest.mark.parametrize("running", [False, True])
def test_a_lent_spare_drained_by_a_restarted_slurmctld_is_released_again(clinic_of: MakeClinic, running: bool):
    clinic = spare_clinic(clinic_of)
    lose_a_node(clinic)
    clinic.cluster.join(9)
    clinic.round()
    if running:
        clinic.cluster.join(9, "n4")
    node = clinic.cluster.nodes["n4"]
    node.flags, node.reason = frozenset({NodeFlag.DRAIN}), SPARE_REASON
    clinic.cluster.reservations.clear()  # a killed slurmctld had not saved the reservation yet
    clinic.rounds(2)
    assert (node.flags, clinic.phase("n4")) == (frozenset(), NodePhase.LENT)
    assert clinic.cluster.reservations[LOAN] in (("0", "root") if running else ("1000",)), "no other user may have it"
    assert clinic.cluster.queue[9].state is (JobState.RUNNING if running else JobState.PENDING)
    clinic.cluster.end(9)
    clinic.settle()
    assert (clinic.phase("n4"), clinic.reason("n4")) == (NodePhase.SPARE, SPARE_REASON)


def test_a_failed_release_is_retried_after_a_delay(clinic_of: MakeClinic):
    clinic = spare_clinic(clinic_of)
    lose_a_node(clinic)
    clinic.cluster.join(9)
    facts = clinic.cluster.facts()
    del clinic.cluster.queue[9]  # Slurm no longer knows the job
    for _ in range(10):
        clinic.cluster.now += 0.1
        clinic.loop.round(replace(facts, slurm_at=clinic.cluster.now))
    assert len([text for text in clinic.texts("n4") if "could not release" in text]) == 1


def test_other_jobs_get_no_spare(clinic_of: MakeClinic):
    clinic = spare_clinic(clinic_of)
    lose_a_node(clinic)
    clinic.cluster.start(9, name="train-k3f9")
    clinic.rounds(20)
    assert clinic.phase("n4") is NodePhase.SPARE


def test_a_run_that_has_lost_no_node_gets_no_spare(clinic_of: MakeClinic):
    clinic = spare_clinic(clinic_of)
    clinic.cluster.start_run(8, "n1", "n2")
    clinic.cluster.join(9)
    clinic.rounds(20)
    assert clinic.phase("n4") is NodePhase.SPARE


def test_a_run_of_another_user_earns_no_spare(clinic_of: MakeClinic):
    clinic = spare_clinic(clinic_of)
    lose_a_node(clinic)
    clinic.cluster.join(9, uid=1001)  # the same name, but another user
    clinic.cluster.start_run(10, "n1", run="mine", uid=1001)
    clinic.cluster.join(11, run="mine", uid=1001)
    clinic.cluster.start(12, "n2", comment="dalsegno:main", name="unkept", uid=1001)
    clinic.cluster.join(13, run="unkept", uid=1001)
    clinic.rounds(20)
    assert clinic.phase("n4") is NodePhase.SPARE


def test_one_lost_node_earns_one_spare(clinic_of: MakeClinic):
    clinic = spare_clinic(clinic_of)
    lose_a_node(clinic)
    clinic.cluster.join(9)
    clinic.round()
    clinic.cluster.join(9, "n4")
    clinic.rounds(2)
    clinic.cluster.end(9)
    clinic.settle()
    clinic.cluster.join(10)
    clinic.rounds(20)
    assert clinic.phase("n4") is NodePhase.SPARE, "it has received its spare"
    lose_a_node(clinic, "n2")
    clinic.rounds(3)
    assert clinic.phase("n4") is NodePhase.LENT


def test_a_run_that_is_over_gets_no_spare(clinic_of: MakeClinic):
    clinic = spare_clinic(clinic_of)
    lose_a_node(clinic)
    clinic.cluster.end(8)
    clinic.cluster.join(9)
    clinic.rounds(20)
    assert clinic.phase("n4") is NodePhase.SPARE


@pytest.mark.parametrize("what", [{"node_count": 2}, {"array_id": 9}, {"het_id": 9}])
def test_a_job_for_several_nodes_gets_no_spare(clinic_of: MakeClinic, what: dict[str, int]):
    clinic = spare_clinic(clinic_of)
    lose_a_node(clinic)
    clinic.cluster.join(9)
    clinic.cluster.queue[9] = replace(clinic.cluster.queue[9], **what)  # type: ignore[arg-type]
    clinic.rounds(20)
    assert clinic.phase("n4") is NodePhase.SPARE


def test_a_spare_stays_one_after_a_short_silence_of_its_agent(clinic_of: MakeClinic):
    clinic = spare_clinic(clinic_of)
    for lent in (False, True):
        if lent:
            lose_a_node(clinic)
            clinic.cluster.join(9)
            clinic.round()
            clinic.cluster.join(9, "n4")
        clinic.cluster.nodes["n4"].agent = False  # the host answers, but the agent does not
        clinic.rounds(3)
        assert clinic.phase("n4") is (NodePhase.LENT if lent else NodePhase.SPARE)
        clinic.cluster.nodes["n4"].agent = True
        clinic.rounds(3)
        assert clinic.phase("n4") is (NodePhase.LENT if lent else NodePhase.SPARE)


def test_a_broken_spare_is_repaired_and_is_a_spare_again(clinic_of: MakeClinic):
    clinic = spare_clinic(clinic_of)
    clinic.cluster.break_gpu("n4", Remedy.REBOOT)
    clinic.settle()
    assert (clinic.phase("n4"), clinic.reason("n4")) == (NodePhase.SPARE, SPARE_REASON)
    assert clinic.effects("n4").count("reboot") == 1


MACHINES = {f"n{number}": f"the machine at 10.0.0.{number}" for number in range(1, 5)}


def without_replacement(clinic_of: MakeClinic) -> Clinic:
    """Return a cluster whose machines only a person can replace, with one spare."""
    can = frozenset({Remedy.RESET, Remedy.REBOOT})
    clinic = clinic_of(4, spares=frozenset({"n4"}), can=can, machines=MACHINES)
    node = clinic.cluster.nodes["n4"]
    node.flags, node.reason, node.effects[:] = frozenset({NodeFlag.DRAIN}), SPARE_REASON, []
    clinic.settle()
    return clinic


def test_a_spare_takes_the_place_of_a_node_whose_machine_a_person_must_replace(clinic_of: MakeClinic):
    clinic = without_replacement(clinic_of)
    clinic.cluster.break_gpu("n2", Remedy.REPLACE)
    clinic.wait(3 * 86400)
    clinic.settle()
    assert clinic.phase("n2") is NodePhase.NEEDS_ADMIN
    assert any("a person must replace the machine at 10.0.0.2" in text for text in clinic.texts("n2"))
    assert (clinic.phase("n4"), clinic.reason("n4")) == (NodePhase.IN_SERVICE, "")
    assert "in service in place of n2: a person must replace the machine at 10.0.0.2" in clinic.texts("n4")
    clinic.cluster.slurm_drains("n4", SPARE_REASON)
    clinic.settle()
    assert (clinic.phase("n4"), clinic.reason("n4")) == (NodePhase.IN_SERVICE, ""), "slurm.conf lists it as a spare"


def test_a_promoted_spare_is_a_spare_again_when_the_node_is_back(clinic_of: MakeClinic):
    clinic = without_replacement(clinic_of)
    clinic.cluster.break_gpu("n2", Remedy.REPLACE)
    clinic.wait(3 * 86400)
    clinic.settle()
    clinic.loop.context.target.replace("n2")  # done by a person
    clinic.settle()
    assert clinic.phase("n2") is NodePhase.IN_SERVICE
    assert (clinic.phase("n4"), clinic.reason("n4")) == (NodePhase.SPARE, SPARE_REASON)


def test_a_promoted_spare_that_fails_is_repaired_and_promoted_again(clinic_of: MakeClinic):
    clinic = without_replacement(clinic_of)
    clinic.cluster.break_gpu("n2", Remedy.REPLACE)
    clinic.wait(3 * 86400)
    clinic.settle()
    clinic.cluster.power_off("n4")
    clinic.settle()
    assert clinic.phase("n4") is NodePhase.IN_SERVICE and "reboot" in clinic.effects("n4")


def test_nothing_is_promoted_where_machines_are_replaced_automatically(clinic_of: MakeClinic):
    clinic = spare_clinic(clinic_of)
    clinic.cluster.break_gpu("n2", Remedy.REPLACE)
    clinic.settle()
    assert clinic.phase("n4") is NodePhase.SPARE
