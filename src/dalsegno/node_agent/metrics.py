"""Build the metric families of a node's GPUs and fabric ports. Pure.

GPU metrics have the names that DCGM uses. Counters of EFA ports have the names that the EFA exporter uses. If a value
is not available, its sample is left out, because a zero would look like a measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from dalsegno.health.facts import GpuFacts
from dalsegno.health.readers.fabric import PortCounters
from dalsegno.health.xids import XidEvent, meaning
from dalsegno.observe.exposition import MetricFamily, MetricType, gauge, labelled

# GPUs. Help texts give DCGM's units.


@dataclass(frozen=True)
class GpuMetric:
    """A DCGM metric, and the function that returns its value for a GPU."""

    name: str
    help: str
    value: Callable[[GpuFacts], float | None]
    type: MetricType = MetricType.GAUGE


_COUNTER = MetricType.COUNTER
GPU_METRICS = (
    GpuMetric("SM_CLOCK", "SM clock frequency (in MHz).", lambda gpu: gpu.clock_mhz),
    GpuMetric("MEM_CLOCK", "Memory clock frequency (in MHz).", lambda gpu: gpu.memory_clock_mhz),
    GpuMetric("MEMORY_TEMP", "Memory temperature (in C).", lambda gpu: gpu.memory_temperature_c),
    GpuMetric("GPU_TEMP", "GPU temperature (in C).", lambda gpu: gpu.temperature_c),
    GpuMetric("SLOWDOWN_TEMP", "Temperature at which the GPU slows down (in C).", lambda gpu: gpu.slowdown_c),
    GpuMetric("POWER_USAGE", "Power draw (in W).", lambda gpu: gpu.power_w),
    GpuMetric(
        "TOTAL_ENERGY_CONSUMPTION", "Energy since the driver was loaded (in mJ).", lambda gpu: gpu.energy_mj, _COUNTER
    ),
    GpuMetric("PCIE_REPLAY_COUNTER", "PCIe retries.", lambda gpu: gpu.pcie_replays, _COUNTER),
    GpuMetric("GPU_UTIL", "GPU utilization (in %).", lambda gpu: gpu.utilization_percent),
    GpuMetric("MEM_COPY_UTIL", "Memory utilization (in %).", lambda gpu: gpu.memory_utilization_percent),
    GpuMetric("ENC_UTIL", "Encoder utilization (in %).", lambda gpu: gpu.encoder_percent),
    GpuMetric("DEC_UTIL", "Decoder utilization (in %).", lambda gpu: gpu.decoder_percent),
    GpuMetric("FB_FREE", "Free memory (in MiB).", lambda gpu: gpu.memory_free_mib),
    GpuMetric("FB_USED", "Used memory (in MiB).", lambda gpu: gpu.memory_used_mib),
    GpuMetric("FB_RESERVED", "Memory reserved by the driver (in MiB).", lambda gpu: gpu.memory_reserved_mib),
    GpuMetric(
        "UNCORRECTABLE_REMAPPED_ROWS",
        "Rows remapped for uncorrectable errors.",
        lambda gpu: gpu.remapped_rows,
        _COUNTER,
    ),
    GpuMetric(
        "CORRECTABLE_REMAPPED_ROWS", "Rows remapped for correctable errors.", lambda gpu: gpu.rows_corrected, _COUNTER
    ),
    GpuMetric("ROW_REMAP_FAILURE", "1 if remapping a row has failed.", lambda gpu: _as_number(gpu.remap_failed)),
    GpuMetric(
        "ROW_REMAP_PENDING", "1 if a row is remapped at the next reset.", lambda gpu: _as_number(gpu.remap_pending)
    ),
    GpuMetric("ECC_SBE_VOL_TOTAL", "Single-bit errors since the last reset.", lambda gpu: gpu.ecc_corrected, _COUNTER),
    GpuMetric(
        "ECC_DBE_VOL_TOTAL", "Double-bit errors since the last reset.", lambda gpu: gpu.ecc_uncorrected, _COUNTER
    ),
    GpuMetric(
        "POWER_VIOLATION", "Time slowed down by the power limit (in ns).", lambda gpu: gpu.power_violation_ns, _COUNTER
    ),
    GpuMetric("THERMAL_VIOLATION", "Time slowed down by heat (in ns).", lambda gpu: gpu.thermal_violation_ns, _COUNTER),
)
# Metrics with DCGM's prefix for profiling. Only GPUs from Hopper on have these counters.
PROFILING_METRICS = (
    GpuMetric("GR_ENGINE_ACTIVE", "Share of time in which any part computed.", lambda gpu: gpu.graphics_active),
    GpuMetric("SM_ACTIVE", "Share of time in which an SM had work, mean of all SMs.", lambda gpu: gpu.sm_active),
    GpuMetric("SM_OCCUPANCY", "Resident warps as a share of the most possible.", lambda gpu: gpu.sm_occupancy),
    GpuMetric("PIPE_TENSOR_ACTIVE", "Share of time in which tensor cores were active.", lambda gpu: gpu.tensor_active),
    GpuMetric("DRAM_ACTIVE", "Share of time in which the memory sent or received.", lambda gpu: gpu.dram_active),
    GpuMetric("PIPE_FP64_ACTIVE", "Share of time in which FP64 pipes were active.", lambda gpu: gpu.fp64_active),
    GpuMetric("PIPE_FP32_ACTIVE", "Share of time in which FP32 pipes were active.", lambda gpu: gpu.fp32_active),
    GpuMetric("PIPE_FP16_ACTIVE", "Share of time in which FP16 pipes were active.", lambda gpu: gpu.fp16_active),
    GpuMetric("PCIE_TX_BYTES", "Sent over PCIe (in bytes/s).", lambda gpu: gpu.pcie_tx_bytes_per_s),
    GpuMetric("PCIE_RX_BYTES", "Received over PCIe (in bytes/s).", lambda gpu: gpu.pcie_rx_bytes_per_s),
    GpuMetric("NVLINK_TX_BYTES", "Sent over NVLink (in bytes/s).", lambda gpu: gpu.nvlink_tx_bytes_per_s),
    GpuMetric("NVLINK_RX_BYTES", "Received over NVLink (in bytes/s).", lambda gpu: gpu.nvlink_rx_bytes_per_s),
)
FAMILIES = (
    *((f"DCGM_FI_DEV_{metric.name}", metric) for metric in GPU_METRICS),
    *((f"DCGM_FI_PROF_{metric.name}", metric) for metric in PROFILING_METRICS),
)
GPU_LABELS = ("gpu", "UUID", "pci_bus_id", "device", "modelName", "Hostname", "hostname")
GpuLabels = tuple[str, ...]
Samples = dict[tuple[str, ...], float]  # the labels' values -> the sample


def _as_number(value: bool | None) -> int | None:
    return None if value is None else int(value)


def gpu_labels(gpu: GpuFacts, host: str) -> GpuLabels:
    """Return the values of GPU_LABELS. dcgm-exporter has renamed `Hostname` to `hostname`; dashboards query both."""
    return (str(gpu.index), gpu.uuid, gpu.bus_id, f"nvidia{gpu.index}", gpu.model, host, host)


def gpu_families(gpus: Sequence[GpuFacts], host: str) -> list[MetricFamily]:
    """Return the metrics of all GPUs that answer."""
    labels = [(gpu, gpu_labels(gpu, host)) for gpu in gpus if not gpu.lost]
    families = []
    for name, metric in FAMILIES:
        found = ((key, metric.value(gpu)) for gpu, key in labels)
        values: Samples = {key: value for key, value in found if value is not None}
        families.append(labelled(name, metric.help, GPU_LABELS, values, metric.type))
    return [family for family in families if family.values]


# Xids, from the kernel log


@dataclass
class XidCounts:
    """The Xids of each GPU so far. The log may lose old lines, but the counts never decrease."""

    counts: dict[tuple[str, int], int] = field(default_factory=dict)  # number of events by GPU (`bus_key`) and Xid
    last: dict[str, XidEvent] = field(default_factory=dict)  # the last Xid by GPU
    # For each GPU and Xid, the time of the newest counted event, and how many counted events have that time.
    _newest: dict[tuple[str, int], tuple[float, int]] = field(default_factory=dict)

    def note(self, events: Iterable[XidEvent]) -> None:
        """Count the events that are new. `events` are all that the log still has."""
        groups: dict[tuple[str, int], list[XidEvent]] = {}
        for event in events:
            gpu = bus_key(event.gpu)
            groups.setdefault((gpu, event.xid), []).append(event)
            if gpu not in self.last or event.at >= self.last[gpu].at:
                self.last[gpu] = event
        for key, group in groups.items():
            at, counted = self._newest.get(key, (0.0, 0))
            new = sum(event.at > at for event in group) + max(sum(event.at == at for event in group) - counted, 0)
            newest = max(event.at for event in group)
            if new:
                self.counts[key] = self.counts.get(key, 0) + new
                self._newest[key] = newest, sum(event.at == newest for event in group)


def bus_key(address: str) -> str:
    """Return a PCI address as the driver logs it, `0000:41:00`: NVML writes `00000000:41:00.0`."""
    parts = address.lower().partition(".")[0].split(":")
    return ":".join([parts[0][-4:], *parts[1:]]) if len(parts) == 3 else ":".join(["0000", *parts])


def xid_families(known: Mapping[str, GpuLabels], xids: XidCounts, host: str) -> list[MetricFamily]:
    """Return the last Xid of each GPU, and the count of each Xid. `known` are the labels of GPUs by `bus_key`.

    A GPU that fell off the bus before it was ever read is labelled only with its PCI address.
    """

    def labels(gpu: str) -> GpuLabels:
        return known.get(gpu, ("", "", gpu, "", "", host, host))

    last: Samples = {}
    for gpu in sorted({*known, *xids.last}):
        event = xids.last.get(gpu)
        code, text = (str(event.xid), meaning(event.xid)) if event else ("0", "No Error")
        key = (*labels(gpu), code, text)
        last[key] = event.xid if event else 0
    counts: Samples = {(*labels(gpu), str(xid)): count for (gpu, xid), count in sorted(xids.counts.items())}
    names = (*GPU_LABELS, "err_code", "err_msg")
    about = "Xids in the kernel log since boot or the last reset of the GPUs."
    families = [
        labelled("DCGM_FI_DEV_XID_ERRORS", "Last Xid of the GPU; it stays until the next one.", names, last),
        labelled("DCGM_EXP_XID_ERRORS_COUNT", about, (*GPU_LABELS, "xid"), counts, MetricType.COUNTER),
    ]
    return [family for family in families if family.values]


# Counters of fabric ports


EFA = "node_amazonefa_"


def port_families(ports: Sequence[PortCounters]) -> list[MetricFamily]:
    """Return the state and counters of all ports. EFA counters have the names that the EFA exporter uses."""
    up: Samples = {(each.device, each.port, each.kind): int(each.up) for each in ports if each.up is not None}
    counters: Samples = {
        (each.device, each.port, name): count
        for each in ports
        if each.kind != "efa"
        for name, count in each.counters.items()
    }
    about = "Counter of a port, as in sysfs: port_rcv_data and port_xmit_data count words of 4 bytes."
    families = [
        labelled("dalsegno_fabric_port_up", "1 if the port is active.", ("device", "port", "kind"), up),
        labelled("dalsegno_fabric_counter", about, ("device", "port", "counter"), counters, MetricType.COUNTER),
        *_efa_families([each for each in ports if each.kind == "efa"]),
    ]
    return [family for family in families if family.values]


def _efa_families(ports: Sequence[PortCounters]) -> list[MetricFamily]:
    devices: Samples = {(each.device,): 1 for each in ports}
    families = [labelled(f"{EFA}info", "An EFA device; always 1.", ("device",), devices)]
    for name in sorted({name for each in ports for name in each.counters}):
        values: Samples = {(each.device, each.port): each.counters[name] for each in ports if name in each.counters}
        about = f"Counter {name} of an EFA device."
        families.append(labelled(f"{EFA}{name}", about, ("device", "port"), values, MetricType.COUNTER))
    return families


def status_families(success: Mapping[str, bool], now: float) -> list[MetricFamily]:
    """Return two metrics: the time `now` of the collection, and whether each source answered."""
    answered: Samples = {(source,): int(ok) for source, ok in success.items()}
    about = "1 if the source answered; 0: its series are absent."
    return [
        gauge("dalsegno_node_metrics_timestamp_seconds", "When the node's metrics were collected.", now),
        labelled("dalsegno_node_metrics_success", about, ("source",), answered),
    ]
