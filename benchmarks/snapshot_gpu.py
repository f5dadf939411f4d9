#!/usr/bin/env python3
"""Measure the cost of a snapshot of a GPU's state, compared with the fastest copy and with torch's own saves.

    PYTHONPATH=src python benchmarks/snapshot_gpu.py              4 GiB of state, a minute or two
    PYTHONPATH=src python benchmarks/snapshot_gpu.py --gib 1      a smaller state
    PYTHONPATH=src python benchmarks/snapshot_gpu.py --gib 60 --slots 1 --runs 3    a state of half the memory
    PYTHONPATH=src python benchmarks/snapshot_gpu.py --folder /fsx/tmp    where torch's own saves write

It needs torch with CUDA and one GPU. It also measures snapshots without pinned slots, restores a model with its
optimizer, and checks every byte. DCP saves the restored state to the same memory (/dev/shm), so that no disk is
compared.
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
from table import Row, render

from dalsegno.train.memory.cuda import Copier
from dalsegno.train.memory.files import sweep
from dalsegno.train.memory.slots import Slots
from dalsegno.train.memory.snapshot import checksum, open_snapshot, state_of
from dalsegno.train.nested import empty_out
from dalsegno.train.resume import open_intact
from dalsegno.train.state import Objects, TrainingState, take

RUN = f"benchmark-{os.getpid()}"
GIB = 1 << 30
STALL_LIMIT_S = 0.12 / 4  # seconds per GiB of state: 0.12 s for the default of 4 GiB
OVERLAP_LIMIT = 0.05
STEP_S = 0.5  # compute time, for the overlapped rows
CUDA = torch.device("cuda", 0)


def main() -> int:
    options = parse_options()
    torch.cuda.set_device(CUDA)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {torch.get_num_threads()} threads", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="dalsegno-benchmark-", dir=options.folder))
    rows: list[Row] = []
    try:
        for one in measure(int(options.gib * GIB), options.runs, options.slots, folder):
            print(f"{one.what}: {', '.join(f'{value:.4f}' for value in one.times_s)} {one.verdict}", flush=True)
            rows.append(one)
    finally:
        sweep(RUN)
        shutil.rmtree(folder)
    print(render(rows))
    return 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=4.0, help="size of the state")
    parser.add_argument("--runs", type=int, default=5, help="repetitions")
    parser.add_argument("--slots", type=int, default=2, help="slots in shared memory, each as large as the state")
    parser.add_argument("--folder", default=None, help="where torch.save and DCP write")
    return parser.parse_args()


def measure(size: int, runs: int, slots: int, folder: Path) -> Iterator[Row]:
    yield from restores(size, runs, slots)
    tensors = device_state(size)
    yield from floor(tensors, runs)
    yield from snapshots(tensors, runs, slots, size / GIB)
    yield from overlapped(tensors, runs * 4, slots)
    yield from guarded("torch.save, complete", lambda: torch_save(tensors, folder), 2)
    yield from guarded("DCP async_save: training stalls", lambda: async_save_stall(tensors, folder), 3)


def device_state(size: int) -> dict[str, torch.Tensor]:
    """Return tensors: two thirds float32, one third bfloat16; some small, one scalar, one non-contiguous."""
    many = 96
    tensors = {}
    for n in range(many):
        dtype = torch.bfloat16 if n % 3 == 0 else torch.float32
        tensors[f"w{n}"] = torch.zeros(size // many // dtype.itemsize, dtype=dtype, device=CUDA)
        tensors[f"b{n}"] = torch.zeros(768, dtype=dtype, device=CUDA)
    tensors["turned"] = torch.zeros(64, 32, device=CUDA).t()
    tensors["scalar"] = torch.zeros((), device=CUDA)
    tensors["on the CPU"] = torch.zeros(10)
    return tensors


def state_at(tensors: dict[str, torch.Tensor], step: int) -> TrainingState:
    return take({"model": tensors}, own=None, step=step, rank=0, world=1)


# Measurements


def floor(tensors: dict[str, torch.Tensor], runs: int) -> Iterator[Row]:
    """Measure the lower bound: a copy of the same bytes into pinned memory."""
    pinned = {name: torch.empty_like(tensor, device="cpu", pin_memory=True) for name, tensor in tensors.items()}

    def copy() -> None:
        for name, tensor in tensors.items():
            pinned[name].copy_(tensor, non_blocking=True)

    copy()
    yield Row("floor: copies into pinned memory", None, tuple(synced(copy) for _ in range(runs)))
    pinned.clear()
    torch._C._host_emptyCache()  # the slots need the memory


def snapshots(tensors: dict[str, torch.Tensor], runs: int, count: int, gib: float) -> Iterator[Row]:
    """Measure the time until the copy is complete, which is an upper bound of the stall."""
    for pins in (True, False):
        slots, copier = Slots(RUN, 0, generation=1, count=count), Copier(CUDA)
        started = time.perf_counter()
        slots.prepare(state_at(tensors, 0))
        pinned = pins and all([copier.pin(slot) for slot in slots.slots])
        ready_s = time.perf_counter() - started
        times, calls = [], []
        for step in range(1, runs + 2):
            fill(tensors, step)
            took, call = one_snapshot(slots, copier, tensors, step)
            times.append(took)
            calls.append(call)
        check(slots, runs + 1)
        how = "pinned slots" if pinned else "a staging buffer" + (", pinning was REFUSED" if pins else "")
        limit = STALL_LIMIT_S * gib if pins else None
        yield Row(
            f"snapshot with {how}, synchronous", limit, tuple(times[1:]), note=f"prepared once in {ready_s:.2f} s"
        )
        yield Row(f"snapshot with {how}, the call alone", None, tuple(calls[1:]))
        slots.close()
        sweep(RUN)


def one_snapshot(slots: Slots, copier: Copier, tensors: dict[str, torch.Tensor], step: int) -> tuple[float, float]:
    torch.cuda.synchronize()
    started = time.perf_counter()
    draft = slots.begin(state_at(tensors, step))
    if draft is None:
        raise RuntimeError("no slot was free")
    pending = copier.copy(draft.pairs)
    called = time.perf_counter()
    pending.wait()
    draft.commit()
    return time.perf_counter() - started, called - started


def overlapped(tensors: dict[str, torch.Tensor], steps: int, count: int) -> Iterator[Row]:
    """Measure training steps, each of which changes every tensor, without snapshots and with one of every step."""
    work, slots, copier = compute(STEP_S), Slots(RUN, 0, generation=2, count=count), Copier(CUDA)
    slots.prepare(state_at(tensors, 0))
    for slot in slots.slots:
        copier.pin(slot)
    without = [step_s for step_s, _ in train(tensors, work, steps, None, copier)]
    measured = list(train(tensors, work, steps, slots, copier))
    for _ in train(tensors, work, 5, slots, copier, checked=True):
        pass
    slots.close()
    sweep(RUN)
    beside, stalled_s = [step_s for step_s, _ in measured], median(stall_s for _, stall_s in measured)
    note = f"{median(beside) / median(without) - 1:+.1%}; {stalled_s * 1000:.1f} ms of it are stall"
    yield Row("a step of training, no snapshots", None, tuple(without))
    limit_s = round(median(without) * (1 + OVERLAP_LIMIT), 4)
    yield Row("a step with a snapshot in the background, every byte correct", limit_s, tuple(beside), note=note)


def train(
    tensors: dict[str, torch.Tensor],
    work: Callable[[], None],
    steps: int,
    slots: Slots | None,
    copier: Copier,
    checked: bool = False,
) -> Iterator[tuple[float, float]]:
    """Yield the time and the snapshot's stall of each step after the second. A snapshot is committed a step later."""
    first = newest(slots) + 1
    fill(tensors, first - 1)
    draft = pending = None
    for step in range(first, first + steps + 2):
        started = time.perf_counter()
        work()
        copier.before_change()
        change(tensors)
        if draft and pending:
            pending.wait()
            draft.commit()
        if slots:
            if checked and draft:
                check(slots, step - 1)
            draft = slots.begin(state_at(tensors, step))
            pending = copier.start(draft) if draft else None
        torch.cuda.current_stream().synchronize()
        if step >= first + 2:
            yield time.perf_counter() - started, pending.stall_s() if pending else 0.0
    if draft and pending:
        pending.wait()
        draft.commit()


