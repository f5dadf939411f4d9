"""What a node says of its parts, whoever was asked: NVML, nvidia-smi, sysfs, or a simulated node's telemetry.

None means that it does not tell; the checks say so, and neither pass nor fail for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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
