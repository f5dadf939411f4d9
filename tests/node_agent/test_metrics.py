"""Tests of the metrics of a node: which facts give which samples."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from dalsegno.health.expected import Expected
from dalsegno.health.facts import GpuFacts, Port
from dalsegno.health.node_reader import RecordedNode
from dalsegno.health.readers.fabric import ask_port_counters
from dalsegno.health.telemetry import Telemetry, healthy, with_gpu, write_telemetry
from dalsegno.health.xids import XidEvent
from dalsegno.node_agent.metrics import (
    FAMILIES,
    XidCounts,
    bus_key,
    gpu_families,
    gpu_labels,
    port_families,
    status_families,
    xid_families,
)
from dalsegno.observe.exposition import Family, render

RECORDED = Path(__file__).parents[1] / "recorded" / "node-metrics"


def samples(families: Iterable[Family]) -> list[str]:
    return [line for line in render(families).decode().splitlines() if line and not line.startswith("#")]


def test_each_available_value_is_a_sample_under_the_name_of_dcgm() -> None:
    gpu = GpuFacts(
        3,
        "GPU-1",
        "",
        "NVIDIA H200",
        temperature_c=61.0,
        power_w=700.5,
        memory_used_mib=1024,
        bus_id="00000000:41:00.0",
    )
    own = (
        '{gpu="3",UUID="GPU-1",pci_bus_id="00000000:41:00.0",device="nvidia3",modelName="NVIDIA H200",'
        'Hostname="train-1",hostname="train-1"}'
    )
    assert samples(gpu_families([gpu], "train-1")) == [
        f"DCGM_FI_DEV_GPU_TEMP{own} 61",
        f"DCGM_FI_DEV_POWER_USAGE{own} 700.5",
        f"DCGM_FI_DEV_FB_USED{own} 1024",
    ]


def test_profiling_values_have_the_names_that_dashboards_query() -> None:
    gpu = GpuFacts(0, "GPU-1", tensor_active=0.62, nvlink_tx_bytes_per_s=1.5e9)
    own = '{gpu="0",UUID="GPU-1",pci_bus_id="",device="nvidia0",modelName="",Hostname="n",hostname="n"}'
    assert samples(gpu_families([gpu], "n")) == [
        f"DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{own} 0.62",
        f"DCGM_FI_PROF_NVLINK_TX_BYTES{own} 1500000000",
    ]


def test_a_value_of_zero_is_a_sample_and_a_missing_one_is_not() -> None:
    text = "\n".join(samples(gpu_families([GpuFacts(0, ecc_uncorrected=0, remap_failed=False)], "n")))
    assert "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL" in text and "DCGM_FI_DEV_ROW_REMAP_FAILURE" in text
    assert len(text.splitlines()) == 2


def test_a_lost_gpu_has_no_samples() -> None:
    telemetry = with_gpu(healthy("n", 2, "h100"), 1, lost=True)
    assert not any('gpu="1"' in line for line in samples(gpu_families(telemetry.gpus, "n")))


def test_simulated_gpus_have_all_metrics() -> None:
    names = [family.name for family in gpu_families(healthy("n", 1, "h100").gpus, "n")]
    assert names == [name for name, _ in FAMILIES]


def test_a_hostile_name_of_a_gpu_cannot_forge_a_sample() -> None:
    gpu = GpuFacts(0, 'x"} 1\nDCGM_FI_DEV_GPU_TEMP{gpu="7', temperature_c=30.0)
    assert len(samples(gpu_families([gpu], "n"))) == 1


def xid(code: int, at: float, gpu: str = "0000:41:00") -> XidEvent:
    return XidEvent(gpu, code, at, "")


def test_xids_stay_counted_when_the_log_loses_them() -> None:
    xids = XidCounts()
    xids.note([xid(31, 1.0), xid(31, 1.0), xid(79, 2.0)])
    xids.note([xid(31, 1.0), xid(31, 1.0), xid(79, 2.0)])
    assert xids.counts == {("0000:41:00", 31): 2, ("0000:41:00", 79): 1}
    xids.note([xid(31, 3.0)])
    xids.note([])
    assert xids.counts == {("0000:41:00", 31): 3, ("0000:41:00", 79): 1}
    xids.note([xid(31, 3.0), xid(31, 3.0)])
    assert xids.counts[("0000:41:00", 31)] == 4


def test_the_last_xid_stays_and_each_xid_is_counted_by_gpu() -> None:
    gpus = healthy("n", 2, "h100").gpus
    known = {bus_key(gpu.bus_id): gpu_labels(gpu, "n") for gpu in gpus}
    xids = XidCounts()
    xids.note([xid(79, 5.0, "0000:42:00"), xid(31, 4.0, "0000:42:00"), xid(48, 1.0, "0000:99:00")])
    lines = samples(xid_families(known, xids, "n"))
    last = [line for line in lines if line.startswith("DCGM_FI_DEV_XID_ERRORS{")]
    assert [line.rpartition(" ")[2] for line in last] == ["0", "79", "48"]
    assert 'gpu="0"' in last[0] and 'gpu="1"' in last[1] and 'err_code="79"' in last[1]
    assert 'gpu=""' in last[2] and 'pci_bus_id="0000:99:00"' in last[2]
    counts = [line for line in lines if line.startswith("DCGM_EXP_XID_ERRORS_COUNT{")]
    assert [line.rpartition("xid=")[2] for line in counts] == ['"31"} 1', '"79"} 1', '"48"} 1']


def test_pci_addresses_of_nvml_and_of_the_kernel_log_are_compared() -> None:
    assert bus_key("00000000:8D:00.0") == bus_key("0000:8d:00") == "0000:8d:00"
    assert bus_key("41:00.0") == "0000:41:00"


def test_efa_counters_have_the_names_of_its_exporter() -> None:
    lines = samples(port_families(ask_port_counters(RecordedNode(RECORDED / "efa", Expected("n")))))
    assert 'dalsegno_fabric_port_up{device="rdmap16s27",port="1",kind="efa"} 1' in lines
    assert 'node_amazonefa_info{device="rdmap32s27"} 1' in lines
    assert 'node_amazonefa_rx_drops{device="rdmap16s27",port="1"} 2' in lines
    assert 'node_amazonefa_tx_bytes{device="rdmap16s27",port="1"} 18446744073709551615' in lines
    assert not any("retrans_bytes" in line or "dalsegno_fabric_counter" in line for line in lines)


def test_infiniband_counters_come_from_both_folders() -> None:
    lines = samples(port_families(ask_port_counters(RecordedNode(RECORDED / "ib", Expected("n")))))
    assert 'dalsegno_fabric_port_up{device="mlx5_0",port="1",kind="ib"} 1' in lines
    assert 'dalsegno_fabric_port_up{device="mlx5_1",port="1",kind="roce"} 0' in lines
    assert 'dalsegno_fabric_counter{device="mlx5_0",port="1",counter="port_xmit_data"} 123456' in lines
    assert 'dalsegno_fabric_counter{device="mlx5_0",port="1",counter="out_of_sequence"} 5' in lines
    assert [line for line in lines if "mlx5_1" in line and "out_of_sequence" in line] == []


def test_a_simulated_port_shows_its_flaps_and_errors(tmp_path: Path) -> None:
    port = Port("sim0/1", "DOWN", flaps=(1.0, 2.0), errors={"symbol_error": 9})
    write_telemetry(tmp_path / "telemetry.json", replace(healthy("n", 1, "h100"), ports=(port,)))
    lines = samples(port_families(ask_port_counters(RecordedNode(tmp_path, Expected("n")))))
    assert 'dalsegno_fabric_port_up{device="sim0",port="1",kind="ib"} 0' in lines
    assert 'dalsegno_fabric_counter{device="sim0",port="1",counter="link_downed"} 2' in lines
    assert 'dalsegno_fabric_counter{device="sim0",port="1",counter="symbol_error"} 9' in lines
    assert 'dalsegno_fabric_counter{device="sim0",port="1",counter="port_rcv_errors"} 0' in lines


def test_a_node_without_gpus_and_ports_has_only_its_time_and_sources() -> None:
    assert samples(gpu_families(Telemetry("n").gpus, "n")) == samples(port_families(())) == []
    assert samples(status_families({"gpus": True, "fabric": False}, 1700000000.5)) == [
        "dalsegno_node_metrics_timestamp_seconds 1700000000.5",
        'dalsegno_node_metrics_success{source="gpus"} 1',
        'dalsegno_node_metrics_success{source="fabric"} 0',
    ]
