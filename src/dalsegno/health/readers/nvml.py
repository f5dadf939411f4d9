"""Read GPUs through NVIDIA's library NVML. This takes a few milliseconds and needs no separate process."""

from __future__ import annotations

import contextlib
import math
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
POWER_POLICY, THERMAL_POLICY = 0, 1  # NVML's numbers of the reasons for reduced clocks
MEMORY_TEMPERATURE, UNSIGNED_INT = 82, 1  # NVML's numbers of a field and of the type of its value
RECOVERY, ECC_DATA = 1, 4  # NVML's numbers of the kinds of NVLink errors
REASONS = {0x8: HW_SLOWDOWN, 0x40: HW_THERMAL, 0x80: HW_POWER_BRAKE, 0x20: SW_THERMAL, 0x4: SW_POWER_CAP}

MaxClocks = dict[str, int | None]  # UUID -> MHz; read only once, because this query takes 2.4 of 3.8 ms on an H200


# The fields of GpuFacts that performance counters (GPM) give: for each, the counter's number, and the factor that
# converts to its unit.
PERCENT, MIB_PER_S = 0.01, float(MIB)
COUNTERS: dict[str, tuple[int, float]] = {
    "graphics_active": (1, PERCENT),
    "sm_active": (2, PERCENT),
    "sm_occupancy": (3, PERCENT),
    "tensor_active": (5, PERCENT),
    "dram_active": (10, PERCENT),
    "fp64_active": (11, PERCENT),
    "fp32_active": (12, PERCENT),
    "fp16_active": (13, PERCENT),
    "pcie_tx_bytes_per_s": (20, MIB_PER_S),
    "pcie_rx_bytes_per_s": (21, MIB_PER_S),
    "nvlink_rx_bytes_per_s": (60, MIB_PER_S),
    "nvlink_tx_bytes_per_s": (61, MIB_PER_S),
}


class PerformanceCounters:
    """The last sample of each GPU's performance counters. Values are means between two samples.

    Only GPUs from Hopper on have these counters. Unlike the counters of older GPUs, they can be read by several
    programs at a time.
    """

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._samples: dict[str, Any] = {}  # UUID -> sample; None if the GPU has no counters

    def read(self, handle: Any, uuid: str) -> dict[str, Any]:
        """Return the means since the last call, as fields of GpuFacts; empty at the first call for a GPU, and for GPUs
        without counters."""
        try:
            if uuid not in self._samples:
                supported = self._nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice
                self._samples[uuid] = self._sample(handle) if supported else None
                return {}
            before = self._samples[uuid]
            if before is None:
                return {}
            self._samples[uuid] = now = self._sample(handle)
            try:
                return self._means(before, now)
            finally:
                self._nvml.nvmlGpmSampleFree(before)
        except (self._nvml.NVMLError, AttributeError, TypeError):  # an old library or driver, or a lost GPU
            return {}

    def close(self) -> None:
        """Free all samples, which become invalid when the connection to the driver is closed."""
        for sample in self._samples.values():
            if sample is not None:
                with contextlib.suppress(self._nvml.NVMLError):
                    self._nvml.nvmlGpmSampleFree(sample)
        self._samples.clear()

    def _sample(self, handle: Any) -> Any:
        sample = self._nvml.nvmlGpmSampleAlloc()
        try:
            self._nvml.nvmlGpmSampleGet(handle, sample)
        except self._nvml.NVMLError:
            self._nvml.nvmlGpmSampleFree(sample)
            raise
        return sample

    def _means(self, before: Any, now: Any) -> dict[str, float]:
        request = self._nvml.c_nvmlGpmMetricsGet_t()
        request.version = self._nvml.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = len(COUNTERS)
        request.sample1, request.sample2 = before, now
        for slot, (number, _) in enumerate(COUNTERS.values()):
            request.metrics[slot].metricId = number
        self._nvml.nvmlGpmMetricsGet(request)
        found = {}
        for slot, (name, (_, factor)) in enumerate(COUNTERS.items()):
            metric = request.metrics[slot]
            if metric.nvmlReturn == 0 and math.isfinite(metric.value):
                found[name] = float(metric.value) * factor
        return found


class Nvml:
    """NVIDIA's library. The connection to it is kept open, because opening it takes longer than a query."""

    def __init__(self) -> None:
        self._open = False
        self._counters: PerformanceCounters | None = None
        self._max_clocks: MaxClocks = {}

    def read(self, detailed: bool = False) -> tuple[GpuFacts, ...] | None:
        """Return the GPUs; None if the library or driver is missing or fails. nvidia-smi may then show why."""
        compile_apart("pynvml")  # compiling 8,000 lines here would use 5 MB of memory
        try:
            import pynvml
        except ImportError:
            return None
        try:
            if not self._open:
                pynvml.nvmlInit()
                self._open = True
                give_back_freed()
                give_back_cleared(LIBRARY)  # frees 14 MB of a table that NVML allocates for the maximum number of GPUs
            indexes = range(pynvml.nvmlDeviceGetCount())
            self._counters = self._counters or PerformanceCounters(pynvml)
            counters = self._counters if detailed else None
            return tuple(read_gpu(pynvml, each, self._max_clocks, counters) for each in indexes)
        except pynvml.NVMLError:
            self.close()
            return None

    def close(self) -> None:
        """Release the driver: GPUs cannot be reset while they are in use."""
        if self._open:
            import pynvml

            self._open = False
            if self._counters:
                self._counters.close()
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()


