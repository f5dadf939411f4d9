"""Tests of how faults change a node's telemetry, and of the remedy that ends each fault. No cluster is needed."""

import os
from pathlib import Path
from typing import Any

import pytest

from dalsegno.errors import CommandFailed, DalsegnoError
from dalsegno.health.facts import GpuFacts
from dalsegno.health.result import Remedy
from dalsegno.health.telemetry import Telemetry, read_telemetry
from dalsegno.inject.faults import FAULTS, FaultOptions
from dalsegno.inject.hardware import CHANGES, with_faults
from dalsegno.inject.injection import clear, inject, undo_when_due
from dalsegno.inject.methods import METHODS, check_restored, drop_program, link_limit
from dalsegno.inject.records import FaultRecord, forget, lock_path, read_records, record
from dalsegno.system.children import start_ticks
from dalsegno.system.files import locked
from dalsegno.system.processes import Completed
from dalsegno.targets.local.fault_access import LocalAccess, end_faults
from dalsegno.targets.local.placement import healthy_node
from tests.local.sites import access_to
from tests.local.test_desired import cluster

HEALTHY = healthy_node(cluster(1).nodes[0], simulated=True)


def after(fault: str, **options: Any) -> Telemetry:
    return with_faults(HEALTHY, [FaultRecord(fault, "train-1", 1000.0, "m", options)])


def gpu(telemetry: Telemetry, index: int = 0) -> GpuFacts:
    return next(each for each in telemetry.gpus if each.index == index)


def test_record_of_a_stopped_worker_that_has_ended_is_dropped(tmp_path: Path):
    own = os.getpid()
    record(tmp_path / "n1", "worker-hang", "n1", {}, {"pid": own, "start": start_ticks(own)})
    record(tmp_path / "n2", "worker-hang", "n2", {}, {"pid": own, "start": 1})  # another process has its PID now
    assert [one.fault for one in read_records(tmp_path / "n1")] == ["worker-hang"]
    assert read_records(tmp_path / "n2") == []


def test_injected_xid_is_a_line_in_the_kernel_log():
    telemetry = after("xid", code=48, gpu=1)
    (line,) = telemetry.kernel_log
    assert (line.at, line.text) == (
        1000.0,
        "NVRM: Xid (PCI:0000:42:00): 48, pid=4242, DBE (double bit error) ECC Error",
    )
    assert telemetry.gpus == HEALTHY.gpus


def test_gpu_with_xid_79_is_reported_as_lost():
    telemetry = after("xid", code=79, gpu=1)
    assert [each.lost for each in telemetry.gpus] == [False, True]


@pytest.mark.parametrize(
    ("fault", "read", "before", "then"),
    [
        ("ecc", lambda telemetry: gpu(telemetry).ecc_uncorrected, 0, 1),
        ("gpu-lost", lambda telemetry: len(telemetry.gpus), 2, 1),
        ("gpu-hot", lambda telemetry: gpu(telemetry).temperature_c, 34, 96),
        ("nvlink", lambda telemetry: gpu(telemetry).nvlinks, 18, 17),
        ("slow-gpu", lambda telemetry: gpu(telemetry).clock_mhz, 345, 660),
        ("clock-skew", lambda telemetry: telemetry.clock_skew_s, 0, 300),
        ("link-down", lambda telemetry: telemetry.ports[0].state, "ACTIVE", "DOWN"),
        ("link-flap", lambda telemetry: telemetry.ports[0].flaps, (), (1000, 1001, 1002)),
        ("oom", lambda telemetry: len(telemetry.kernel_log), 0, 1),
        ("cloud-notice", lambda telemetry: telemetry.notice_at, 0, 1120),
    ],
)
def test_fault_changes_the_telemetry_of_its_node(fault: str, read: Any, before: object, then: object):
    assert (read(HEALTHY), read(after(fault))) == (before, then)


def test_every_fault_has_an_implementation():
    at_once = {"power-off", "worker-kill", "bad-replacement"}
    assert set(FAULTS) == at_once | set(METHODS) | set(CHANGES)


def test_faults_are_undone_in_any_order(tmp_path: Path):
    nodes = access_to(tmp_path)
    folder, telemetry = nodes.records("train-1"), nodes.nodes.folder.telemetry("train-1")
    hot, ecc = record(folder, "gpu-hot", "train-1", {}), record(folder, "ecc", "train-1", {})
    assert [one.fault for one in read_records(folder)] == ["gpu-hot", "ecc"]
    forget(folder, hot)
    nodes.write_hardware("train-1")
    found = read_telemetry(telemetry)
    assert (gpu(found).temperature_c, gpu(found).ecc_uncorrected) == (34, 1)
    forget(folder, ecc)
    nodes.write_hardware("train-1")
    assert read_telemetry(telemetry) == HEALTHY


def test_forgetting_a_fault_keeps_a_newer_one_of_the_same_name(tmp_path: Path):
    first = record(tmp_path, "ecc", "train-1", {})
    second = record(tmp_path, "ecc", "train-1", {"count": 3})
    forget(tmp_path, first)
    assert read_records(tmp_path) == [second]


def left_after(nodes: LocalAccess, remedy: Remedy) -> list[str]:
    end_faults(nodes.nodes, "train-1", remedy)
    return [one.fault for one in read_records(nodes.records("train-1"))]


