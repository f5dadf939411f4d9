"""Facts about the parts of a node, from NVML, nvidia-smi, sysfs, or the telemetry of a simulated node.

None means that the value is not available. A check then reports that the value is missing, and neither passes nor
fails.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from dalsegno.errors import NotThere
from dalsegno.hardware import find_gpu

# Reasons for reduced clocks, named as in nvidia-smi.
HW_SLOWDOWN = "hw_slowdown"
HW_THERMAL = "hw_thermal_slowdown"
HW_POWER_BRAKE = "hw_power_brake_slowdown"
SW_THERMAL = "sw_thermal_slowdown"
SW_POWER_CAP = "sw_power_cap"


@dataclass(frozen=True)
class GpuProcess:
    pid: int
    name: str = ""
    memory_mib: int | None = None


@dataclass(frozen=True)
class GpuFacts:
    """The state of one GPU. Counters start at the last reset."""

    index: int
    uuid: str = ""
    serial: str = ""
    model: str = ""
    lost: bool = False  # whether the bus or the driver lists the GPU, but the GPU does not answer
    temperature_c: float | None = None
    slowdown_c: float | None = None  # temperature at which the hardware slows down
    clock_mhz: float | None = None
    max_clock_mhz: float | None = None
    throttle: tuple[str, ...] | None = None
    utilization_percent: float | None = None
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    remapped_rows: int | None = None  # rows remapped for uncorrectable errors
    nvlinks: int | None = None  # number of NVLinks that are up
    nvlink_errors: int | None = None  # recoveries and uncorrectable errors, without replays, which are normal
    pcie_width: int | None = None
    pcie_max_width: int | None = None  # the largest width that both card and slot support
    memory_total_mib: int | None = None
    memory_used_mib: int | None = None
    processes: tuple[GpuProcess, ...] | None = None
    divided: bool | None = None  # whether the GPU is divided into MIG instances, which reserve some memory
    # The values below are only for metrics; no check judges them.
    bus_id: str = ""  # PCI address, as NVML writes it: 00000000:41:00.0
    memory_clock_mhz: float | None = None
    memory_temperature_c: float | None = None
    memory_utilization_percent: float | None = None
    encoder_percent: float | None = None
    decoder_percent: float | None = None
    power_w: float | None = None
    energy_mj: int | None = None  # millijoules since the driver was loaded
    pcie_replays: int | None = None
    memory_free_mib: int | None = None
    memory_reserved_mib: int | None = None
    rows_corrected: int | None = None  # rows remapped for correctable errors
    power_violation_ns: int | None = None  # time with clocks reduced by the power limit
    thermal_violation_ns: int | None = None
    # Means of the GPU's performance counters since the last reading: fractions from 0 to 1, or bytes per second.
    graphics_active: float | None = None
    sm_active: float | None = None
    sm_occupancy: float | None = None
    tensor_active: float | None = None
    dram_active: float | None = None
    fp64_active: float | None = None
    fp32_active: float | None = None
    fp16_active: float | None = None
    pcie_tx_bytes_per_s: float | None = None
    pcie_rx_bytes_per_s: float | None = None
    nvlink_tx_bytes_per_s: float | None = None
    nvlink_rx_bytes_per_s: float | None = None


@dataclass(frozen=True)
class LogLine:
    """A line of the kernel log: its time (seconds since 1970), text, and syslog level (0 to 7, 3 is an error)."""

    at: float
    text: str
    level: int = 6


@dataclass(frozen=True)
class Port:
    """A fabric port. `flaps` are the times when it went down, seconds since 1970."""

    name: str  # for example "mlx5_0/1" or "rdmap16s27/1"
    state: str = "ACTIVE"  # the word in sysfs, such as INIT or DOWN
    kind: str = "ib"  # type of the network: ib, efa or roce
    flaps: tuple[float, ...] = ()
    errors: Mapping[str, int] = field(default_factory=dict)  # counters by sysfs's name


# Number of NVLinks of a GPU model


_ONE_WAY_GBYTES_PER_S = {"NVLink 2": 25, "NVLink 3": 25, "NVLink 4": 25, "NVLink 5": 50}


def nvlinks_of(model: str) -> int:
    """Return the number of NVLinks of a model, given as Slurm's type (h100) or catalog name; 0 if none or unknown."""
    try:
        gpu = find_gpu(model)
    except NotThere:
        return 0
    each = _ONE_WAY_GBYTES_PER_S.get(gpu.link)
    return round(gpu.link_gbytes_per_s / each) if each and gpu.link_gbytes_per_s else 0


# Earlier observations: trends, waiting processes, ports that went down. They are kept in memory only.


MAX_LINES = 2000
MAX_SAMPLES = 240


@dataclass(frozen=True)
class Sample:
    """A temperature, and when it was measured."""

    at: float
    celsius: float


@dataclass(frozen=True)
class TcpSegments:
    """TCP segments since boot, and how many were retransmissions."""

    at: float
    segments: int
    again: int


@dataclass(frozen=True)
class WaitingProcess:
    """A process that has been in one state for some time, without running in between."""

    pid: int
    name: str
    state: str  # the state as in /proc: D or Z
    since: float
    switches: str = ""  # number of context switches, which changes when the process runs


@dataclass
class SeenBefore:
    since: float = 0.0  # when the GPUs were reset; older log lines do not count
    log: deque[LogLine] = field(default_factory=lambda: deque(maxlen=MAX_LINES))
    heat: dict[str, deque[Sample]] = field(default_factory=dict)  # temperatures by GPU uuid
    waiting: dict[tuple[int, str], WaitingProcess] = field(default_factory=dict)  # processes by PID and start time
    downs: dict[str, int] = field(default_factory=dict)  # the last value of link_downed, by port
    flaps: dict[str, tuple[float, ...]] = field(default_factory=dict)
    sent: deque[TcpSegments] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES))
    active: set[str] = field(default_factory=set)  # ports that have been up, and should still be up
    # Silent NFS server -> since when it has been silent, and the number of checks since then.
    silences: dict[str, tuple[float, int]] = field(default_factory=dict)
    servers_silent: dict[str, float] = field(default_factory=dict)  # NFS server -> when it last did not answer
    servers_away: dict[str, float] = field(default_factory=dict)  # the same, only for servers that were silent for long
    displays: dict[str, bool] = field(default_factory=dict)  # device folder -> whether the device is an NVIDIA GPU

    def heat_of(self, uuid: str) -> deque[Sample]:
        return self.heat.setdefault(uuid, deque(maxlen=MAX_SAMPLES))
