"""Tests of what the controller does with nodes whose file server does not answer."""

from __future__ import annotations

import pytest

from dalsegno.health import Remedy
from dalsegno.health.result import SERVER_AWAY
from dalsegno.recovery.decisions.actions import Repair
from dalsegno.recovery.decisions.budget import budget_left
from dalsegno.recovery.decisions.facts import FILE_SYSTEMS
from dalsegno.recovery.decisions.forecast import Forecast, forecast
from dalsegno.recovery.decisions.phase import NodePhase
from tests.recovery.clinic import Clinic, MakeClinic

LONG_STEP_S = 10.0  # time between rounds while nothing happens


def stop_server(clinic: Clinic, *nodes: str) -> None:
    """Let the file systems of these nodes, or of all, hang because of their server."""
    for node in nodes or clinic.cluster.nodes:
        clinic.cluster.nodes[node].machine.check = FILE_SYSTEMS
        clinic.cluster.break_gpu(node, Remedy.REPLACE, SERVER_AWAY, says=Remedy.DRAIN)


def start_server(clinic: Clinic) -> None:
    for node in clinic.cluster.nodes.values():
        node.machine.cured_by = None


def hang_by_itself(clinic: Clinic, *nodes: str) -> None:
    """Let the file systems of these nodes hang although their server answers."""
    for node in nodes:
        clinic.cluster.nodes[node].machine.check = FILE_SYSTEMS
        clinic.cluster.break_gpu(node, Remedy.REBOOT, "")


def no_repair(clinic: Clinic) -> bool:
    return not [action for action in clinic.done if isinstance(action, Repair)]


def test_all_nodes_are_drained_while_their_server_is_away_and_then_return_at_once(clinic_of: MakeClinic):
    clinic = clinic_of(8, per_hour=2, max_out=1.0, reboots_per_fault=0)
    stop_server(clinic)
    clinic.rounds(2)
    assert all(clinic.effects(name) == ["drain"] for name in clinic.cluster.nodes)
    assert clinic.reason("n8").startswith("dalsegno:drain:file-systems[server]")
    own = clinic.store.records.get("n8")
    ahead = forecast(own, ("train",), clinic.store.records, clinic.policy, clinic.cluster.now)
    assert ahead == Forecast(None, "its file server does not answer: the node itself is not repaired")
    clinic.rounds(200, LONG_STEP_S)  # longer than an administrator is given for other faults
    assert {clinic.phase(name) for name in clinic.cluster.nodes} == {NodePhase.DRAINED}
    start_server(clinic)
    clinic.rounds(2)
    assert all(clinic.effects(name) == ["drain", "resume"] for name in clinic.cluster.nodes)
    assert no_repair(clinic)


@pytest.mark.parametrize(("nodes", "most"), [(8, 2), (4, 1), (1, 1)])
def test_no_more_nodes_than_the_limit_wait_for_their_server(clinic_of: MakeClinic, nodes: int, most: int):
    clinic = clinic_of(nodes, max_out=0.25, per_hour=1)
    names = list(clinic.cluster.nodes)
    for _ in range(3):
        stop_server(clinic)
        clinic.rounds(200, LONG_STEP_S)
        phases = [clinic.phase(name) for name in names]
        assert phases == [NodePhase.DRAINED] * most + [NodePhase.SUSPECTED] * (nodes - most)
        start_server(clinic)
        clinic.rounds(40, LONG_STEP_S)
        assert {clinic.phase(name) for name in names} == {NodePhase.IN_SERVICE}
    assert no_repair(clinic)
    assert all(clinic.effects(name) == ["drain", "resume"] * 3 for name in names[:most])
    assert all(clinic.effects(name) == [] for name in names[most:])
    refused = [text for name in names[most:] for text in clinic.texts(name) if "no action" in text]
    assert all(f"{most} of {nodes} nodes of train are out of service already" in text for text in refused)
    assert len(refused) == 3 * (nodes - most), "each outage is remarked once per node"


