"""Read GPUs through NVIDIA's library, which takes a few milliseconds and no extra process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dalsegno.health.facts import (
    HW_POWER_BRAKE,
    HW_SLOWDOWN,
    HW_THERMAL,
    SW_POWER_CAP,
    SW_THERMAL,
    GpuFacts,
    GpuProcess,
)
from dalsegno.system.memory import compile_apart, give_back_cleared, give_back_freed

LIBRARY = "libnvidia-ml.so"
MIB = 1024 * 1024
MAX_LINKS = 18
SM_CLOCK, MEMORY_CLOCK = 1, 2
CORRECTED, UNCORRECTED, VOLATILE, SLOWDOWN = 0, 1, 0, 1
POWER_POLICY, THERMAL_POLICY = 0, 1  # reasons for reduced clocks whose times are counted
MEMORY_TEMPERATURE, UNSIGNED_INT = 82, 1  # a field, and the type of its value
RECOVERY, ECC_DATA = 1, 4  # kinds of NVLink errors
REASONS = {0x8: HW_SLOWDOWN, 0x40: HW_THERMAL, 0x80: HW_POWER_BRAKE, 0x20: SW_THERMAL, 0x4: SW_POWER_CAP}

MaxClocks = dict[str, int | None]  # UUID -> MHz; read once, because this query is the slowest: 2.4 of 3.8 ms on an H200


class Nvml:
    """The library. It is kept open, because opening it takes longer than a query."""

    def __init__(self) -> None:
        self._open = False
        self._max_clocks: MaxClocks = {}

    def read(self, detailed: bool = False) -> tuple[GpuFacts, ...] | None:
        """Return the GPUs; None if the library or driver is missing. nvidia-smi may then show why."""
        compile_apart("pynvml")  # compiling its 8,000 lines in this process would cost 5 MB
        try:
            import pynvml
        except ImportError:
            return None
        try:
            if not self._open:
                pynvml.nvmlInit()
                self._open = True
                give_back_freed()
                give_back_cleared(LIBRARY)  # releases 14 MB: a table for more GPUs than there are
            indexes = range(pynvml.nvmlDeviceGetCount())
            return tuple(read_gpu(pynvml, each, self._max_clocks, detailed=detailed) for each in indexes)
        except pynvml.NVMLError:
            self.close()
            return None

    def close(self) -> None:
        """Release the driver: GPUs cannot be reset while they are in use."""
        if self._open:
            import pynvml

            self._open = False
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()


def read_gpu(nvml: Any, index: int, max_clocks: MaxClocks, *, detailed: bool = False) -> GpuFacts:
    """Return the state of a GPU; if `detailed`, with the values that no check needs."""
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        uuid = _text(nvml.nvmlDeviceGetUUID(handle))
    except nvml.NVMLError:
        return GpuFacts(index, lost=True)

    def ask(name: str, *arguments: Any, wanted: Callable[[Any], Any] = lambda value: value) -> Any:
        """Return a value, or None if this GPU, driver or library version does not provide it."""
        try:
            return wanted(getattr(nvml, name)(handle, *arguments))
        except (nvml.NVMLError, AttributeError, TypeError):
            return None

    # The older call counts the driver's reserve as used: over 600 MiB on an idle H200.
    memory = ask("nvmlDeviceGetMemoryInfo", getattr(nvml, "nvmlMemory_v2", None))
    rows = ask("nvmlDeviceGetRemappedRows")
    links = [ask("nvmlDeviceGetNvLinkState", link) for link in range(MAX_LINKS)]
    reasons = ask("nvmlDeviceGetCurrentClocksEventReasons")
    if reasons is None:
        reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons")
    if max_clocks.get(uuid) is None:
        max_clocks[uuid] = ask("nvmlDeviceGetMaxClockInfo", SM_CLOCK)
    rates = ask("nvmlDeviceGetUtilizationRates")
    found = GpuFacts(
        index=index,
        uuid=uuid,
        serial=ask("nvmlDeviceGetSerial", wanted=_text) or "",
        model=ask("nvmlDeviceGetName", wanted=_text) or "",
        temperature_c=ask("nvmlDeviceGetTemperature", 0),
        slowdown_c=ask("nvmlDeviceGetTemperatureThreshold", SLOWDOWN),
        clock_mhz=ask("nvmlDeviceGetClockInfo", SM_CLOCK),
        max_clock_mhz=max_clocks[uuid],
        throttle=None if reasons is None else tuple(word for bit, word in REASONS.items() if reasons & bit),
        utilization_percent=rates.gpu if rates else None,
        ecc_corrected=ask("nvmlDeviceGetTotalEccErrors", CORRECTED, VOLATILE),
        ecc_uncorrected=ask("nvmlDeviceGetTotalEccErrors", UNCORRECTED, VOLATILE),
        remap_pending=bool(rows[2]) if rows else None,
        remap_failed=bool(rows[3]) if rows else None,
        remapped_rows=rows[1] if rows else None,
        nvlinks=None if all(link is None for link in links) else sum(link == 1 for link in links),
        nvlink_errors=_link_errors(ask, links),
        pcie_width=ask("nvmlDeviceGetCurrPcieLinkWidth"),
        pcie_max_width=ask("nvmlDeviceGetMaxPcieLinkWidth"),
        memory_total_mib=memory.total // MIB if memory else None,
        memory_used_mib=memory.used // MIB if memory else None,
        processes=ask("nvmlDeviceGetComputeRunningProcesses", wanted=_processes),
        divided=ask("nvmlDeviceGetMigMode", wanted=lambda modes: modes[0] == 1),
        rows_corrected=rows[0] if rows else None,
        memory_free_mib=memory.free // MIB if memory else None,
        memory_reserved_mib=memory.reserved // MIB if hasattr(memory, "reserved") else None,
        memory_utilization_percent=rates.memory if rates else None,
    )
    return _with_details(found, ask) if detailed else found


def _with_details(gpu: GpuFacts, ask: Callable[..., Any]) -> GpuFacts:
    """Add the values that only metrics show. They take 5 to 8 ms on an H200, more than all others together."""
    return replace(
        gpu,
        bus_id=ask("nvmlDeviceGetPciInfo", wanted=lambda pci: _text(pci.busId)) or "",
        memory_clock_mhz=ask("nvmlDeviceGetClockInfo", MEMORY_CLOCK),
        memory_temperature_c=ask("nvmlDeviceGetFieldValues", [MEMORY_TEMPERATURE], wanted=_field),
        encoder_percent=ask("nvmlDeviceGetEncoderUtilization", wanted=lambda found: found[0]),
        decoder_percent=ask("nvmlDeviceGetDecoderUtilization", wanted=lambda found: found[0]),
        power_w=ask("nvmlDeviceGetPowerUsage", wanted=lambda milliwatts: milliwatts / 1000),
        energy_mj=ask("nvmlDeviceGetTotalEnergyConsumption"),
        pcie_replays=ask("nvmlDeviceGetPcieReplayCounter"),
        power_violation_ns=ask("nvmlDeviceGetViolationStatus", POWER_POLICY, wanted=lambda told: told.violationTime),
        thermal_violation_ns=ask(
            "nvmlDeviceGetViolationStatus", THERMAL_POLICY, wanted=lambda told: told.violationTime
        ),
    )


def _field(values: Any) -> int | None:
    """Return the value of a field; None if the GPU does not provide it. Most GPUs do not provide the memory's
    temperature."""
    value = values[0]
    return int(value.value.uiVal) if value.nvmlReturn == 0 and value.valueType == UNSIGNED_INT else None


def _link_errors(ask: Callable[..., Any], links: list[int | None]) -> int | None:
    up = [number for number, link in enumerate(links) if link == 1]
    counts = [ask("nvmlDeviceGetNvLinkErrorCounter", link, kind) for link in up for kind in (RECOVERY, ECC_DATA)]
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _processes(running: list[Any]) -> tuple[GpuProcess, ...]:
    return tuple(GpuProcess(each.pid, "", (each.usedGpuMemory or 0) // MIB) for each in running)


def _text(value: str | bytes) -> str:
    """Decode text: older versions of the library return bytes."""
    return value.decode() if isinstance(value, bytes) else value
