#!/usr/bin/env python3
"""What a checkpoint costs: the stall of a snapshot in memory and of torch's own, beside a plain copy of the same bytes.

    benchmarks/checkpoint.py               1 GiB of state, about a minute; prints a table
    benchmarks/checkpoint.py --gib 0.25    less of it
    benchmarks/checkpoint.py --runs 3      fewer repetitions

Needs a Python with torch: run it with the one your training uses. One function per comparison; each measures its two
sides in turns, so that a busy machine slows down both.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import torch
from quiet import available_mib, busy_share
from table import Row, render

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from dalsegno.train.memory.checksum import Verdict, checksum, judge  # noqa: E402
from dalsegno.train.memory.names import sweep  # noqa: E402
from dalsegno.train.memory.slots import Slots  # noqa: E402
from dalsegno.train.memory.snapshot import open_snapshot, state_of  # noqa: E402
from dalsegno.train.state import State, take  # noqa: E402

RUN = f"benchmark-{os.getpid()}"
GIB = 1 << 30
Nested = dict[str, dict[str, torch.Tensor]]


def main() -> int:
    options = parse_options()
    if available_mib() < options.gib * 5 * 1024:
        print(f"needs {options.gib * 5:.0f} GiB of free memory", file=sys.stderr)
        return 1
    folder = Path(tempfile.mkdtemp(prefix="dalsegno-benchmark-"))
    try:
        rows = list(measure(training_state(int(options.gib * GIB)), options.runs, options.gib, folder))
    finally:
        sweep(RUN)
        shutil.rmtree(folder)
    print(render(rows))
    return 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the state")
    parser.add_argument("--runs", type=int, default=7, help="repetitions")
    return parser.parse_args()


def training_state(size: int) -> Nested:
    """Weights and Adam's two moments of many layers, large and small tensors together."""
    layers = 48
    wide = size // 3 // layers // 4 - 1024
    one = {f"layers.{n}.{name}": torch.rand(length) for n in range(layers) for name, length in shapes(wide)}
    return {kind: {name: tensor.clone() for name, tensor in one.items()} for kind in ("model", "exp_avg", "exp_avg_sq")}


def shapes(wide: int) -> list[tuple[str, int]]:
    return [("weight", wide), ("bias", 768), ("norm.weight", 128), ("norm.bias", 128)]


# What is measured -------------------------------------------------------------------------------------------


def measure(nested: Nested, runs: int, gib: float, folder: Path) -> Iterator[Row]:
    yield from memory_snapshot(nested, runs, gib)
    yield from memory_restore(nested, runs, gib)
    yield from torchs_own(nested, max(2, runs // 3), gib, folder)


def memory_snapshot(nested: Nested, runs: int, gib: float) -> Iterator[Row]:
    """The stall of a snapshot, and a copy of the same tensors into memory that is warm."""
    slots, warm = Slots(RUN, rank=0, generation=1), {kind: dict(map(clone, of.items())) for kind, of in nested.items()}
    slots.prepare(state_at(nested, 0))
    copies, stalls = [], []
    for step in range(1, runs + 2):
        copies.append(timed(lambda: copy(warm, nested)))
        stalls.append(timed(lambda step=step: slots.write(state_at(nested, step))))  # type: ignore[misc]
    slots.close()
    floor = median(copies[1:])
    yield row(f"plain copy of {gib:g} GiB into warm memory", None, copies[1:])
    ratio = f"{median(stalls[1:]) / floor:.2f} x the plain copy"
    yield row(f"snapshot of {gib:g} GiB in memory: training stands still", round(1.5 * floor, 3), stalls[1:], ratio)


def memory_restore(nested: Nested, runs: int, gib: float) -> Iterator[Row]:
    """From the slots an earlier process left: checked, mapped, copied into the tensors of a new life."""
    slots = Slots(RUN, rank=0, generation=1)
    slots.write(state_at(nested, 1 << 30))
    path = max(slots.slots, key=lambda slot: record.step if (record := slot.record()) else -1).path
    slots.close()
    checks = [timed(lambda: checksum(path)) for _ in range(runs)]
    living = {f"{kind}.{name}": tensor for kind, of in nested.items() for name, tensor in of.items()}
    loads = [timed(lambda: restore(path, living, check=False)) for _ in range(runs)]
    verified = [timed(lambda: restore(path, living, check=True)) for _ in range(runs)]
    yield row(f"checksums of {gib:g} GiB, after the commit and outside the stall", None, checks)
    yield row(f"restore of {gib:g} GiB from memory", 0.5 * gib, loads)
    yield row(f"restore of {gib:g} GiB from memory, every byte verified", 0.5 * gib, verified)


def torchs_own(nested: Nested, runs: int, gib: float, folder: Path) -> Iterator[Row]:
    """How long torch's own ways keep the training waiting."""
    from torch.distributed.checkpoint import async_save

    stalls = []
    for n in range(runs):
        started = time.perf_counter()
        saving = async_save(nested, checkpoint_id=folder / f"dcp-{n}", no_dist=True)
        stalls.append(time.perf_counter() - started)
        getattr(saving, "upload_completion", saving).result()
        shutil.rmtree(folder / f"dcp-{n}")
    yield row(f"DCP async_save of {gib:g} GiB: training stands still", None, stalls)
    saves = [timed(lambda: torch.save(nested, folder / "whole.pt")) for _ in range(runs)]
    yield row(f"torch.save of {gib:g} GiB, without fsync", None, saves)


# How it is measured -----------------------------------------------------------------------------------------


def state_at(nested: Nested, step: int) -> State:
    return take(nested, own={"rng": 1}, step=step, rank=0, world=1)


def clone(item: tuple[str, torch.Tensor]) -> tuple[str, torch.Tensor]:
    return item[0], item[1].clone()


def copy(to: Nested, nested: Nested) -> None:
    for kind, tensors in nested.items():
        for name, tensor in tensors.items():
            to[kind][name].copy_(tensor)


def restore(path: Path, living: dict[str, torch.Tensor], check: bool) -> None:
    snapshot = open_snapshot(path)
    if snapshot is None or (check and judge(snapshot) != Verdict.WHOLE):
        raise RuntimeError("the snapshot is not whole")
    for piece in state_of(snapshot).pieces:
        living[piece.key].copy_(piece.tensor)


def timed(act: Callable[[], object]) -> float:
    started = time.perf_counter()
    if act() is False:
        raise RuntimeError("it did not happen")
    return time.perf_counter() - started


def row(what: str, limit_s: float | None, times_s: list[float], note: str = "") -> Row:
    return Row(what, limit_s, tuple(times_s), busy=busy_share(), note=note)


if __name__ == "__main__":
    sys.exit(main())