def test_remedy_ends_all_faults_that_need_it_or_a_lighter_one(tmp_path: Path):
    nodes = access_to(tmp_path)
    for fault, depth in (("ecc", "reset"), ("gpu-lost", "reboot"), ("slow-gpu", "replace"), ("net-cut", "reboot")):
        record(nodes.records("train-1"), fault, "train-1", {"repaired_by": depth})
    assert left_after(nodes, Remedy.RESET) == ["gpu-lost", "slow-gpu", "net-cut"]
    assert left_after(nodes, Remedy.REBOOT) == ["slow-gpu"]
    assert left_after(nodes, Remedy.REPLACE) == []


def test_record_of_an_earlier_release_has_the_old_name_of_the_remedy(tmp_path: Path):
    assert record(tmp_path, "ecc", "train-1", {"mended_by": "replace"}).ended_by is Remedy.REPLACE
    assert record(tmp_path, "ecc", "train-1", {}).ended_by is Remedy.REBOOT


class LockReadingAccess(LocalAccess):
    """Access to a node that checks, whenever telemetry is written, that the lock of the node's faults is held."""

    def write_hardware(self, node: str) -> None:
        with pytest.raises(DalsegnoError, match="is working"), locked(lock_path(self.records(node)), node, wait_s=0):
            pass
        super().write_hardware(node)


def test_faults_of_a_node_are_injected_and_undone_under_one_lock(tmp_path: Path):
    nodes = LockReadingAccess(access_to(tmp_path).nodes)
    first = record(nodes.records("train-1"), "gpu-hot", "train-1", {})
    undo_when_due(nodes, "train-1", first.mark)
    assert read_records(nodes.records("train-1")) == []
    record(nodes.records("train-1"), "gpu-hot", "train-1", {})
    assert [one.fault for one in clear(nodes, "train-1")] == ["gpu-hot"]


def test_a_timer_leaves_a_newer_fault_of_the_same_name(tmp_path: Path):
    nodes = access_to(tmp_path)
    first = record(nodes.records("train-1"), "gpu-hot", "train-1", {})
    newer = record(nodes.records("train-1"), "gpu-hot", "train-1", {})
    undo_when_due(nodes, "train-1", first.mark)
    assert read_records(nodes.records("train-1")) == [newer]


def test_bad_replacement_fails_as_often_as_its_count(tmp_path: Path):
    nodes = access_to(tmp_path)
    record(nodes.records("train-1"), "bad-replacement", "train-1", {"count": 2})
    assert left_after(nodes, Remedy.REBOOT) == ["bad-replacement"]
    assert set(left_after(nodes, Remedy.REPLACE)) == {"ecc", "bad-replacement"}
    assert left_after(nodes, Remedy.REPLACE) == ["ecc"]
    assert left_after(nodes, Remedy.REPLACE) == []


def test_a_replacement_with_the_old_gpus_has_no_other_fault(tmp_path: Path):
    nodes = access_to(tmp_path)
    record(nodes.records("train-1"), "bad-replacement", "train-1", {"same": True})
    assert left_after(nodes, Remedy.REPLACE) == []


def test_drop_program_compares_a_random_number_with_the_share():
    assert drop_program(25) == "4,32 0 0 4294963256,37 0 1 1073741824,6 0 0 4294967295,6 0 0 2"
    assert "37 0 1 4294967295" in drop_program(100)


def test_only_packets_between_the_two_ends_of_a_slow_link_are_limited():
    queue, limit, _, choice = link_limit("eth0", "20mbit", "dst 10.0.0.2")
    assert "default" not in queue, "all other packets pass at once"
    assert limit[-4:] == ["rate", "20mbit", "burst", "32kb"]
    assert choice[-7:] == ["u32", "match", "ip", "dst", "10.0.0.2", "flowid", "1:1"]


class SwitchedOnAccess(LocalAccess):
    """Access to a node that counts as switched on, though there is no host."""

    def is_on(self, node: str) -> bool:
        return True

    def check_virtual(self, node: str, why: str) -> None:
        pass


@pytest.mark.parametrize(
    ("lasting", "fault", "peer", "said"),
    [
        ("net-slow", "link-slow", "train-2", "already has the fault `net-slow`"),
        ("link-slow", "net-slow", None, "already has the fault `link-slow`"),
        ("ecc", "link-slow", "train-1", "a link has two ends"),
        ("ecc", "link-slow", "train-9", "no node `train-9`"),
    ],
)
def test_slow_link_is_refused_without_a_peer_or_beside_another_limit(
    tmp_path: Path, lasting: str, fault: str, peer: str | None, said: str
):
    nodes = SwitchedOnAccess(access_to(tmp_path).nodes)
    record(nodes.records("train-1"), lasting, "train-1", {})
    with pytest.raises(DalsegnoError, match=said) as refused:
        inject(nodes, FAULTS[fault], "train-1", FaultOptions(peer=peer))
    assert refused.value.hint
    assert [one.fault for one in read_records(nodes.records("train-1"))] == [lasting]


def test_cable_whose_link_is_not_up_yet_is_repaired_by_the_kernel_and_other_refusals_are_reported():
    words = ("bridge", "link", "set", "dev", "pafdf004", "state", "3")
    check_restored(Completed(words, 0))
    check_restored(Completed(words, 255, stderr="RTNETLINK answers: Network is down\n"))
    with pytest.raises(CommandFailed, match="bridge link set"):
        check_restored(Completed(words, 255, stderr='Cannot find device "pafdf004"\n'))
