"""Tests of what the controller does with nodes that their cloud will take back."""

from __future__ import annotations

from dalsegno.health import Remedy
from dalsegno.recovery.decisions.actions import Repair
from dalsegno.recovery.decisions.phase import NodePhase
from dalsegno.recovery.decisions.records import MarkKind
from dalsegno.wire.cloud_notice import CHECK, CloudNotice, NoticeKind, find_notice
from tests.recovery.clinic import Clinic, MakeClinic


def announce(clinic: Clinic, node: str, in_s: float = 120.0, kind: NoticeKind = NoticeKind.SPOT) -> CloudNotice:
    """Let the node's check report a notice, which ends only when the node gets another machine."""
    notice = CloudNotice(kind, float(int(clinic.cluster.now + in_s)))
    clinic.cluster.break_gpu(node, Remedy.REPLACE, notice.code, says=Remedy.DRAIN)
    clinic.cluster.nodes[node].machine.check = CHECK
    return notice


def take(clinic: Clinic, node: str) -> None:
    clinic.cluster.power_off(node)


def give_back(clinic: Clinic, node: str) -> None:
    clinic.cluster.nodes[node].machine = clinic.cluster.machine()
    clinic.cluster.nodes[node].machine.check = CHECK


def test_node_is_drained_with_the_notice_and_its_deadline_as_the_reason(clinic_of: MakeClinic):
    clinic = clinic_of()
    notice = announce(clinic, "n2")
    clinic.round()
    assert clinic.effects("n2") == ["drain"]
    assert find_notice(clinic.reason("n2")) == notice


def test_taken_node_is_not_repaired_and_returns_with_another_machine(clinic_of: MakeClinic):
    clinic = clinic_of()
    announce(clinic, "n2")
    clinic.rounds(100)
    take(clinic, "n2")
    clinic.rounds(1000)
    assert clinic.effects("n2") == ["drain", "down"] and clinic.phase("n2") is NodePhase.DOWN
    give_back(clinic, "n2")
    clinic.settle()
    assert clinic.effects("n2") == ["drain", "down", "validate", "resume"]
    assert not [action for action in clinic.done if isinstance(action, Repair)]


def test_node_that_the_cloud_never_gives_back_is_reported(clinic_of: MakeClinic):
    clinic = clinic_of(absent_s=600.0)
    announce(clinic, "n2")
    clinic.rounds(2)
    take(clinic, "n2")
    clinic.rounds(700)
    assert clinic.phase("n2") is NodePhase.NEEDS_ADMIN
    assert any("the cloud has not given it back" in text for text in clinic.texts("n2"))
    give_back(clinic, "n2")
    clinic.settle()
    assert clinic.phase("n2") is NodePhase.IN_SERVICE


def test_machine_that_reboots_before_its_end_is_not_used_again(clinic_of: MakeClinic):
    clinic = clinic_of()
    announce(clinic, "n2", in_s=500.0)
    clinic.rounds(2)
    clinic.cluster.nodes["n2"].machine.boot = "another"
    clinic.rounds(300)
    assert clinic.effects("n2") == ["drain"]


def test_withdrawn_notice_returns_the_node(clinic_of: MakeClinic):
    clinic = clinic_of()
    announce(clinic, "n2", in_s=3000.0, kind=NoticeKind.MAINTENANCE)
    clinic.rounds(5)
    clinic.cluster.nodes["n2"].machine.cured_by = None
    clinic.settle()
    assert clinic.effects("n2") == ["drain", "validate", "resume"]


def test_new_deadline_is_written_into_the_reason(clinic_of: MakeClinic):
    clinic = clinic_of()
    announce(clinic, "n2", in_s=3000.0, kind=NoticeKind.MAINTENANCE)
    clinic.rounds(2)
    sooner = announce(clinic, "n2", in_s=100.0)
    clinic.rounds(2)
    assert find_notice(clinic.reason("n2")) == sooner


def test_notice_hides_faults_that_would_be_repaired(clinic_of: MakeClinic):
    clinic = clinic_of()
    clinic.cluster.nodes["n2"].machine.also = ("xid",)
    announce(clinic, "n2")
    clinic.settle()
    assert clinic.effects("n2") == ["drain"]


def test_all_nodes_may_be_taken_at_once_and_other_repairs_keep_their_budget(clinic_of: MakeClinic):
    clinic = clinic_of(8, max_out=0.5, per_hour=1)
    for node in ("n1", "n2", "n3"):
        announce(clinic, node)
    clinic.rounds(2)
    assert [clinic.effects(node) for node in ("n1", "n2", "n3")] == [["drain"]] * 3
    clinic.cluster.break_gpu("n4", Remedy.REBOOT)
    clinic.settle()
    assert "reboot" in clinic.effects("n4")


def test_run_is_owed_a_spare_for_a_node_that_the_cloud_takes(clinic_of: MakeClinic):
    clinic = clinic_of()
    clinic.cluster.start_run(7, "n1", "n2")
    announce(clinic, "n2")
    clinic.round()
    taken = [mark for mark in clinic.store.records.marks if mark.kind is MarkKind.TAKEN]
    assert [mark.runs for mark in taken] == [("1000:train-k3f9",)]
    assert clinic.store.records.owed("1000:train-k3f9") == 1


def test_nothing_is_drained_while_recovery_only_observes(clinic_of: MakeClinic):
    clinic = clinic_of(mode="observe")
    announce(clinic, "n2")
    clinic.rounds(3)
    assert clinic.effects("n2") == []
    assert any("would drain it: cloud-notice[spot:" in text for text in clinic.texts("n2"))
