"""The overhead of our measurements over bare torch calls, measured side by side in one process.

The fastest of many rounds is compared, and the limits are wider than the figures in docs/performance.md.
`benchmarks/collectives.py` and `benchmarks/bench_gpu.py` check the exact limit of 3 %.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.alone]  # it measures times
SOURCE = Path(__file__).parents[2] / "src"
COMPARE = """
import json, time
import torch
import torch.distributed as dist
from dalsegno.bench.collectives.collective_measure import CollectiveRank, measure_placement
from dalsegno.bench.collectives.collectives import DATA_TYPES, CollectiveAsk
from dalsegno.bench.node.device_measure import measure
from dalsegno.bench.node.devices import DeviceAsk, DeviceTest

torch.set_num_threads(1)

def bare(call, calls):
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begin) / calls

rank, size = CollectiveRank("cpu"), 64 << 10
ask, whole = CollectiveAsk("all_reduce", size, size, iters=100, check=0), torch.ones(size // 4)
ours, alone = [], []
for _ in range(40):
    ours.append(measure_placement(ask, size, DATA_TYPES["float"], "sum", rank, in_place=False).time_us / 1e6)
    alone.append(bare(lambda: dist.all_reduce(whole), 100))
rank.leave()
left, right, side = torch.randn(256, 256), torch.randn(256, 256), 256
product, matmul = [], []
for _ in range(8):
    ask = DeviceAsk(DeviceTest.GEMM, side=side, seconds=0.05, device="cpu")
    product.append(2 * side**3 / 1e12 / next(measure(ask, 0, 1)).best)
    matmul.append(min(bare(lambda: torch.matmul(left, right), 1) for _ in range(20)))
print(json.dumps([min(ours) / min(alone), min(product) / min(matmul)]))
"""


@pytest.fixture(scope="module")
def ratios() -> tuple[float, float]:
    """Return our times divided by those of bare torch, for an all-reduce and for a matrix product."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    world = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    env = {**os.environ, **world, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, "-c", COMPARE], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    collective, product = json.loads(done.stdout.splitlines()[-1])
    return collective, product


def test_the_worker_of_collectives_adds_little_to_the_bare_call(ratios: tuple[float, float]):
    assert ratios[0] < 1.2


def test_a_measured_product_takes_no_longer_than_torch_matmul_alone(ratios: tuple[float, float]):
    assert ratios[1] < 1.15