def newest(slots: Slots | None) -> int:
    return max((record.step for record in slots.records() if record), default=0) if slots else 0


def restores(size: int, runs: int, count: int) -> Iterator[Row]:
    """Measure how a restarted script gets its model and optimizer back: from a slot, and with DCP from memory."""
    objects, folder = trained(size), Path(tempfile.mkdtemp(prefix="dalsegno-benchmark-", dir="/dev/shm"))
    slots, copier = Slots(RUN, 0, generation=3, count=count), Copier(CUDA)
    draft = slots.begin(take(objects.nested(), own=None, step=1, rank=0, world=1))
    if draft is None:
        raise RuntimeError("no slot was free")
    copier.start(draft).wait()  # pins the slot: a staging buffer would need as much memory again
    draft.commit()
    slot, expected = draft.slot.path, sums_of(objects)
    slots.close()
    yield Row("checksums of the slot, after the commit", None, (timed(lambda: checksum(slot)),))
    own = [restore(size, slot, expected) for _ in range(runs)]
    sweep(RUN)
    yield Row("restore: check every byte", None, tuple(checked for checked, _ in own))
    yield Row("restore: load the model and the optimizer", None, tuple(loaded for _, loaded in own))
    try:
        dcp_save(objects, folder)
        del objects
        times_s = tuple(dcp_load(size, folder) for _ in range(runs))
        yield Row("DCP load from the same memory, nothing checked", None, times_s)
    finally:
        shutil.rmtree(folder)
        torch.cuda.empty_cache()


