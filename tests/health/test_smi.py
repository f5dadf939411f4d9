"""Tests of parsing the output of nvidia-smi."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dalsegno.health import Verdict
from dalsegno.health.check import Context
from dalsegno.health.checks import CHECKS
from dalsegno.health.expected import Expected
from dalsegno.health.facts import GpuFacts, GpuProcess
from dalsegno.health.node_reader import RecordedNode
from dalsegno.health.readers.gpus import gpus_on_bus, parse_link_errors, parse_links, parse_smi, read_smi
from dalsegno.health.runner import examine
from dalsegno.system.hanging_calls import NoAnswer

RECORDED = Path(__file__).parents[1] / "recorded" / "nvidia-smi-580"
XML = (RECORDED / "h200.xml").read_text()
FIRST, SECOND = "GPU-00000000-1111-2222-3333-444444444444", "GPU-55555555-1111-2222-3333-444444444444"
H200 = GpuFacts(
    0, FIRST, "1650000000000", "NVIDIA H200",
    temperature_c=36, slowdown_c=89, clock_mhz=345, max_clock_mhz=1980, throttle=(), utilization_percent=0,
    ecc_corrected=0, ecc_uncorrected=0, remap_pending=False, remap_failed=False, remapped_rows=0,
    pcie_width=16, pcie_max_width=16, memory_total_mib=143771, memory_used_mib=0, processes=(), divided=False,
    bus_id="00000000:00:06.0", memory_clock_mhz=3201, memory_temperature_c=35, memory_utilization_percent=0,
    encoder_percent=0, decoder_percent=0, power_w=77.64, pcie_replays=2, memory_free_mib=143156,
    memory_reserved_mib=616, rows_corrected=0,
)  # fmt: skip


def only(xml: str) -> GpuFacts:
    (gpu,) = parse_smi(xml)
    return gpu


def test_a_healthy_gpu_is_parsed() -> None:
    assert only(XML) == H200


def test_older_drivers_report_the_slowdown_temperature_directly() -> None:
    old = XML.replace("gpu_temp_tlimit>", "x>").replace(
        "<gpu_target_temperature>", "<gpu_temp_slow_threshold>87 C</gpu_temp_slow_threshold><gpu_target_temperature>"
    )
    assert (only(old).temperature_c, only(old).slowdown_c) == (36, 87)


def test_throttle_reasons_have_another_name_since_driver_535() -> None:
    hot = XML.replace("hw_thermal_slowdown>Not Active", "hw_thermal_slowdown>Active")
    assert only(hot).throttle == ("hw_thermal_slowdown",)
    assert only(hot.replace("clocks_event_reason", "clocks_throttle_reason")).throttle == ("hw_thermal_slowdown",)


def test_errors_are_summed_over_all_memories() -> None:
    bad = XML.replace("<sram_uncorrectable_parity>0", "<sram_uncorrectable_parity>1", 1)
    bad = bad.replace("<dram_uncorrectable>0", "<dram_uncorrectable>2", 1).replace(
        "<dram_correctable>0", "<dram_correctable>5", 1
    )
    assert (only(bad).ecc_uncorrected, only(bad).ecc_corrected) == (3, 5)


def test_unavailable_values_are_none() -> None:
    silent = XML.replace(">16x<", ">N/A<").replace(">36 C<", ">[N/A]<")
    assert (only(silent).pcie_width, only(silent).temperature_c) == (None, None)


def test_a_gpu_that_answers_with_errors_is_lost() -> None:
    assert only(XML.replace(">36 C<", ">Unknown Error<")).lost
    assert only(XML.replace("<gpu_util>0 %<", "<gpu_util>GPU is lost<")).lost


def test_processes_are_parsed() -> None:
    info = "<pid>7</pid><process_name>python</process_name><used_memory>512 MiB</used_memory>"
    busy = XML.replace("<processes>", f"<processes><process_info>{info}</process_info>", 1)
    assert only(busy).processes == (GpuProcess(7, "python", 512),)


@pytest.mark.parametrize("text", ["", "No devices were found", "<nvidia_smi_log><gpu", XML[:900]])
def test_garbage_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_smi(text)


def test_nvlinks_are_counted_per_gpu() -> None:
    assert parse_links((RECORDED / "nvlink-s.txt").read_text()) == {FIRST: 2, SECOND: 3}
    assert parse_link_errors((RECORDED / "nvlink-e.txt").read_text()) == {FIRST: 3, SECOND: 0}
    assert parse_links("rubbish\n") == {}


# A whole machine


@pytest.fixture
def machine(tmp_path: Path) -> RecordedNode:
    """A real machine with an H200 and no NVML."""
    for place, text in {"vendor": "0x10de\n", "class": "0x030200\n", "uevent": "DRIVER=nvidia\n"}.items():
        (tmp_path / "sys/bus/pci/devices/0000:00:06.0").mkdir(parents=True, exist_ok=True)
        (tmp_path / "sys/bus/pci/devices/0000:00:06.0" / place).write_text(text)
    (tmp_path / "commands").mkdir()
    shutil.copy(RECORDED / "h200.xml", tmp_path / "commands/nvidia-smi -q -x")
    shutil.copy(RECORDED / "nvlink-s.txt", tmp_path / "commands/nvidia-smi nvlink -s")
    return RecordedNode(tmp_path, Expected("here"))


def test_nvidia_smi_is_used_without_nvml(machine: RecordedNode) -> None:
    (gpu,) = read_smi(machine)
    assert (gpu.model, gpu.nvlinks, gpu.nvlink_errors) == ("NVIDIA H200", 2, None)
    about_gpus = [check for check in CHECKS if check.name.startswith(("gpu", "pcie"))]
    found = {each.check: each.result.verdict for each in examine(about_gpus, Context.IDLE, machine, {})}
    assert set(found.values()) == {Verdict.PASSED} and len(found) == 7


def test_a_gpu_on_the_bus_without_a_driver_counts_as_missing(machine: RecordedNode) -> None:
    shutil.copytree(
        machine.folder / "sys/bus/pci/devices/0000:00:06.0", machine.folder / "sys/bus/pci/devices/0000:00:07.0"
    )
    count = [check for check in CHECKS if check.name == "gpu-count"]
    (found,) = examine(count, Context.IDLE, machine, {})
    assert (found.result.verdict, found.result.text) == (Verdict.FAILED, "1 of 2 GPUs are present")


def test_a_gpu_passed_to_a_virtual_machine_does_not_count(machine: RecordedNode) -> None:
    (machine.folder / "sys/bus/pci/devices/0000:00:06.0/uevent").write_text("DRIVER=vfio-pci\n")
    assert examine([check for check in CHECKS if check.name == "gpu-count"], Context.IDLE, machine, {}) == []


def test_the_device_class_is_cached_and_the_driver_is_not(machine: RecordedNode) -> None:
    device = machine.folder / "sys/bus/pci/devices/0000:00:06.0"
    assert gpus_on_bus(machine) == 1
    (device / "vendor").unlink()
    (device / "uevent").write_text("DRIVER=vfio-pci\n")
    assert gpus_on_bus(machine) == 0
    (device / "uevent").write_text("DRIVER=nvidia\n")
    assert gpus_on_bus(machine) == 1


def test_a_missing_driver_is_unknown(machine: RecordedNode) -> None:
    (machine.folder / "commands/nvidia-smi -q -x").rename(machine.folder / "commands/nvidia-smi -q -x.exit9")
    (machine.folder / "commands/nvidia-smi -q -x.exit9").write_text("couldn't communicate with the NVIDIA driver.\n")
    with pytest.raises(NoAnswer, match="exited with code 9"):
        read_smi(machine)
