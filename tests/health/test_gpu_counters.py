"""The performance counters of a real NVIDIA GPU since Hopper, idle and under matrix products.

The rest of the suite hides the machine's GPUs. As root, this command runs the tests and prints the metrics:
`DALSEGNO_GPU_TESTS=yes python -m pytest -rs -s tests/health/test_gpu_counters.py`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from dalsegno.health.facts import GpuFacts
from dalsegno.health.readers.nvml import COUNTERS, Nvml
from dalsegno.node_agent.metrics import gpu_families
from dalsegno.observe.exposition import render

pytest.importorskip("pynvml")  # checked before torch, whose import takes seconds even without a GPU
torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU and DALSEGNO_GPU_TESTS=yes", allow_module_level=True)

MEASURED_S = 2.0
SIZE = 8192  # a product of two bf16 matrices of this size takes 2 ms on an H200


@contextmanager
def busy(work) -> Iterator[None]:
    """Repeat some work on the GPU until the end of the block."""
    stop = threading.Event()

    def repeat() -> None:
        while not stop.is_set():
            for _ in range(16):
                work()
            torch.cuda.synchronize()

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        time.sleep(1.0)  # time for the clocks to rise
        yield
    finally:
        stop.set()
        thread.join()


def measure(nvml: Nvml) -> GpuFacts:
    """Return the first GPU with mean values over MEASURED_S."""
    nvml.read(detailed=True)
    time.sleep(MEASURED_S)
    found = nvml.read(detailed=True)
    assert found, "NVML does not answer"
    if found[0].sm_active is None:
        pytest.skip(f"{found[0].model} has no performance counters, or this user may not read them")
    values = {name: getattr(found[0], name) for name in COUNTERS}
    print("\n" + "\n".join(f"{name:24} {'-' if value is None else f'{value:.6g}'}" for name, value in values.items()))
    return found[0]


@pytest.fixture
def nvml() -> Iterator[Nvml]:
    made = Nvml()
    yield made
    made.close()


def test_counters_show_matrix_products_on_tensor_cores(nvml: Nvml) -> None:
    idle = measure(nvml)
    left, right = (torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)
    with busy(lambda: torch.mm(left, right, out=out)):
        loaded = measure(nvml)
    text = render(gpu_families([loaded], "gpu-1")).decode()
    print("\n".join(line for line in text.splitlines() if line.startswith("DCGM_FI_PROF_")))
    assert idle.sm_active < 0.1 and idle.tensor_active < 0.05
    assert 0.8 < loaded.sm_active <= 1.01 and 0.8 < loaded.graphics_active <= 1.01
    assert 0.3 < loaded.tensor_active <= 1.01
    assert 0 < loaded.dram_active <= 1.01 and 0 < loaded.sm_occupancy <= 1.01
    for name in COUNTERS:
        assert f"DCGM_FI_PROF_{DCGM_NAMES[name]}{{" in text or getattr(loaded, name) is None, name


def test_counters_show_copies_to_the_gpu_and_use_of_its_memory(nvml: Nvml) -> None:
    host = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")
    with busy(lambda: device.copy_(host, non_blocking=True)):
        copying = measure(nvml)
    assert copying.pcie_rx_bytes_per_s > 1e9, "the GPU receives gigabytes per second"
    assert copying.pcie_rx_bytes_per_s > 3 * copying.pcie_tx_bytes_per_s, "and sends little"
    large, copy = (torch.empty(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(2))
    with busy(lambda: copy.copy_(large)):
        assert measure(nvml).dram_active > 0.4


DCGM_NAMES = {
    "graphics_active": "GR_ENGINE_ACTIVE",
    "sm_active": "SM_ACTIVE",
    "sm_occupancy": "SM_OCCUPANCY",
    "tensor_active": "PIPE_TENSOR_ACTIVE",
    "dram_active": "DRAM_ACTIVE",
    "fp64_active": "PIPE_FP64_ACTIVE",
    "fp32_active": "PIPE_FP32_ACTIVE",
    "fp16_active": "PIPE_FP16_ACTIVE",
    "pcie_tx_bytes_per_s": "PCIE_TX_BYTES",
    "pcie_rx_bytes_per_s": "PCIE_RX_BYTES",
    "nvlink_tx_bytes_per_s": "NVLINK_TX_BYTES",
    "nvlink_rx_bytes_per_s": "NVLINK_RX_BYTES",
}
