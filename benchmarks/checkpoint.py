#!/usr/bin/env python3
"""Measure checkpoints: the stall of a snapshot in memory and of torch's own, compared with a plain copy of the bytes.

    benchmarks/checkpoint.py               1 GiB of state, about two minutes; prints a table
    benchmarks/checkpoint.py --write       also writes the table to docs/performance.md
    benchmarks/checkpoint.py --gib 0.25    a smaller state
    benchmarks/checkpoint.py --runs 3      fewer repetitions

Run it with the Python that your training uses; it needs torch. Each function compares two things and
measures them in turns, so that a busy machine slows down both.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from statistics import median

import torch
from quiet import available_mib, busy_share
from table import Row, render, write

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from dalsegno.train import Checkpointer  # noqa: E402
from dalsegno.train.disk.write import write_share  # noqa: E402
from dalsegno.train.memory.files import sweep  # noqa: E402
from dalsegno.train.memory.slots import Slots  # noqa: E402
from dalsegno.train.memory.snapshot import SnapshotVerdict, checksum, judge, open_snapshot, state_of  # noqa: E402  # noqa: E402
from dalsegno.train.snapshots import TensorCopier  # noqa: E402
from dalsegno.train.state import TrainingState, take  # noqa: E402

PAGE = ROOT / "docs" / "performance.md"
COMPUTE_S = 0.5  # time of the forward and backward passes of one step
RUN = f"benchmark-{os.getpid()}"
GIB = 1 << 30
Nested = dict[str, dict[str, torch.Tensor]]


def main() -> int:
    options = parse_options()
    if available_mib() < options.gib * 5 * 1024:
        print(f"needs {options.gib * 5:.0f} GiB of free memory", file=sys.stderr)
        return 1
    folder = Path(tempfile.mkdtemp(prefix="dalsegno-benchmark-", dir=options.folder))
    try:
        rows = list(measure(training_state(int(options.gib * GIB)), options.runs, options.gib, folder))
    finally:
        sweep(RUN)
        shutil.rmtree(folder)
    print(render(rows))
    if options.write:
        measured = f"Measured on {date.today()} with torch {torch.__version__}, {os.cpu_count()} cores."
        write(PAGE, f"{measured}\n\n{render(rows)}", "checkpoint")
    return 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the state")
    parser.add_argument("--runs", type=int, default=7, help="repetitions")
    parser.add_argument("--folder", type=Path, default=None, help="where to write; default: the temporary folder")
    parser.add_argument("--write", action="store_true", help="write the table to docs/performance.md")
    return parser.parse_args()


def training_state(size: int) -> Nested:
    """Return weights and Adam's two moments of many layers, with large and small tensors."""
    layers = 48
    wide = size // 3 // layers // 4 - 1024
    one = {f"layers.{n}.{name}": torch.rand(length) for n in range(layers) for name, length in shapes(wide)}
    return {kind: {name: tensor.clone() for name, tensor in one.items()} for kind in ("model", "exp_avg", "exp_avg_sq")}


def shapes(wide: int) -> list[tuple[str, int]]:
    return [("weight", wide), ("bias", 768), ("norm.weight", 128), ("norm.bias", 128)]


# Measurements


def measure(nested: Nested, runs: int, gib: float, folder: Path) -> Iterator[Row]:
    yield from memory_snapshot(nested, runs, gib, folder)
    yield from memory_restore(nested, runs, gib)
    yield from disk_save(nested, runs, gib, folder)
    yield from between_steps(folder)


def memory_snapshot(nested: Nested, runs: int, gib: float, folder: Path) -> Iterator[Row]:
    """Measure the stall of a snapshot, of a copy of the same tensors into warm memory, and of torch's own save."""
    slots, warm = (
        Slots(RUN, rank=0, generation=1),
        {kind: dict(map(clone, each.items())) for kind, each in nested.items()},
    )
    slots.prepare(state_at(nested, 0))
    copies, whole, beside, others = [], [], [], []
    for step in range(1, 2 * runs + 3, 2):
        copies.append(timed(lambda: copy(warm, nested)))
        whole.append(timed(lambda step=step: slots.write(state_at(nested, step))))  # type: ignore[misc]
        beside.append(stall_beside(slots, state_at(nested, step + 1)))
        others.append(torchs_stall(nested, folder / "dcp"))
    slots.close()
    floor, other = median(copies[1:]), median(others[1:])
    yield row(f"plain copy of {gib:g} GiB into warm memory", None, copies[1:])
    ratio = f"{median(whole[1:]) / floor:.2f} x the plain copy"
    yield row(f"snapshot of {gib:g} GiB in memory, synchronous", round(1.5 * floor, 3), whole[1:], ratio)
    yield row(f"DCP async_save of {gib:g} GiB: training stalls", None, others[1:])
    times = f"DCP stalls {other / median(beside[1:]):.0f} x as long"
    what = f"snapshot of {gib:g} GiB in the background: training stalls"
    yield row(what, round(other / 5, 3), beside[1:], times)


