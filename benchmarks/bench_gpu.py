#!/usr/bin/env python3
"""Compare `dalsegno bench gemm` with bare torch.matmul, and the collectives of one rank with bare calls, on one GPU.

It needs torch and `src/` on PYTHONPATH, and nothing else. Takes about two minutes.

    PYTHONPATH=src python3 benchmarks/bench_gpu.py
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from statistics import median

import torch
from collectives import SIZES, TESTS, compare

from dalsegno.bench.collectives.collective_measure import CollectiveRank, measure
from dalsegno.bench.collectives.collectives import CollectiveAsk
from dalsegno.bench.node.device_measure import measure as measure_device
from dalsegno.bench.node.devices import DeviceAsk, DeviceTest, judge_devices, table_rows

COLLECTIVES = (  # without sendrecv, because torch does not let a rank send to itself
    "all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "alltoall", "scatter", "gather",
)  # fmt: skip


def bare_product(side: int, seconds: float, device: torch.device) -> float:
    """Return TFLOP/s of torch.matmul alone, measured without our code."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    finish = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    torch.matmul(left, right)
    finish()
    calls, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < seconds:
        for _ in range(10):
            torch.matmul(left, right)
        finish()
        calls += 10
    return 2 * side**3 * calls / (time.perf_counter() - begin) / 1e12


def products(sides: list[int], rounds: int, seconds: float, device: torch.device) -> int:
    """Print the TFLOP/s of `dalsegno bench gemm` and of torch.matmul for each size, measured in turns. Return 1 if ours
    is more than 3 % lower for any size."""
    missed = 0
    for side in sides:
        ours, bare = [], []
        for _ in range(rounds):
            ask = DeviceAsk(DeviceTest.GEMM, side=side, seconds=seconds, device=device.type)
            found = next(measure_device(ask, 0, 1))
            ours.append(found.value)
            bare.append(bare_product(side, seconds, device))
        ratio = median(ours) / median(bare)
        peak = f", {median(ours) / found.peak:.0%} of the catalog's {found.peak:g}" if found.peak else ""
        verdict = "met" if ratio >= 0.97 else "missed"
        figures = f"{median(ours):.4g} TFLOP/s, torch.matmul alone {median(bare):.4g}, ratio {ratio:.3f}"
        print(f"gemm {side}: {figures}{peak}: {verdict}")
        missed |= ratio < 0.97
    return int(missed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", type=int, nargs="+", default=[4096, 8192, 16384])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--most", type=int, default=1 << 30, help="largest collective in bytes")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    arguments = parser.parse_args()
    device = torch.device(arguments.device, 0) if arguments.device == "cuda" else torch.device("cpu")
    print(f"torch {torch.__version__}", torch.cuda.get_device_name(0) if device.type == "cuda" else "on the CPU")
    missed = products(arguments.sides, arguments.rounds, arguments.seconds, device)
    memory = measure_device(DeviceAsk(DeviceTest.MEMORY, seconds=arguments.seconds, device=device.type), 0, 1)
    for row in table_rows(judge_devices(memory)):
        print("  ".join(row))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    os.environ.update({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
    rank, wrong = CollectiveRank(arguments.device), 0
    for test in COLLECTIVES:
        ask = CollectiveAsk(test, 1 << 10, arguments.most, step_factor=32, warmup_iters=2)
        wrong += measure(ask, rank, sys.stdout.write).out_of_bounds or 0
    ratios = []
    for test in TESTS:
        for size in (each for each in SIZES if each <= arguments.most):
            ours, bare, ratio = compare(rank, test, size, 4 * arguments.rounds, 100)
            ratios.append(ratio)
            print(f"{test} {size}: ours {ours:.1f} us, bare {bare:.1f} us, ratio {ratio:.3f}")
    rank.leave()
    print(f"median ratio of the collectives {median(ratios):.3f}, required at most 1.03; rows with wrong data: {wrong}")
    return int(missed or wrong > 0 or median(ratios) > 1.03)


if __name__ == "__main__":
    sys.exit(main())
