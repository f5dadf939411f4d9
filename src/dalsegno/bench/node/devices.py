"""Settings, results and verdict for matrix products and memory bandwidth of single devices. Does not import torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from statistics import median

from dalsegno.bench.nccl.machines import find_gpu_of_product

LOW = 0.85  # a device below this share of the median of its kind is slow
LEAST = 3  # with fewer devices, none is called slow


class DeviceTest(str, Enum):
    """The quantities that are measured on each device."""

    GEMM = "gemm"  # TFLOP/s of a matrix product
    MEMORY = "memory"  # GB/s of a copy within the device's memory, reads and writes both counted
    TO_DEVICE = "to device"  # GB/s of a copy from the host's pinned memory
    FROM_DEVICE = "from device"


UNITS = {
    DeviceTest.GEMM: "TFLOP/s",
    DeviceTest.MEMORY: "GB/s",
    DeviceTest.TO_DEVICE: "GB/s",
    DeviceTest.FROM_DEVICE: "GB/s",
}


@dataclass(frozen=True)
class DeviceAsk:
    """The settings of a device test. If `side` or `size` is 0, a value that suits the device is used."""

    test: DeviceTest
    data_type: str = "auto"  # `auto` is bfloat16 on GPUs and float on CPUs
    side: int = 0  # rows and columns of the square matrices
    size: int = 0  # bytes that are copied
    seconds: float = 2.0
    device: str = "auto"

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "test": self.test.value})

    @classmethod
    def from_json(cls, text: str) -> DeviceAsk:
        found = json.loads(text)
        return cls(**{**found, "test": DeviceTest(found["test"])})


@dataclass(frozen=True)
class DeviceResult:
    """The result of one test on one device: the median and the best of several batches of calls."""

    test: DeviceTest
    host: str
    device: str  # for example "GPU 3" or "CPU 1"
    product: str
    value: float
    best: float
    data_type: str = ""
    instance: str = ""  # the cloud's instance id of the machine

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "test": self.test.value})

    @property
    def peak(self) -> float | None:
        """Return the catalog's peak for this device; None if the catalog has no value."""
        gpu = find_gpu_of_product(self.product) if self.device.startswith("GPU") else None
        if gpu is None:
            return None
        if self.test is DeviceTest.GEMM:
            return gpu.bf16_tflops if self.data_type in ("bfloat16", "half") else None
        return gpu.memory_gbytes_per_s if self.test is DeviceTest.MEMORY else None


def read_results(text: str) -> list[DeviceResult]:
    """Return the results in the output of all ranks, sorted by test, host and device."""
    found = []
    for line in text.splitlines():
        try:
            value = json.loads(line)
            found.append(DeviceResult(**{**value, "test": DeviceTest(value["test"])}))
        except (ValueError, TypeError, KeyError):
            continue  # the line is not a result, for example a warning of a library
    return sorted(found, key=lambda each: (list(DeviceTest).index(each.test), each.host, each.device))


@dataclass(frozen=True)
class JudgedDevice:
    """A result with its share of the median of devices of the same product, and of the catalog's peak."""

    result: DeviceResult
    of_median: float
    of_peak: float | None
    slow: bool
    compared: bool = True  # whether enough devices of this product were measured to call one of them slow

    @property
    def word(self) -> str:
        return "slow" if self.slow else "ok" if self.compared else "not compared"


def judge_devices(results: Iterable[DeviceResult], low: float = LOW) -> list[JudgedDevice]:
    """Compare each device with all devices of its product. If there are fewer than LEAST of them, none is called
    slow."""
    known = list(results)
    judged = []
    for each in known:
        same = [other.value for other in known if (other.test, other.product) == (each.test, each.product)]
        share = each.value / median(same) if median(same) else 0.0
        peak = each.value / each.peak if each.peak else None
        compared = len(same) >= LEAST
        judged.append(JudgedDevice(each, share, peak, compared and share < low, compared))
    return judged


def without_gpu(judged: Iterable[JudgedDevice]) -> list[str]:
    """Return the hosts on which a CPU was measured instead of a GPU."""
    return sorted({each.result.host for each in judged if each.result.device.startswith("CPU")})


HEADERS = ("HOST", "DEVICE", "PRODUCT", "TEST", "MEDIAN", "BEST", "OF PEAK", "OF MEDIAN", "VERDICT")


def table_rows(judged: Sequence[JudgedDevice]) -> list[list[str]]:
    return [
        [
            each.result.host,
            each.result.device,
            each.result.product,
            each.result.test.value,
            f"{each.result.value:.4g} {UNITS[each.result.test]}",
            f"{each.result.best:.4g}",
            "-" if each.of_peak is None else f"{each.of_peak:.0%}",
            f"{each.of_median:.0%}",
            each.word,
        ]
        for each in judged
    ]