def trained(size: int, states: bool = True) -> Objects:
    """Return a model and an Adam optimizer with about `size` bytes of state: one third weights, two thirds moments."""
    layers, width = 48, 4096
    rows = max(1, size // 3 // 4 // layers // width)
    model = torch.nn.ModuleList(torch.nn.Linear(width, rows, bias=False, device=CUDA) for _ in range(layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    if states:
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    torch.cuda.empty_cache()
    return Objects({"model": model, "optimizer": optimizer})


def sums_of(objects: Objects) -> list[float]:
    tensors = empty_out(objects.nested())[1]
    return [float(tensors[key].double().sum()) for key in sorted(tensors)]


def restore(size: int, slot: Path, expected: list[float]) -> tuple[float, float]:
    """Restore a fresh model from a slot as `resume` does; return the times of the check and of the load."""
    objects = trained(size, states=False)
    torch.cuda.synchronize()
    started = time.perf_counter()
    snapshot = open_intact(slot, print)
    if snapshot is None:
        raise RuntimeError("the snapshot is damaged")
    state, checked = state_of(snapshot), time.perf_counter()
    objects.restore(state.shell, {piece.key: piece.tensor for piece in state.pieces})
    torch.cuda.synchronize()
    ended = time.perf_counter()
    if sums_of(objects) != expected:
        raise RuntimeError("the restored state differs")
    return checked - started, ended - checked


def dcp_save(objects: Objects, folder: Path) -> None:
    from torch.distributed.checkpoint import save

    save(objects.nested(), checkpoint_id=folder, no_dist=True)


def dcp_load(size: int, folder: Path) -> float:
    """Load with DCP into a model whose optimizer has its states already, which DCP needs."""
    from torch.distributed.checkpoint import load

    objects = trained(size)
    nested = objects.nested()
    return synced(lambda: load(nested, checkpoint_id=folder, no_dist=True))


def torch_save(tensors: dict[str, torch.Tensor], folder: Path) -> float:
    took = synced(lambda: torch.save(tensors, folder / "whole.pt"))
    (folder / "whole.pt").unlink()
    return took


def async_save_stall(tensors: dict[str, torch.Tensor], folder: Path) -> float:
    from torch.distributed.checkpoint import async_save

    torch.cuda.synchronize()
    started = time.perf_counter()
    saving = async_save(dict(tensors), checkpoint_id=folder / "dcp", no_dist=True)
    stall = time.perf_counter() - started
    getattr(saving, "upload_completion", saving).result()
    shutil.rmtree(folder / "dcp")
    return stall


# Helpers


def guarded(what: str, once: Callable[[], float], runs: int) -> Iterator[Row]:
    """Yield a row for one of torch's own saves. If it fails, for example on a full disk, the row shows the error."""
    try:
        yield Row(what, None, tuple(once() for _ in range(runs)))
    except Exception as error:  # any failure of torch's save must not lose the other rows
        yield Row(what, None, (), note=str(error).splitlines()[0])


def compute(about_s: float) -> Callable[[], None]:
    """Return matrix products that keep the GPU busy for about that long."""
    one = torch.randn(8192, 8192, dtype=torch.bfloat16, device=CUDA)
    out = torch.empty_like(one)

    def products(count: int) -> None:
        for _ in range(count):
            torch.mm(one, one, out=out)

    products(20)
    count = max(1, round(about_s / synced(lambda: products(50)) * 50))
    return lambda: products(count)


def fill(tensors: dict[str, torch.Tensor], step: int) -> None:
    for tensor in tensors.values():
        tensor.fill_(step)


def change(tensors: dict[str, torch.Tensor]) -> None:
    """Change all tensors in place, like an optimizer's step. Small integers are exact in every type used here."""
    for tensor in tensors.values():
        tensor.add_(1)


def check(slots: Slots, step: int) -> None:
    """Check that the snapshot of this step exists and that every element in it equals the number of the step."""
    slot = next(slot for slot in slots.slots if (record := slot.record()) and record.step == step)
    snapshot = open_snapshot(slot.path)
    if snapshot is None:
        raise RuntimeError(f"step {step} is missing")
    for piece in state_of(snapshot).pieces:
        if not bool((piece.tensor.to(CUDA) == step).all()):
            raise RuntimeError(f"{piece.key} of step {step} has wrong values")


def timed(act: Callable[[], object]) -> float:
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


def synced(act: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    act()
    torch.cuda.synchronize()
    return time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
