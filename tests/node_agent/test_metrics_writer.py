"""Tests of collecting the metrics of a node and writing them to a file."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

import pytest

from dalsegno.health.expected import Expected
from dalsegno.health.node_reader import Gpus, RecordedNode
from dalsegno.health.telemetry import healthy, with_gpu, with_line, write_telemetry, xid_line
from dalsegno.node_agent.metrics_writer import WRITE_S, NodeMetrics, is_served
from dalsegno.node_agent.textfile import NAME, STALE_S, TEMPORARY, Textfile
from dalsegno.observe.exposition import Family, render
from dalsegno.system.hanging_calls import NoAnswer, TooLate

TWO_GPUS = Expected("gpu-1", named=True, gpus=2, gpu_type="h100")
TCP = (
    "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
    "   0: 00000000:24B8 00000000:0000 0A 00000000:00000000 00:00000000 00000000 {uid:5d}        0 20 1 0 100 0\n"
)  # 0x24B8 is port 9400


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class HangingGpus(RecordedNode):
    """A node with real GPUs whose driver does not answer."""

    def nvml(self, detailed: bool = False) -> Gpus:
        raise TooLate("NVML gave no answer within 6 s")


def simulated(folder: Path) -> RecordedNode:
    telemetry = with_gpu(healthy("gpu-1", 2, "h100"), 1, temperature_c=96.0)
    telemetry = with_line(telemetry, 1699999990.0, xid_line(79, "GPU has fallen off the bus.", gpu=1))
    write_telemetry(folder / "telemetry.json", telemetry)
    return RecordedNode(folder, TWO_GPUS)


def writer(node: RecordedNode, folder: Path, clock: Clock | None = None) -> NodeMetrics:
    return NodeMetrics(node, "gpu-1", Textfile(folder), clock or Clock())


def text(families: Iterable[Family]) -> str:
    return render(families).decode()


def test_a_hot_gpu_and_its_xid_are_in_the_file(tmp_path: Path) -> None:
    (tmp_path / "node").mkdir()
    writer(simulated(tmp_path / "node"), tmp_path / "metrics").write_due()
    lines = (tmp_path / "metrics" / NAME).read_text().splitlines()
    (hot,) = [line for line in lines if line.startswith('DCGM_FI_DEV_GPU_TEMP{gpu="1"')]
    assert hot.endswith(" 96")
    (count,) = [line for line in lines if line.startswith("DCGM_EXP_XID_ERRORS_COUNT{")]
    assert 'gpu="1"' in count and count.endswith('xid="79"} 1')
    assert "dalsegno_node_metrics_timestamp_seconds 1700000000" in lines
    assert 'dalsegno_node_metrics_success{source="gpus"} 1' in lines


def test_the_file_is_written_every_few_seconds(tmp_path: Path) -> None:
    (tmp_path / "node").mkdir()
    clock = Clock()
    metrics = writer(simulated(tmp_path / "node"), tmp_path / "metrics", clock)
    metrics.write_due()
    (tmp_path / "metrics" / NAME).unlink()
    clock.now += WRITE_S - 0.1
    metrics.write_due()
    assert not (tmp_path / "metrics" / NAME).exists()
    clock.now += 0.2
    metrics.write_due()
    assert (tmp_path / "metrics" / NAME).exists()


def test_a_driver_that_hangs_hides_only_the_gpus(tmp_path: Path) -> None:
    port = tmp_path / "sys/class/infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    found = text(writer(HangingGpus(tmp_path, TWO_GPUS), tmp_path / "metrics").collect())
    assert "DCGM_FI_DEV_GPU_TEMP" not in found and "dalsegno_fabric_port_up" in found
    assert 'dalsegno_node_metrics_success{source="gpus"} 0' in found
    assert 'dalsegno_node_metrics_success{source="fabric"} 1' in found


def test_names_of_dcgm_are_left_to_its_exporter(tmp_path: Path) -> None:
    (tmp_path / "proc/net").mkdir(parents=True)
    (tmp_path / "proc/net/tcp").write_text(TCP.format(uid=0))
    found = text(writer(HangingGpus(tmp_path, TWO_GPUS), tmp_path / "metrics").collect())
    assert "DCGM" not in found and 'success{source="gpus"} 1' in found


def test_simulated_gpus_are_shown_even_if_the_machine_runs_dcgm(tmp_path: Path) -> None:
    (tmp_path / "proc/net").mkdir(parents=True)
    (tmp_path / "proc/net/tcp").write_text(TCP.format(uid=0))
    assert "DCGM_FI_DEV_GPU_TEMP" in text(writer(simulated(tmp_path), tmp_path / "metrics").collect())


def test_a_user_who_listens_on_the_port_of_dcgm_hides_nothing() -> None:
    assert is_served(TCP.format(uid=0), 9400) and is_served(TCP.format(uid=998), 9400)
    assert not is_served(TCP.format(uid=1000), 9400)
    assert not is_served(TCP.format(uid=0), 9100) and not is_served("", 9400)


def test_a_damaged_answer_hides_only_its_source(tmp_path: Path) -> None:
    (tmp_path / "telemetry.json").write_text("{}")
    found = text(writer(RecordedNode(tmp_path, TWO_GPUS), tmp_path / "metrics").collect())
    assert 'success{source="gpus"} 0' in found and "dalsegno_node_metrics_timestamp_seconds" in found
    with pytest.raises(NoAnswer):
        HangingGpus(tmp_path, TWO_GPUS).nvml()


def test_the_file_is_replaced_as_a_whole_and_readable_by_all(tmp_path: Path) -> None:
    file = Textfile(tmp_path / "metrics")
    before = os.umask(0o077)
    try:
        file.write(b"a 1\n")
        (tmp_path / "metrics" / TEMPORARY).write_text("of a killed process")
        file.write(b"a 2\n")
    finally:
        os.umask(before)
    assert (tmp_path / "metrics" / NAME).read_bytes() == b"a 2\n"
    assert stat.S_IMODE((tmp_path / "metrics" / NAME).stat().st_mode) == 0o644
    assert stat.S_IMODE((tmp_path / "metrics").stat().st_mode) == 0o755
    assert os.listdir(tmp_path / "metrics") == [NAME]


def test_nothing_is_written_into_a_folder_that_others_can_change(tmp_path: Path) -> None:
    folder = tmp_path / "metrics"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(OSError):
        Textfile(folder).write(b"a 1\n")
    node = tmp_path / "node"
    node.mkdir()
    writer(simulated(node), folder).write_due()  # the error is logged and is not a fault of the node
    assert os.listdir(folder) == []


def test_a_link_in_the_place_of_the_file_is_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("keep")
    (tmp_path / "metrics").mkdir()
    for name in (NAME, TEMPORARY):
        (tmp_path / "metrics" / name).symlink_to(secret)
    Textfile(tmp_path / "metrics").write(b"a 1\n")
    assert secret.read_text() == "keep" and not (tmp_path / "metrics" / NAME).is_symlink()


def test_a_file_that_nobody_writes_any_more_is_removed(tmp_path: Path) -> None:
    file = Textfile(tmp_path)
    file.write(b"a 1\n")
    written = (tmp_path / NAME).stat().st_mtime
    file.remove_stale(written + STALE_S - 1)
    assert (tmp_path / NAME).exists()
    file.remove_stale(written + STALE_S + 1)
    assert not (tmp_path / NAME).exists()
    file.remove_stale(written)
    file.remove()
