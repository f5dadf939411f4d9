"""Measure matrix products or memory copies on one device. Imports torch.

`bench-device '{"test": "gemm", …}'` runs on one GPU or one core, and prints its results as JSON lines. Ranks do not
communicate: LOCAL_RANK or SLURM_LOCALID selects the device.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import torch

from dalsegno.bench.collectives.collective_measure import choose_device, processor_name, read_file
from dalsegno.bench.collectives.collectives import DATA_TYPES, instance_id
from dalsegno.bench.node.devices import DeviceAsk, DeviceResult, DeviceTest

BATCHES = 10
WARM_S = 0.5
GPU_SIDE, CPU_SIDE = 8192, 1024
GPU_BYTES, CPU_BYTES = 1 << 30, 64 << 20


def time_batches(call: Callable[[], object], seconds: float, on_gpu: bool) -> list[float]:
    """Return the mean time of one call for each of several batches. A batch keeps the device busy without a pause.

    The clocks of a GPU take some time to rise, so the first calls are not part of any batch.
    """
    finish: Callable[[], object] = torch.cuda.synchronize if on_gpu else (lambda: None)
    calls, begin = 0, time.perf_counter()
    while not calls or time.perf_counter() - begin < min(WARM_S, seconds):
        call()
        finish()
        calls += 1
    one_s = (time.perf_counter() - begin) / calls
    each = max(1, int(seconds / BATCHES / one_s))
    times = []
    for _ in range(BATCHES):
        begin = time.perf_counter()
        for _ in range(each):
            call()
        finish()
        times.append((time.perf_counter() - begin) / each)
    return times


def product_call(side: int, dtype: Any, device: Any) -> Callable[[], object]:
    """Return a call that multiplies two square matrices of random numbers. Zeros would need less power."""
    left, right = (torch.randn(side, side, device=device, dtype=torch.float32).to(dtype) for _ in range(2))
    result = torch.empty(side, side, device=device, dtype=dtype)
    return lambda: torch.mm(left, right, out=result)


def copy_call(size: int, source: Any, target: Any) -> Callable[[], object]:
    """Return a call that copies bytes from one device to another, or within a device."""
    pinned = source != target
    first, second = (
        torch.ones(size // 4, device=device, pin_memory=pinned and device.type == "cpu") for device in (source, target)
    )
    return lambda: second.copy_(first, non_blocking=True)


def measure(ask: DeviceAsk, local_rank: int, local_size: int) -> Iterator[DeviceResult]:
    """Yield the results of this rank's device."""
    device = choose_device(ask.device, local_rank, local_size)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    data_type = DATA_TYPES[("bfloat16" if on_gpu else "float") if ask.data_type == "auto" else ask.data_type]
    product = str(torch.cuda.get_device_name(device)) if on_gpu else processor_name()
    name = f"GPU {device.index}" if on_gpu else f"CPU {local_rank}"

    def result(test: DeviceTest, work: float, times: Sequence[float]) -> DeviceResult:
        host, instance = socket.gethostname().partition(".")[0], instance_id(read_file)
        shown = data_type.name if test is DeviceTest.GEMM else ""
        return DeviceResult(test, host, name, product, work / median(times), work / min(times), shown, instance)

    if ask.test is DeviceTest.GEMM:
        side = ask.side or (GPU_SIDE if on_gpu else CPU_SIDE)
        call = product_call(side, getattr(torch, data_type.torch), device)
        yield result(DeviceTest.GEMM, 2 * side**3 / 1e12, time_batches(call, ask.seconds, on_gpu))
        return
    size = ask.size or (GPU_BYTES if on_gpu else CPU_BYTES)
    copies = time_batches(copy_call(size, device, device), ask.seconds, on_gpu)
    yield result(DeviceTest.MEMORY, 2 * size / 1e9, copies)
    if on_gpu:
        host = torch.device("cpu")
        there = time_batches(copy_call(size, host, device), ask.seconds, on_gpu)
        yield result(DeviceTest.TO_DEVICE, size / 1e9, there)
        back = time_batches(copy_call(size, device, host), ask.seconds, on_gpu)
        yield result(DeviceTest.FROM_DEVICE, size / 1e9, back)


def main(arguments: Sequence[str]) -> int:
    """Measure the device of this rank and print the results."""
    local_rank = int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or 0)
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("SLURM_NTASKS_PER_NODE") or 1)
    for each in measure(DeviceAsk.from_json(arguments[0]), local_rank, local_size):
        sys.stdout.write(each.to_json() + "\n")
        sys.stdout.flush()
    return 0
