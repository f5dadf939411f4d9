"""Tests of reading GPUs through a fake NVML with two GPUs, one of them lost."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

from dalsegno.health.facts import HW_THERMAL
from dalsegno.health.readers.nvml import COUNTERS, MaxClocks, PerformanceCounters, read_gpu

TOLD = {
    "nvmlDeviceGetUUID": b"GPU-1",  # bytes, as in older versions of the Python bindings
    "nvmlDeviceGetName": "NVIDIA H200",
    "nvmlDeviceGetTemperature": 31,
    "nvmlDeviceGetClockInfo": 345,
    "nvmlDeviceGetMaxClockInfo": 1980,
    "nvmlDeviceGetRemappedRows": (0, 2, 0, 1),
    "nvmlDeviceGetCurrentClocksThrottleReasons": 0x40 | 0x1,
    "nvmlDeviceGetPciInfo": SimpleNamespace(busId=b"00000000:41:00.0"),
    "nvmlDeviceGetPowerUsage": 78_740,
    "nvmlDeviceGetTotalEnergyConsumption": 123_456,
    "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=90, memory=40),
    "nvmlDeviceGetViolationStatus": SimpleNamespace(referenceTime=1, violationTime=5_000_000_000),
    "nvmlDeviceGetFieldValues": [SimpleNamespace(nvmlReturn=0, valueType=1, value=SimpleNamespace(uiVal=33))],
}


class PlayedNvml:
    """Answers some queries, refuses some, and lacks the others."""

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        self.asked: list[str] = []

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetSerial(self, handle: int) -> str:
        raise self.NVMLError("not supported")

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in TOLD:
            raise AttributeError(name)

        def answer(handle: int, *arguments: int) -> Any:
            self.asked.append(name)
            if handle != 0:
                raise self.NVMLError("lost")
            return TOLD[name]

        return answer


def test_missing_values_are_none() -> None:
    gpu = read_gpu(PlayedNvml(), 0, {})
    assert (gpu.uuid, gpu.model, gpu.temperature_c, gpu.max_clock_mhz) == ("GPU-1", "NVIDIA H200", 31, 1980)
    assert (gpu.remapped_rows, gpu.remap_pending, gpu.remap_failed) == (2, False, True)
    assert gpu.throttle == (HW_THERMAL,)
    assert (gpu.serial, gpu.nvlinks, gpu.ecc_uncorrected, gpu.processes) == ("", None, None, None)
    assert read_gpu(PlayedNvml(), 1, {}).lost


def test_sizes_of_the_memory_are_in_mib() -> None:
    nvml = PlayedNvml()
    memory = SimpleNamespace(total=143_771 << 20, used=9 << 20, free=143_000 << 20, reserved=762 << 20)
    nvml.nvmlDeviceGetMemoryInfo = lambda handle, version: memory
    gpu = read_gpu(nvml, 0, {})
    sizes = (gpu.memory_total_mib, gpu.memory_used_mib, gpu.memory_free_mib, gpu.memory_reserved_mib)
    assert sizes == (143_771, 9, 143_000, 762)


def test_the_maximum_clock_is_queried_once() -> None:
    nvml, known = PlayedNvml(), MaxClocks()
    assert read_gpu(nvml, 0, known) == read_gpu(nvml, 0, known)
    assert nvml.asked.count("nvmlDeviceGetMaxClockInfo") == 1
    assert nvml.asked.count("nvmlDeviceGetClockInfo") == 2


def test_values_for_metrics_are_queried_only_when_asked_for() -> None:
    nvml = PlayedNvml()
    assert read_gpu(nvml, 0, {}).power_w is None and "nvmlDeviceGetPowerUsage" not in nvml.asked
    gpu = read_gpu(nvml, 0, {}, PerformanceCounters(nvml))
    assert (gpu.power_w, gpu.energy_mj, gpu.memory_temperature_c, gpu.bus_id) == (
        78.74,
        123_456,
        33,
        "00000000:41:00.0",
    )
    assert (gpu.utilization_percent, gpu.memory_utilization_percent) == (90, 40)
    assert gpu.thermal_violation_ns == 5_000_000_000
    assert (gpu.pcie_replays, gpu.encoder_percent, gpu.memory_free_mib, gpu.memory_reserved_mib) == (None,) * 4


def test_a_field_that_the_gpu_does_not_support_is_not_available() -> None:
    nvml = PlayedNvml()
    unsupported = SimpleNamespace(nvmlReturn=3, valueType=0, value=SimpleNamespace(uiVal=0))
    nvml.nvmlDeviceGetFieldValues = lambda handle, fields: [unsupported]
    assert read_gpu(nvml, 0, {}, PerformanceCounters(nvml)).memory_temperature_c is None


class PlayedCounters(PlayedNvml):
    """An NVML with performance counters: SMs are busy half of the time between two samples, tensor cores a quarter."""

    NVML_GPM_METRICS_GET_VERSION = 1
    VALUES: ClassVar = {2: 50.0, 5: 25.0, 20: 3.0}  # number of a counter -> value, in percent, percent and MiB/s

    def __init__(self, supported: bool = True) -> None:
        super().__init__()
        self.supported, self.alive, self.failing = supported, set[int](), False

    def c_nvmlGpmMetricsGet_t(self) -> SimpleNamespace:
        return SimpleNamespace(metrics=[SimpleNamespace(nvmlReturn=0, value=0.0) for _ in range(210)])

    def nvmlGpmQueryDeviceSupport(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(isSupportedDevice=int(self.supported))

    def nvmlGpmSampleAlloc(self) -> int:
        self.alive.add(max(self.alive, default=0) + 1)
        return max(self.alive)

    def nvmlGpmSampleFree(self, sample: int) -> None:
        self.alive.remove(sample)

    def nvmlGpmSampleGet(self, handle: int, sample: int) -> None:
        if self.failing:
            raise self.NVMLError("lost")

    def nvmlGpmMetricsGet(self, request: SimpleNamespace) -> None:
        assert request.version == 1 and request.sample1 < request.sample2
        for metric in request.metrics[: request.numMetrics]:
            if metric.metricId in self.VALUES:
                metric.value = self.VALUES[metric.metricId]
            else:
                metric.nvmlReturn = 3  # NVML's code for "not supported"


def test_performance_counters_are_means_between_two_readings() -> None:
    nvml = PlayedCounters()
    counters = PerformanceCounters(nvml)
    assert read_gpu(nvml, 0, {}, counters).sm_active is None, "there is nothing to compare with yet"
    for _ in range(3):
        gpu = read_gpu(nvml, 0, {}, counters)
        assert (gpu.sm_active, gpu.tensor_active, gpu.pcie_tx_bytes_per_s) == (0.5, 0.25, 3 * 1024**2)
        assert gpu.dram_active is None, "this GPU does not have it"
        assert len(nvml.alive) == 1, "a sample that was used is freed"
    counters.close()
    assert not nvml.alive


def test_gpus_without_performance_counters_have_none() -> None:
    for nvml in (PlayedNvml(), PlayedCounters(supported=False)):
        counters = PerformanceCounters(nvml)
        gpus = [read_gpu(nvml, 0, {}, counters) for _ in range(2)]
        assert {getattr(gpu, name) for gpu in gpus for name in COUNTERS} == {None}
        assert gpus[1].power_w == 78.74, "the other values are there"


def test_failed_sample_is_freed_and_the_next_one_is_used() -> None:
    nvml = PlayedCounters()
    counters = PerformanceCounters(nvml)
    counters.read(0, "GPU-1")
    nvml.failing = True
    assert counters.read(0, "GPU-1") == {} and len(nvml.alive) == 1
    nvml.failing = False
    assert counters.read(0, "GPU-1")["sm_active"] == 0.5
