"""What faults do to a node's telemetry, and which remedy ends which of them: no cluster needed."""

import os
from pathlib import Path
from typing import Any

import pytest

from dalsegno.errors import CommandFailed
from dalsegno.health.facts import GpuFacts
from dalsegno.health.result import Remedy
from dalsegno.health.telemetry import Telemetry, read_telemetry
from dalsegno.system.children import start_ticks
from dalsegno.system.processes import Completed
from dalsegno.targets.faults import FAULTS
from dalsegno.targets.local.breaking.doing import clear
from dalsegno.targets.local.breaking.hardware import CHANGES, tell, with_faults
from dalsegno.targets.local.breaking.kinds import KINDS
from dalsegno.targets.local.breaking.network import check_mended, drop_program
from dalsegno.targets.local.breaking.records import HISTORY, Injected, forget, injected_into, note, remember, remembered
from dalsegno.targets.local.machine_room import mend
from dalsegno.targets.local.nodes import LocalNodes
from dalsegno.targets.local.placement import healthy_node
from tests.local.sites import folder_of, nodes_of
from tests.local.test_desired import cluster

HEALTHY = healthy_node(cluster(1).nodes[0], simulated=True)


def after(fault: str, **options: Any) -> Telemetry:
    return with_faults(HEALTHY, [Injected(fault, "train-1", 1000.0, "m", options)])


def gpu(telemetry: Telemetry, index: int = 0) -> GpuFacts:
    return next(each for each in telemetry.gpus if each.index == index)


def test_a_worker_that_hung_and_was_ended_hangs_no_more(tmp_path: Path):
    folder, own = folder_of(tmp_path), os.getpid()
    for node, start in (("train-1", start_ticks(own)), ("train-2", 1)):  # of train-2's, another process has the PID now
        note(folder, "worker-hang", node, {}, {"pid": own, "start": start})
    assert [one.fault for one in injected_into(folder, "train-1")] == ["worker-hang"]
    assert injected_into(folder, "train-2") == []


def test_what_was_ever_injected_is_remembered(tmp_path: Path):
    nodes = nodes_of(tmp_path)
    note(nodes.folder, "gpu-lost", "train-1", {})
    remember(nodes.folder, "train-1", "gpu-lost is injected", 5.0)
    with (nodes.folder.faults("train-1") / HISTORY).open("a") as file:
        file.write("[12, \n")
    clear(nodes, "train-1")
    assert injected_into(nodes.folder, "train-1") == []
    said = [what for _, what in remembered(nodes.folder, "train-1")]
    assert said == ["gpu-lost is injected", "gpu-lost is undone"]


def test_an_xid_is_a_line_in_the_kernels_log():
    told = after("xid", code=48, gpu=1)
    (line,) = told.kernel_log
    assert (line.at, line.text) == (
        1000.0,
        "NVRM: Xid (PCI:0000:42:00): 48, pid=4242, DBE (double bit error) ECC Error",
    )
    assert told.gpus == HEALTHY.gpus


def test_a_gpu_that_fell_off_the_bus_does_not_answer_any_more():
    told = after("xid", code=79, gpu=1)
    assert [each.lost for each in told.gpus] == [False, True]


@pytest.mark.parametrize(
    ("fault", "of", "before", "then"),
    [
        ("ecc", lambda told: gpu(told).ecc_uncorrected, 0, 1),
        ("gpu-lost", lambda told: len(told.gpus), 2, 1),
        ("gpu-hot", lambda told: gpu(told).temperature_c, 34, 96),
        ("nvlink", lambda told: gpu(told).nvlinks, 18, 17),
        ("slow-gpu", lambda told: gpu(told).clock_mhz, 345, 660),
        ("clock-skew", lambda told: told.clock_skew_s, 0, 300),
        ("link-down", lambda told: told.ports[0].state, "ACTIVE", "DOWN"),
        ("link-flap", lambda told: told.ports[0].flaps, (), (1000, 1001, 1002)),
        ("oom", lambda told: len(told.kernel_log), 0, 1),
    ],
)
def test_what_the_hardware_tells(fault: str, of: Any, before: object, then: object):
    assert (of(HEALTHY), of(after(fault))) == (before, then)


