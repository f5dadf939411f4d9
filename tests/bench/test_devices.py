"""The verdict on single devices, the speed of folders, and the phases of a start."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dalsegno.bench.launch import PHASES, launch_times
from dalsegno.bench.launch import table_rows as launch_rows
from dalsegno.bench.node.devices import (
    DeviceAsk,
    DeviceResult,
    DeviceTest,
    JudgedDevice,
    judge_devices,
    read_results,
    table_rows,
    without_gpu,
)
from dalsegno.bench.node.storage_measure import FolderSpeed, compare, main, measure_folder, read_speeds
from dalsegno.bench.node.storage_measure import table_rows as storage_rows
from dalsegno.runs.journal import RunEvent


def gemm(value: float, device: str = "GPU 0", product: str = "NVIDIA H200", host: str = "gpu-1") -> DeviceResult:
    return DeviceResult(DeviceTest.GEMM, host, device, product, value, value * 1.1, "bfloat16")


def test_a_gpu_is_compared_with_the_peak_of_the_catalog():
    judged = judge_devices([gemm(742.0)])[0]
    assert judged.of_peak == pytest.approx(0.75, abs=0.01)  # 989 TFLOP/s


def test_a_core_and_other_data_types_have_no_peak():
    assert DeviceResult(DeviceTest.GEMM, "a", "CPU 0", "AMD EPYC", 0.1, 0.1, "float").peak is None
    assert DeviceResult(DeviceTest.GEMM, "a", "GPU 0", "NVIDIA H200", 50.0, 50.0, "float").peak is None
    assert DeviceResult(DeviceTest.MEMORY, "a", "GPU 0", "NVIDIA H200", 4000.0, 4000.0).peak == 4800


@given(st.integers(3, 64), st.data())
def test_exactly_the_slow_gpus_are_named(count: int, data):
    slow = data.draw(st.sets(st.integers(0, count - 1), max_size=(count - 1) // 2))
    shares = [data.draw(st.floats(0.95, 1.0)) for _ in range(count)]
    results = [gemm(700.0 * shares[at] * (0.6 if at in slow else 1.0), f"GPU {at:02d}") for at in range(count)]
    assert {at for at, each in enumerate(judge_devices(results)) if each.slow} == slow


def test_two_devices_are_not_compared_and_products_are_not_mixed():
    mixed = [gemm(700.0), gemm(300.0, "GPU 1"), gemm(60.0, "GPU 2", "NVIDIA L4"), gemm(61.0, "GPU 3", "NVIDIA L4")]
    assert not any(each.slow for each in judge_devices(mixed))


def test_results_are_read_among_warnings_of_libraries():
    text = f"some warning\n{gemm(1.0, 'GPU 1').to_json()}\n{{}}\n{gemm(2.0, 'GPU 0').to_json()}\n"
    found = read_results(text)
    assert [each.device for each in found] == ["GPU 0", "GPU 1"]
    assert table_rows(judge_devices(found))[0][:4] == ["gpu-1", "GPU 0", "NVIDIA H200", "gemm"]


def test_settings_of_devices_survive_json():
    ask = DeviceAsk(DeviceTest.MEMORY, size=1 << 20, seconds=0.5, device="cpu")
    assert DeviceAsk.from_json(ask.to_json()) == ask


# Storage


def test_a_folder_is_measured_and_left_as_it_was(tmp_path: Path):
    found = measure_folder(str(tmp_path), 4 << 20, 1.0)
    assert found.error == ""
    assert found.fstype
    assert min(found.write_mb_per_s, found.read_mb_per_s, found.files_per_s) > 0
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_used_has_a_reason(capsys: pytest.CaptureFixture[str]):
    assert main(['{"folders": ["/not/there"], "size": 1024, "seconds": 1}']) == 0
    assert read_speeds(capsys.readouterr().out)[0].error == "No such file or directory"


def test_shared_storage_is_compared_with_local_storage():
    fast = FolderSpeed("a", "/tmp", "ext4", 1000.0, 2000.0, 10000.0)
    slow = FolderSpeed("a", "/fsx", "lustre", 500.0, 1500.0, 100.0)
    assert compare([slow, fast]) == ["/fsx writes at 50%, reads at 75%, creates files at 1% of the speed of /tmp"]
    assert compare([fast]) == []
    slower = FolderSpeed("a", "/home", "nfs4", 100.0, 500.0, 100.0)
    assert compare([slow, slower, fast]) == [
        "the median of /fsx, /home writes at 30%, reads at 50%, creates files at 1% of the speed of /tmp"
    ]


def test_the_table_has_a_row_per_folder_with_the_slowest_node_and_the_sum():
    speeds = [FolderSpeed(host, "/fsx", "nfs4", write, 100.0, 50.0) for host, write in (("a", 80.0), ("b", 20.0))]
    assert storage_rows(speeds) == [
        ["/fsx", "nfs4 (shared)", "2", "50 MB/s", "100 MB/s", "50/s", "b 20 MB/s", "100 MB/s"]
    ]


# Start of a run


def test_the_phases_of_a_start_are_read_from_the_journal():
    times = {RunEvent.BEGAN: 10.5, RunEvent.GRANTED: 11.0, RunEvent.READY: 12.0, RunEvent.GENERATION: 15.0}
    entries = [{"at": at, "event": event.value} for event, at in times.items()]
    entries.insert(3, {"at": 14.5, "event": RunEvent.READY.value})  # the second agent is ready
    found = launch_times(10.0, entries, [15.2, 15.4], 16.0)
    assert found is not None
    assert [round(each, 3) for each in found.phases] == [0.5, 0.5, 3.5, 0.5, 0.4, 0.6]
    assert found.until_script == pytest.approx(5.4)
    assert [row[0] for row in launch_rows([found], [0.1])] == [
        *(name for name, _ in PHASES),
        "until script",
        "srun true",
    ]


def test_a_start_without_ranks_has_no_phases():
    assert launch_times(10.0, [{"at": 10.5, "event": RunEvent.BEGAN.value}], [], 11.0) is None


def test_too_few_devices_are_not_called_ok():
    def found(count: int, device: str) -> list[JudgedDevice]:
        return judge_devices(
            DeviceResult(DeviceTest.GEMM, f"n{index}", device, "x", 1.0, 1.0) for index in range(count)
        )

    assert {row[-1] for row in table_rows(found(2, "GPU 0"))} == {"not compared"}
    assert {row[-1] for row in table_rows(found(3, "GPU 0"))} == {"ok"}
    assert without_gpu([*found(1, "CPU 0"), *found(2, "GPU 0")]) == ["n0"]