def test_nodes_out_of_service_for_other_faults_leave_less_room_to_wait(clinic_of: MakeClinic):
    clinic = clinic_of(8, max_out=0.25)
    clinic.cluster.break_gpu("n8", Remedy.REPLACE, says=Remedy.DRAIN)
    clinic.rounds(3)
    stop_server(clinic, *(f"n{each}" for each in range(1, 8)))
    clinic.rounds(3)
    assert [name for name in clinic.cluster.nodes if clinic.phase(name) is NodePhase.DRAINED] == ["n1", "n8"]


def test_nodes_that_wait_leave_all_room_for_repairs(clinic_of: MakeClinic):
    clinic = clinic_of(8, max_out=0.25)
    stop_server(clinic)
    clinic.rounds(3)
    clinic.cluster.power_off("n7")
    clinic.settle()
    assert "replace" in clinic.effects("n7")


def test_outages_of_a_server_spend_no_budget(clinic_of: MakeClinic):
    clinic = clinic_of(8, per_hour=1, max_out=1.0)
    for _ in range(3):
        stop_server(clinic)
        clinic.rounds(2)
        names = list(clinic.cluster.nodes)
        assert budget_left(clinic.store.records, clinic.policy, "train", names, clinic.cluster.now) == 1
        start_server(clinic)
        clinic.rounds(2)
    assert all(clinic.effects(name) == ["drain", "resume"] * 3 for name in clinic.cluster.nodes)
    hang_by_itself(clinic, "n4")
    clinic.settle()
    assert clinic.effects("n4")[-5:] == ["drain", "evidence", "reboot", "validate", "resume"]


def test_node_that_hangs_while_its_server_answers_is_rebooted(clinic_of: MakeClinic):
    clinic = clinic_of()
    hang_by_itself(clinic, "n2")
    clinic.settle()
    assert clinic.effects("n2") == ["drain", "evidence", "reboot", "validate", "resume"]


def test_nodes_that_hang_after_the_outage_are_repaired_within_the_budgets(clinic_of: MakeClinic):
    clinic = clinic_of(8, per_hour=2, max_out=1.0)
    stop_server(clinic)
    clinic.rounds(3)
    start_server(clinic)
    hang_by_itself(clinic, "n1", "n2", "n3")
    clinic.rounds(40, LONG_STEP_S)
    repaired = [name for name in ("n1", "n2", "n3") if "reboot" in clinic.effects(name)]
    assert len(repaired) == 2
    left = ({"n1", "n2", "n3"} - {*repaired}).pop()
    assert clinic.effects(left) == ["drain"] and clinic.phase(left) is NodePhase.DRAINED
    assert "2 nodes of train were taken out of service within the hour" in clinic.texts(left)[-1]
    start_server(clinic)
    clinic.settle()
    assert clinic.phase(left) is NodePhase.IN_SERVICE and "reboot" not in clinic.effects(left)


def test_node_lost_during_the_outage_is_replaced(clinic_of: MakeClinic):
    clinic = clinic_of(8)
    stop_server(clinic)
    clinic.rounds(3)
    clinic.cluster.power_off("n2")
    clinic.settle()
    assert "replace" in clinic.effects("n2") and clinic.reason("n2").count("server") == 0
    assert clinic.effects("n3") == ["drain"]


def test_jobs_on_the_node_do_not_delay_its_return(clinic_of: MakeClinic):
    clinic = clinic_of(max_out=1.0)
    clinic.cluster.start(7, "n1")
    clinic.cluster.start_run(8, "n2", "n3")
    stop_server(clinic)
    clinic.rounds(3)
    start_server(clinic)
    clinic.rounds(2)
    assert [clinic.effects(name) for name in ("n1", "n2", "n3")] == [["drain", "resume"]] * 3
    assert clinic.cluster.queue[7].nodes == ("n1",) and clinic.cluster.queue[8].nodes == ("n2", "n3")