def test_every_fault_is_done_somehow():
    at_once = {"power-off", "worker-kill", "bad-replacement"}
    assert set(FAULTS) == at_once | set(KINDS) | set(CHANGES)


def test_faults_are_undone_in_any_order(tmp_path: Path):
    nodes = nodes_of(tmp_path)
    hot = note(nodes.folder, "gpu-hot", "train-1", {})
    ecc = note(nodes.folder, "ecc", "train-1", {})
    assert [one.fault for one in injected_into(nodes.folder, "train-1")] == ["gpu-hot", "ecc"]
    forget(nodes.folder, hot)
    tell(nodes.folder, nodes.node("train-1"), True)
    told = read_telemetry(nodes.folder.telemetry("train-1"))
    assert (gpu(told).temperature_c, gpu(told).ecc_uncorrected) == (34, 1)
    forget(nodes.folder, ecc)
    tell(nodes.folder, nodes.node("train-1"), True)
    assert read_telemetry(nodes.folder.telemetry("train-1")) == HEALTHY


def test_a_fault_that_took_anothers_place_is_not_forgotten_with_it(tmp_path: Path):
    nodes = nodes_of(tmp_path)
    first = note(nodes.folder, "ecc", "train-1", {})
    second = note(nodes.folder, "ecc", "train-1", {"count": 3})
    forget(nodes.folder, first)
    assert injected_into(nodes.folder, "train-1") == [second]


def left_after(nodes: LocalNodes, remedy: Remedy) -> list[str]:
    mend(nodes, "train-1", remedy)
    return [one.fault for one in injected_into(nodes.folder, "train-1")]


def test_a_remedy_ends_what_it_helps_against_and_what_less_would(tmp_path: Path):
    nodes = nodes_of(tmp_path)
    for fault, depth in (("ecc", "reset"), ("gpu-lost", "reboot"), ("slow-gpu", "replace"), ("net-cut", "reboot")):
        note(nodes.folder, fault, "train-1", {"mended_by": depth})
    assert left_after(nodes, Remedy.RESET) == ["gpu-lost", "slow-gpu", "net-cut"]
    assert left_after(nodes, Remedy.REBOOT) == ["slow-gpu"]
    assert left_after(nodes, Remedy.REPLACE) == []


def test_a_bad_replacement_is_bad_as_often_as_was_said(tmp_path: Path):
    nodes = nodes_of(tmp_path)
    note(nodes.folder, "bad-replacement", "train-1", {"count": 2})
    assert left_after(nodes, Remedy.REBOOT) == ["bad-replacement"]
    assert set(left_after(nodes, Remedy.REPLACE)) == {"ecc", "bad-replacement"}
    assert left_after(nodes, Remedy.REPLACE) == ["ecc"]
    assert left_after(nodes, Remedy.REPLACE) == []


def test_a_replacement_may_bring_the_old_gpus_back(tmp_path: Path):
    nodes = nodes_of(tmp_path)
    note(nodes.folder, "bad-replacement", "train-1", {"same": True})
    assert left_after(nodes, Remedy.REPLACE) == [], "nothing is wrong with it but that it is the same"


def test_the_packets_to_drop_are_a_share_of_all_numbers():
    assert drop_program(25) == "4,32 0 0 4294963256,37 0 1 1073741824,6 0 0 4294967295,6 0 0 2"
    assert "37 0 1 4294967295" in drop_program(100)


def test_a_cable_whose_link_is_not_up_yet_is_mended_by_the_kernel_and_any_other_refusal_is_told():
    words = ("bridge", "link", "set", "dev", "pafdf004", "state", "3")
    check_mended(Completed(words, 0))
    check_mended(Completed(words, 255, stderr="RTNETLINK answers: Network is down\n"))
    with pytest.raises(CommandFailed, match="bridge link set"):
        check_mended(Completed(words, 255, stderr='Cannot find device "pafdf004"\n'))
