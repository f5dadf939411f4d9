"""What a node says of its parts, whoever was asked: NVML, nvidia-smi, sysfs, or a simulated node's telemetry.

None means that it does not tell; the checks say so, and neither pass nor fail for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from dalsegno.errors import NotThere
from dalsegno.hardware import find_gpu

# What holds a clock down, in nvidia-smi's words.
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
    """One GPU now. Counters count since the last reset."""

    index: int
    uuid: str = ""
    serial: str = ""
    model: str = ""
    lost: bool = False  # the bus or the driver knows of it, and it does not answer
    temperature_c: float | None = None
    slowdown_c: float | None = None  # where the hardware begins to save itself
    clock_mhz: float | None = None
    max_clock_mhz: float | None = None
    throttle: tuple[str, ...] | None = None
    utilization_percent: float | None = None
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    remapped_rows: int | None = None  # for uncorrectable errors
    nvlinks: int | None = None  # that are up
    nvlink_errors: int | None = None  # recoveries and uncorrectable ones, not replays, of which some are normal
    pcie_width: int | None = None
    pcie_max_width: int | None = None  # of card and slot
    memory_total_mib: int | None = None
    memory_used_mib: int | None = None
    processes: tuple[GpuProcess, ...] | None = None
    divided: bool | None = None  # into parts (MIG), which keep some memory for themselves


@dataclass(frozen=True)
class LogLine:
    """A line of the kernel's log: when (seconds since 1970), how bad (0 to 7 as in syslog, 3 is an error), what."""

    at: float
    text: str
    level: int = 6


@dataclass(frozen=True)
class Port:
    """A port of the fabric. `flaps`: when it went down, seconds since 1970."""

    name: str  # "mlx5_0/1", "rdmap16s27/1"
    state: str = "ACTIVE"  # INIT, DOWN, …: as sysfs writes it, without its number
    kind: str = "ib"  # ib, efa, roce
    flaps: tuple[float, ...] = ()
    errors: Mapping[str, int] = field(default_factory=dict)  # counters by sysfs's name


# ---- How many NVLinks a GPU of a kind has when all of them are up.


_ONE_WAY_GBYTES_PER_S = {"NVLink 2": 25, "NVLink 3": 25, "NVLink 4": 25, "NVLink 5": 50}


def nvlinks_of(model: str) -> int:
    """By Slurm's type (h100) or the catalog's name; 0 for one without, or one that the catalog does not know."""
    try:
        gpu = find_gpu(model)
    except NotThere:
        return 0
    each = _ONE_WAY_GBYTES_PER_S.get(gpu.link)
    return round(gpu.link_gbytes_per_s / each) if each and gpu.link_gbytes_per_s else 0


# ---- What earlier looks have found: trends, processes that still wait, ports that went down. Lost with the
# process.


MOST_LINES = 2000
MOST_SAMPLES = 240


@dataclass(frozen=True)
class Sample:
    """A temperature at a time."""

    at: float
    celsius: float


@dataclass(frozen=True)
class Sent:
    """TCP segments since boot, and those that had to be sent again."""

    at: float
    segments: int
    again: int


@dataclass(frozen=True)
class WaitingProcess:
    """A process in one state since a time, without having run meanwhile."""

    pid: int
    name: str
    state: str  # D or Z
    since: float
    switches: str = ""  # context switches: a process that has run has another number


@dataclass
class SeenBefore:
    since: float = 0.0  # what the log says of before is mended: set it when the GPUs were reset
    log: deque[LogLine] = field(default_factory=lambda: deque(maxlen=MOST_LINES))
    heat: dict[str, deque[Sample]] = field(default_factory=dict)  # by a GPU's uuid
    waiting: dict[tuple[int, str], WaitingProcess] = field(default_factory=dict)  # by pid and start time
    downs: dict[str, int] = field(default_factory=dict)  # link_downed by port
    flaps: dict[str, tuple[float, ...]] = field(default_factory=dict)
    sent: deque[Sent] = field(default_factory=lambda: deque(maxlen=MOST_SAMPLES))
    active: set[str] = field(default_factory=set)  # ports that once were up, and so should be
    displays: dict[str, bool] = field(default_factory=dict)  # by a device's folder: whether it is a GPU of NVIDIA's

    def heat_of(self, uuid: str) -> deque[Sample]:
        return self.heat.setdefault(uuid, deque(maxlen=MOST_SAMPLES))