Ask = Callable[..., Any]  # calls a function of the library for one GPU; None if the GPU does not provide the value


def read_gpu(nvml: Any, index: int, max_clocks: MaxClocks, counters: PerformanceCounters | None = None) -> GpuFacts:
    """Return the state of a GPU; if `counters` are given, with the values that no check needs."""
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

    if max_clocks.get(uuid) is None:
        max_clocks[uuid] = ask("nvmlDeviceGetMaxClockInfo", SM_CLOCK)
    found = replace(_checked_values(index, uuid, ask), max_clock_mhz=max_clocks[uuid])
    # The older call counts the driver's reserve as used: over 600 MiB on an idle H200.
    found = _with_memory(found, ask("nvmlDeviceGetMemoryInfo", getattr(nvml, "nvmlMemory_v2", None)))
    if counters is None:
        return found
    # A GPU that is divided into parts (MIG) has counters for each part only.
    return replace(_with_details(found, ask), **({} if found.divided else counters.read(handle, uuid)))


def _checked_values(index: int, uuid: str, ask: Ask) -> GpuFacts:
    """Return the values that the checks need, without the sizes of the memory."""
    rows = ask("nvmlDeviceGetRemappedRows")
    links = [ask("nvmlDeviceGetNvLinkState", link) for link in range(MAX_LINKS)]
    rates = ask("nvmlDeviceGetUtilizationRates")
    return GpuFacts(
        index=index,
        uuid=uuid,
        serial=ask("nvmlDeviceGetSerial", wanted=_text) or "",
        model=ask("nvmlDeviceGetName", wanted=_text) or "",
        temperature_c=ask("nvmlDeviceGetTemperature", 0),
        slowdown_c=ask("nvmlDeviceGetTemperatureThreshold", SLOWDOWN),
        clock_mhz=ask("nvmlDeviceGetClockInfo", SM_CLOCK),
        throttle=_throttle(ask),
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
        processes=ask("nvmlDeviceGetComputeRunningProcesses", wanted=_processes),
        divided=ask("nvmlDeviceGetMigMode", wanted=lambda modes: modes[0] == 1),
        rows_corrected=rows[0] if rows else None,
        memory_utilization_percent=rates.memory if rates else None,
    )


def _throttle(ask: Ask) -> tuple[str, ...] | None:
    """Return the reasons for reduced clocks. Older versions of the library have another name for the function."""
    reasons = ask("nvmlDeviceGetCurrentClocksEventReasons")
    if reasons is None:
        reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons")
    return None if reasons is None else tuple(word for bit, word in REASONS.items() if reasons & bit)


def _with_memory(gpu: GpuFacts, memory: Any) -> GpuFacts:
    """Add the sizes of the GPU's memory, if the library returned them."""
    if memory is None:
        return gpu
    return replace(
        gpu,
        memory_total_mib=memory.total // MIB,
        memory_used_mib=memory.used // MIB,
        memory_free_mib=memory.free // MIB,
        memory_reserved_mib=memory.reserved // MIB if hasattr(memory, "reserved") else None,
    )


def _with_details(gpu: GpuFacts, ask: Ask) -> GpuFacts:
    """Add the values that only metrics show. They take 5 to 8 ms on an H200, more than all other values together."""
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
        power_violation_ns=ask(
            "nvmlDeviceGetViolationStatus", POWER_POLICY, wanted=lambda answer: answer.violationTime
        ),
        thermal_violation_ns=ask(
            "nvmlDeviceGetViolationStatus", THERMAL_POLICY, wanted=lambda answer: answer.violationTime
        ),
    )


def _field(values: Any) -> int | None:
    """Return the value of a field; None if the GPU does not provide it. Most GPUs do not provide the memory's
    temperature."""
    value = values[0]
    return int(value.value.uiVal) if value.nvmlReturn == 0 and value.valueType == UNSIGNED_INT else None


def _link_errors(ask: Ask, links: list[int | None]) -> int | None:
    up = [number for number, link in enumerate(links) if link == 1]
    counts = [ask("nvmlDeviceGetNvLinkErrorCounter", link, kind) for link in up for kind in (RECOVERY, ECC_DATA)]
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _processes(running: list[Any]) -> tuple[GpuProcess, ...]:
    return tuple(GpuProcess(each.pid, "", (each.usedGpuMemory or 0) // MIB) for each in running)


def _text(value: str | bytes) -> str:
    """Decode text: older versions of the library return bytes."""
    return value.decode() if isinstance(value, bytes) else value