def test_spare_becomes_a_spare_again(clinic_of: MakeClinic):
    clinic = clinic_of(4, spares=frozenset({"n4"}))
    clinic.settle()
    before = len(clinic.effects("n4"))
    stop_server(clinic)
    clinic.rounds(10, LONG_STEP_S)
    start_server(clinic)
    clinic.settle()
    assert clinic.phase("n4") is NodePhase.SPARE
    assert clinic.effects("n4")[before:] == ["drain", "validate", "drain"]  # a spare is a drained node


def test_only_node_that_does_not_reach_its_server_needs_an_administrator(clinic_of: MakeClinic):
    clinic = clinic_of(4, person_s=600.0)
    stop_server(clinic, "n2")
    clinic.rounds(50, LONG_STEP_S)
    assert clinic.phase("n2") is NodePhase.DRAINED
    clinic.rounds(20, LONG_STEP_S)
    assert clinic.phase("n2") is NodePhase.NEEDS_ADMIN and no_repair(clinic)
    start_server(clinic)
    clinic.settle()
    assert clinic.phase("n2") is NodePhase.IN_SERVICE


def test_last_node_that_connects_again_after_a_long_outage_needs_no_administrator(clinic_of: MakeClinic):
    clinic = clinic_of(4, person_s=600.0, max_out=1.0)
    stop_server(clinic)
    clinic.rounds(100, LONG_STEP_S)
    start_server(clinic)
    stop_server(clinic, "n2")
    clinic.rounds(30, LONG_STEP_S)
    assert clinic.phase("n1") is NodePhase.IN_SERVICE and clinic.phase("n2") is NodePhase.DRAINED
    start_server(clinic)
    clinic.rounds(2)
    assert clinic.effects("n2") == ["drain", "resume"]


def test_controller_that_starts_after_a_long_outage_waits_for_the_agents(clinic_of: MakeClinic):
    clinic = clinic_of(4, person_s=600.0, max_out=1.0)
    stop_server(clinic)
    clinic.rounds(3)
    for node in clinic.cluster.nodes.values():
        node.quiet = True
    clinic.store.close()
    clinic.wait(2000)  # the head reboots
    clinic.open()
    clinic.rounds(10, LONG_STEP_S)
    assert {clinic.phase(name) for name in clinic.cluster.nodes} == {NodePhase.DRAINED}
    for node in clinic.cluster.nodes.values():
        node.quiet = False
    start_server(clinic)
    clinic.rounds(2)
    assert all(clinic.effects(name) == ["drain", "resume"] for name in clinic.cluster.nodes)


def test_single_node_waits_for_its_server(clinic_of: MakeClinic):
    clinic = clinic_of(1)
    stop_server(clinic)
    clinic.rounds(200, LONG_STEP_S)
    assert clinic.phase("n1") is NodePhase.DRAINED


@pytest.mark.parametrize("remedy", [Remedy.REBOOT, Remedy.REPLACE])
def test_repaired_node_is_validated_again_after_an_outage_during_its_validation(clinic_of: MakeClinic, remedy: Remedy):
    clinic = clinic_of(4, max_out=1.0)
    clinic.cluster.break_gpu("n2", remedy)
    while clinic.effects("n2")[-1:] != [remedy.value]:
        clinic.round()
    stop_server(clinic)
    clinic.rounds(10, LONG_STEP_S)
    assert clinic.effects("n2") == ["drain", "evidence", remedy.value, "validate"]
    assert clinic.phase("n2") is NodePhase.DRAINED
    start_server(clinic)
    clinic.settle()
    assert clinic.effects("n2") == ["drain", "evidence", remedy.value, "validate", "validate", "resume"]
    assert all(clinic.effects(name) == ["drain", "resume"] for name in ("n1", "n3", "n4"))


def test_nothing_is_drained_while_recovery_is_paused(clinic_of: MakeClinic):
    clinic = clinic_of()
    clinic.store.pause(True, "ada", clinic.cluster.now)
    stop_server(clinic)
    clinic.rounds(3)
    assert all(clinic.effects(name) == [] for name in clinic.cluster.nodes)
    assert "paused; would drain" in clinic.texts("n1")[-1]
    assert "1 of 4 nodes of train would be out of service already" in clinic.texts("n2")[-1]
