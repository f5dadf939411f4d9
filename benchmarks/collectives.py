#!/usr/bin/env python3
"""Compare the times that `dalsegno bench all_reduce` reports with those of the bare torch.distributed call.

Both are measured in turns, in the same processes and on buffers of the same size, so that noise affects both. It needs
torch and `src/` on PYTHONPATH, and nothing else.

    PYTHONPATH=src python3 benchmarks/collectives.py --nproc 2
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

SIZES = (8 << 10, 256 << 10, 4 << 20, 64 << 20)
LIMIT = 1.03
TESTS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "alltoall")


def bare_call(test: str, size: int, device: object) -> object:
    """Return the plain call as a training script would make it."""
    import torch
    import torch.distributed as dist

    count, ranks = size // 4, dist.get_world_size()
    whole = torch.ones(count // ranks * ranks, device=device)
    part = torch.ones(count // ranks, device=device)
    other = torch.ones_like(whole)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: gather(whole, part),
        "reduce_scatter": lambda: scatter(part, whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "alltoall": lambda: dist.all_to_all_single(other, whole),
    }[test]


def compare(rank: object, test: str, size: int, rounds: int, iters: int) -> tuple[float, float, float]:
    """Return the median time of one call in microseconds, measured by the worker and by a bare loop, and the median
    ratio of the two in one round. Noise that lasts longer than a round affects both."""
    from dalsegno.bench.collectives.collective_measure import measure_placement
    from dalsegno.bench.collectives.collectives import DATA_TYPES, TESTS, CollectiveAsk

    ask = CollectiveAsk(test, size, size, iters=iters, check=0)
    operation = "sum" if TESTS[test].reduces else "none"
    call, ours, bare = bare_call(test, size, rank.device), [], []
    for number in range(rounds + 1):
        found = measure_placement(ask, size, DATA_TYPES["float"], operation, rank, in_place=False).time_us
        rank.barrier()
        begin = time.perf_counter()
        for _ in range(iters):
            call()
        rank.finish()
        took = (time.perf_counter() - begin) / iters * 1e6
        if number:  # the first round is not counted, because it also connects
            ours.append(found)
            bare.append(rank.combine(took, _mean()))
    ratios = [one / other for one, other in zip(ours, bare, strict=True)]
    return median(ours), median(bare), median(ratios)


def _mean() -> object:
    from dalsegno.bench.collectives.collectives import Averaging

    return Averaging.MEAN


def measure(arguments: argparse.Namespace) -> list[dict[str, object]]:
    """Run this rank's part of all comparisons. Return the rows on rank 0, and no rows on other ranks."""
    from dalsegno.bench.collectives.collective_measure import CollectiveRank

    rank, rows = CollectiveRank(arguments.device), []
    for test in TESTS:
        for size in SIZES:
            if size > arguments.most:
                continue
            iters = max(3, min(200, int(arguments.iters * (1 << 20) / size)))
            ours, bare, ratio = compare(rank, test, size, arguments.rounds, iters)
            rows.append({"test": test, "size": size, "ours_us": ours, "bare_us": bare, "ratio": ratio})
    rank.leave()
    return rows if rank.rank == 0 else []


def show(rows: list[dict[str, object]]) -> int:
    """Print the table and return 1 if the median of the ratios is above the limit."""
    print(f"{'test':16}{'bytes':>10}{'ours (us)':>12}{'bare (us)':>12}{'ratio':>8}")
    for row in rows:
        print(f"{row['test']:16}{row['size']:>10}{row['ours_us']:>12.1f}{row['bare_us']:>12.1f}{row['ratio']:>8.3f}")
    middle = median(float(row["ratio"]) for row in rows)
    print(f"median ratio {middle:.3f}; required at most {LIMIT:g}: {'met' if middle <= LIMIT else 'missed'}")
    return int(middle > LIMIT)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--iters", type=int, default=20, help="calls of 1 MiB per round; fewer of larger sizes")
    parser.add_argument("--most", type=int, default=16 << 20, help="largest size in bytes")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rank-of", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of:
        rows = measure(arguments)
        if rows:
            Path(arguments.rank_of).write_text(json.dumps(rows))
        return 0
    from dalsegno.cli.measure.ranks import Rank, local_ranks, run_ranks

    with socket.create_server(("127.0.0.1", 0)) as server:
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1])}
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "rows.json"
        argv = [sys.executable, os.path.abspath(__file__), *sys.argv[1:], "--rank-of", str(file)]
        ranks = [Rank(each.argv, {**each.env, **meeting}) for each in local_ranks(argv, arguments.nproc)]
        run_ranks(ranks, Path(name))
        return show(json.loads(file.read_text()))


if __name__ == "__main__":
    sys.exit(main())