def memory_restore(nested: Nested, runs: int, gib: float) -> Iterator[Row]:
    """Measure the restore from the slots of an earlier process: check, map, and copy into new tensors."""
    slots = Slots(RUN, rank=0, generation=1)
    slots.write(state_at(nested, 1 << 30))
    path = max(slots.slots, key=lambda slot: record.step if (record := slot.record()) else -1).path
    slots.close()
    checks = [timed(lambda: checksum(path)) for _ in range(runs)]
    living = {f"{kind}.{name}": tensor for kind, each in nested.items() for name, tensor in each.items()}
    loads = [timed(lambda: restore(path, living, check=False)) for _ in range(runs)]
    verified = [timed(lambda: restore(path, living, check=True)) for _ in range(runs)]
    yield row(f"checksums of {gib:g} GiB, after the commit and outside the stall", None, checks)
    yield row(f"restore of {gib:g} GiB from memory", 0.5 * gib, loads)
    yield row(f"restore of {gib:g} GiB from memory, every byte verified", 0.5 * gib, verified)


def disk_save(nested: Nested, runs: int, gib: float, folder: Path) -> Iterator[Row]:
    """Measure a rank's share with checksum and fsync, and `dd conv=fsync` of as many random bytes."""
    source, state = folder / "source", state_at(nested, 1)
    source.write_bytes(memoryview(torch.randint(0, 255, (int(gib * GIB),), dtype=torch.uint8).numpy()))
    raw, ours = [], []
    for n in range(runs):
        raw.append(timed(lambda: dd(source, folder / "raw")))
        ours.append(timed(lambda n=n: write_share(folder, state, RUN, n)))  # type: ignore[misc]
        for left in folder.glob(".step-*"):
            shutil.rmtree(left)
    source.unlink()
    yield row(f"dd conv=fsync of {gib:g} GiB", None, raw)
    share = f"{median(raw) / median(ours):.0%} of dd's speed"
    yield row(f"save of {gib:g} GiB to disk, in the background", round(median(raw) / 0.8, 3), ours, share)


def between_steps(folder: Path) -> Iterator[Row]:
    """Measure `done` in steps of 50 ms when nothing is due."""
    model = torch.nn.Linear(256, 256)
    ckpt = Checkpointer(folder / "idle", model=model, optimizer=torch.optim.Adam(model.parameters()), disk_every="10m")
    costs = []
    for step in ckpt.steps(60):
        time.sleep(0.05)
        costs.append(timed(lambda step=step: ckpt.done(step, loss=1.0)))  # type: ignore[misc]
    yield row("done(), when nothing is due", 0.01 * 0.05, costs, "the limit is 1 % of a step of 50 ms")


def stall_beside(slots: Slots, state: TrainingState) -> float:
    """Return the stall of a snapshot made as in `done`: the copy runs during the next forward and backward passes,
    and the optimizer waits until it is complete."""
    mover = TensorCopier()
    mover.trust.announce_change()  # as an earlier step of an optimizer does
    mover.trust.step_done()
    began = time.perf_counter()
    draft = slots.begin(state)
    assert draft is not None
    moving = mover.move(draft, {piece.tensor.data_ptr() for piece in state.pieces})
    called = time.perf_counter()
    compute(COMPUTE_S)
    waits = time.perf_counter()
    moving.wait()
    stall = (called - began) + (time.perf_counter() - waits)
    draft.commit()
    mover.close()
    return stall


def compute(seconds: float) -> None:
    """Compute on one core, like the passes of a model."""
    until, matrix = time.perf_counter() + seconds, torch.rand(256, 256)
    while time.perf_counter() < until:
        matrix @ matrix


def torchs_stall(nested: Nested, folder: Path) -> float:
    """Return how long DCP's async_save stalls training, without the write in the background."""
    from torch.distributed.checkpoint import async_save

    started = time.perf_counter()
    saving = async_save(nested, checkpoint_id=folder, no_dist=True)
    stall = time.perf_counter() - started
    getattr(saving, "upload_completion", saving).result()
    shutil.rmtree(folder)
    return stall


def dd(source: Path, target: Path) -> None:
    command = ["dd", f"if={source}", f"of={target}", "bs=4M", "conv=fsync", "status=none"]
    subprocess.run(command, check=True)
    target.unlink()


# Helpers


def state_at(nested: Nested, step: int) -> TrainingState:
    return take(nested, own={"rng": 1}, step=step, rank=0, world=1)


def clone(item: tuple[str, torch.Tensor]) -> tuple[str, torch.Tensor]:
    return item[0], item[1].clone()


def copy(to: Nested, nested: Nested) -> None:
    for kind, tensors in nested.items():
        for name, tensor in tensors.items():
            to[kind][name].copy_(tensor)


def restore(path: Path, living: dict[str, torch.Tensor], check: bool) -> None:
    snapshot = open_snapshot(path)
    if snapshot is None or (check and judge(snapshot) != SnapshotVerdict.WHOLE):
        raise RuntimeError("the snapshot is damaged")
    for piece in state_of(snapshot).pieces:
        living[piece.key].copy_(piece.tensor)


def timed(act: Callable[[], object]) -> float:
    started = time.perf_counter()
    if act() is False:
        raise RuntimeError("the action failed")
    return time.perf_counter() - started


def row(what: str, limit_s: float | None, times_s: list[float], note: str = "") -> Row:
    return Row(what, limit_s, tuple(times_s), busy=busy_share(), note=note)


if __name__ == "__main__":
    sys.exit(main())
