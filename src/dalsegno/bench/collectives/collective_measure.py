"""Measure a collective with torch.distributed on one rank: NCCL on GPUs, gloo on CPUs. Imports torch.

`bench-collective '{"test": "all_reduce", …}'` runs one rank, in the environment that torchrun or srun sets. Rank 0
prints what the corresponding program of nccl-tests would print. The exit code is 1 if received data was wrong.

torch's all_reduce, broadcast and reduce work in place only. For their out-of-place rows, the input is copied to a
second buffer before the clock starts.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from dalsegno.bench.collectives.collectives import (
    TESTS,
    Averaging,
    CollectiveAsk,
    CollectiveTest,
    DataType,
    ElementCounts,
    bandwidths,
    count_elements,
    expected_values,
    instance_id,
    moved_values,
    reduced_values,
    tolerance,
)
from dalsegno.bench.ladder.ladder import world_env
from dalsegno.bench.nccl.render import render_footer, render_header, render_row
from dalsegno.bench.nccl.table import CPU, NcclDevice, NcclRow, NcclTable, NcclTest, NcclTiming, average_busbw
from dalsegno.errors import UsageError

Call = Callable[[], Any]
_TIMEOUT = timedelta(minutes=10)
_POISON = 100  # value that fills the receive buffer before a call; no correct result contains only this value
_CHUNK = 1 << 24  # number of elements checked at once, which limits the memory for the check
# torch 2.13 renamed these two functions.
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class CollectiveRank:
    """This rank's device and process group. Times and counts of wrong values are exchanged over the group that the
    measured calls use."""

    def __init__(self, wanted: str = "auto") -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.local = int(os.environ.get("LOCAL_RANK", 0))
        self.device = choose_device(wanted, self.local, int(os.environ.get("LOCAL_WORLD_SIZE", self.size)))
        self.backend = "nccl" if self.device.type == "cuda" else "gloo"
        if self.backend == "nccl":
            torch.cuda.set_device(self.device)
        dist.init_process_group(self.backend, rank=self.rank, world_size=self.size, timeout=_TIMEOUT)

    def finish(self) -> None:
        """Wait until the device is idle."""
        if self.backend == "nccl":
            torch.cuda.synchronize()

    def barrier(self) -> None:
        """Wait until all ranks have called this and their devices are idle."""
        self.finish()
        dist.barrier(device_ids=[self.device.index]) if self.backend == "nccl" else dist.barrier()
        self.finish()

    def combine(self, value: float, how: Averaging) -> float:
        """Combine the values of all ranks into one."""
        operations = {Averaging.MIN: dist.ReduceOp.MIN, Averaging.MAX: dist.ReduceOp.MAX}
        found = torch.tensor([value], dtype=torch.float64, device=self.device)
        if how is Averaging.RANK_0:
            dist.broadcast(found, 0)
        else:
            dist.all_reduce(found, op=operations.get(how, dist.ReduceOp.SUM))
        return float(found.item()) / (self.size if how is Averaging.MEAN else 1)

    def add_up(self, value: float) -> float:
        return self.combine(value, Averaging.MEAN) * self.size

    def leave(self) -> None:
        dist.destroy_process_group()


def gather_json(value: Any, ranks: int, device: Any) -> list[Any]:
    """Return the values of all ranks, exchanged as JSON. torch's own exchange of objects needs numpy and pickle."""
    text = json.dumps(value).encode()
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(ranks)]
    dist.all_gather(lengths, torch.tensor([len(text)], device=device))
    longest = max(int(each.item()) for each in lengths)
    padded = torch.tensor(list(text.ljust(longest)), dtype=torch.uint8, device=device)
    found = [torch.zeros_like(padded) for _ in range(ranks)]
    dist.all_gather(found, padded)
    return [json.loads(bytes(each.tolist())) for each in found]


def choose_device(wanted: str, local_rank: int, local_size: int) -> Any:
    """Return the device of a rank. `auto` means a GPU, or the CPU if this host has fewer GPUs than ranks.

    A single visible GPU under srun counts as the rank's own, because srun may hide the others. If `wanted` is `cuda`
    and torch finds no GPU, the process exits with a message.
    """
    gpus = torch.cuda.device_count()
    if wanted == "cuda" and not gpus:
        raise SystemExit(f"torch {torch.__version__} finds no GPU on {socket.gethostname()}")
    own = gpus == 1 and "SLURM_STEP_ID" in os.environ
    if wanted == "cpu" or (wanted == "auto" and gpus < local_size and not own):
        return torch.device("cpu")
    return torch.device("cuda", local_rank if local_rank < gpus else 0)


# Buffers and calls of the measured collectives


@dataclass(frozen=True)
class PlacedCall:
    """One collective on its buffers, out of place or in place. `sent` and `received` may share memory."""

    call: Call
    sent: Any
    received: Any


def place(
    test: CollectiveTest, counts: ElementCounts, dtype: Any, op: Any, root: int, rank: CollectiveRank, *, in_place: bool
) -> PlacedCall:
    """Allocate the buffers of one size and return the call on them."""
    n, me = rank.size, rank.rank
    most = max(counts.send, counts.receive)
    first = torch.empty(most, dtype=dtype, device=rank.device)
    second = first if in_place else torch.empty(most, dtype=dtype, device=rank.device)
    sent, received = first[: counts.send], second[: counts.receive]
    part = slice(me * counts.shown, (me + 1) * counts.shown)
    kind = test.test
    if kind is NcclTest.ALL_REDUCE:
        return PlacedCall(partial(dist.all_reduce, received, op=op), sent, received)
    if kind is NcclTest.BROADCAST:
        return PlacedCall(partial(dist.broadcast, received, root), sent, received)
    if kind is NcclTest.REDUCE:
        return PlacedCall(partial(dist.reduce, received, root, op=op), sent, received)
    if kind is NcclTest.ALL_GATHER:
        sent = second[part] if in_place else sent
        return PlacedCall(partial(_ALL_GATHER, received, sent), sent, received)
    if kind is NcclTest.REDUCE_SCATTER:
        received = first[part] if in_place else received
        return PlacedCall(partial(_REDUCE_SCATTER, received, sent, op=op), sent, received)
    if kind is NcclTest.ALLTOALL:
        return PlacedCall(partial(dist.all_to_all_single, received, sent), sent, received)
    if kind is NcclTest.SCATTER:
        received = first[part] if in_place and me == root else received
        parts = list(sent.chunk(n)) if me == root else None
        return PlacedCall(partial(dist.scatter, received, parts, src=root), sent, received)
    if kind is NcclTest.GATHER:
        sent = second[part] if in_place and me == root else sent
        parts = list(received.chunk(n)) if me == root else None
        return PlacedCall(partial(dist.gather, sent, parts, dst=root), sent, received)
    right, left = (me + 1) % n, (me - 1) % n
    return PlacedCall(partial(_send_and_receive, sent, received, right, left), sent, received)


def _send_and_receive(sent: Any, received: Any, right: int, left: int) -> None:
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, right), dist.P2POp(dist.irecv, received, left)])
    for work in works:
        work.wait()


_IN_TENSOR = (NcclTest.ALL_REDUCE, NcclTest.BROADCAST, NcclTest.REDUCE)  # torch offers these operations in place only


def repeat(values: Sequence[float], count: int, dtype: Any, device: Any) -> Any:
    """Return a tensor that repeats the values."""
    period = torch.tensor(values, dtype=torch.float64).to(dtype).to(device)
    return period.repeat(count // len(values) + 1)[:count]


def write_repeated(target: Any, values: Sequence[float]) -> None:
    """Fill a tensor with repeated values, in pieces, because a second tensor of this size may not fit into memory."""
    step = _CHUNK // len(values) * len(values)
    piece = repeat(values, min(step, len(target)), target.dtype, target.device)
    for at in range(0, len(target), step):
        part = target[at : at + step]
        part.copy_(piece[: len(part)])


def fill(
    placed: PlacedCall, test: CollectiveTest, counts: ElementCounts, data: DataType, op: str, rank: CollectiveRank
) -> None:
    """Fill the buffers with the test data of this rank."""
    placed.received.fill_(_POISON)
    n, me, to = rank.size, rank.rank, placed.sent

    def values(seed: int, target: int = 0) -> list[int]:
        return reduced_values(seed, n, data, op) if test.reduces else moved_values(seed, target)

    if test.test in (NcclTest.ALLTOALL, NcclTest.SCATTER):
        for target in range(n):
            piece = to[target * counts.shown : (target + 1) * counts.shown]
            write_repeated(piece, values(me, target))
    else:
        write_repeated(to, values(me))
    if test.test in _IN_TENSOR:
        placed.received.copy_(to)


def count_wrong(
    placed: PlacedCall,
    test: CollectiveTest,
    counts: ElementCounts,
    data: DataType,
    op: str,
    root: int,
    rank: CollectiveRank,
) -> float:
    """Return the number of elements that this rank received wrongly."""
    n, me, got = rank.size, rank.rank, placed.received
    if test.reduces:
        if test.rooted and me != root:
            return 0.0
        if test.test is NcclTest.REDUCE_SCATTER:  # each rank's part starts at another offset of the period
            whole = expected_values(n, data, op)
            shift = me * counts.shown % len(whole)
            return _differences(got, whole[shift:] + whole[:shift], tolerance(n, data, op))
        return _differences(got, expected_values(n, data, op), tolerance(n, data, op))
    if test.test is NcclTest.BROADCAST:
        return _differences(got, moved_values(root))
    if test.test is NcclTest.SENDRECV:
        return _differences(got, moved_values((me - 1) % n))
    if test.test is NcclTest.SCATTER:
        return _differences(got, moved_values(root, me))
    if test.rooted and me != root:
        return 0.0
    target = me if test.test is NcclTest.ALLTOALL else 0
    pieces = (got[at * counts.shown : (at + 1) * counts.shown] for at in range(n))
    return sum(_differences(piece, moved_values(at, target)) for at, piece in enumerate(pieces))


def _differences(got: Any, values: Sequence[float], allowed: float = 0.0) -> float:
    period, wrong = len(values), 0.0
    step = _CHUNK // period * period
    for at in range(0, len(got), step):
        piece = got[at : at + step].to(torch.float64)
        right = repeat(values, len(piece), torch.float64, piece.device)
        if not got.dtype.is_floating_point:
            right = right.trunc()
        # Written as `not <=`, because `>` is false for NaN and would count it as correct.
        wrong += float((~((piece - right).abs() <= allowed * right.abs().clamp(min=1.0))).sum().item())
    return wrong


# Measurement of times


def time_calls(call: Call, iters: int, rank: CollectiveRank) -> float:
    """Return the mean time of one call in microseconds. All ranks start at the same time."""
    rank.barrier()
    begin = time.perf_counter()
    for _ in range(iters):
        call()
    rank.finish()
    return (time.perf_counter() - begin) / iters * 1e6


def measure_placement(
    ask: CollectiveAsk, size: int, data: DataType, op: str, rank: CollectiveRank, *, in_place: bool
) -> NcclTiming:
    """Return the time, the bandwidths and the number of wrong values of one size."""
    test = TESTS[ask.test]
    counts = count_elements(test, size, data, rank.size)
    reduce_op = getattr(dist.ReduceOp, {"prod": "PRODUCT"}.get(op, op.upper()), None)
    placed = place(test, counts, getattr(torch, data.torch), reduce_op, ask.root, rank, in_place=in_place)
    fill(placed, test, counts, data, op, rank)
    took_us = rank.combine(time_calls(placed.call, ask.iters, rank), Averaging(ask.average))
    wrong: float | None = None
    if ask.check and (test.in_place_checked or not in_place):
        wrong = 0.0
        for _ in range(ask.check):
            fill(placed, test, counts, data, op, rank)
            rank.barrier()
            placed.call()
            rank.finish()
            wrong += rank.add_up(count_wrong(placed, test, counts, data, op, ask.root, rank))
    algbw, busbw = bandwidths(test, counts.size, took_us, rank.size)
    return NcclTiming(took_us, algbw, busbw, wrong)


def warm_up(ask: CollectiveAsk, rank: CollectiveRank) -> None:
    """Run the largest and the smallest size untimed, so that connections and buffers exist."""
    data, op = ask.data_types()[0], ask.operations(rank.backend)[0]
    for size in {ask.max_bytes, ask.min_bytes}:
        quick = replace(ask, iters=max(1, ask.warmup_iters), check=0)
        if ask.warmup_iters:
            measure_placement(quick, size, data, op, rank, in_place=True)


def measure_rows(ask: CollectiveAsk, rank: CollectiveRank) -> Iterator[NcclRow]:
    """Yield a row for each size, data type and operation."""
    test = TESTS[ask.test]
    warm_up(ask, rank)
    for _ in range(ask.cycles):
        for data in ask.data_types():
            for op in ask.operations(rank.backend):
                for size in ask.sizes():
                    counts = count_elements(test, size, data, rank.size)
                    yield NcclRow(
                        size=counts.size,
                        count=counts.shown,
                        dtype=data.name,
                        redop="sum" if test.test is NcclTest.SENDRECV else op,
                        root=ask.root if test.rooted else -1,
                        out_of_place=measure_placement(ask, size, data, op, rank, in_place=False),
                        in_place=measure_placement(ask, size, data, op, rank, in_place=True),
                    )


# Lines of the header


def describe_device(rank: CollectiveRank) -> tuple[NcclDevice, str]:
    """Return this rank's line for the header, and the id that the cloud gives its machine."""
    pci, product = CPU, processor_name()
    if rank.backend == "nccl":
        about = torch.cuda.get_device_properties(rank.device)
        numbers = [getattr(about, f"pci_{name}_id", 0) for name in ("domain", "bus", "device")]
        pci, product = "{:04x}:{:02x}:{:02x}".format(*numbers), str(about.name)
    device = rank.device.index if rank.backend == "nccl" else rank.local
    host = socket.gethostname().partition(".")[0]
    return NcclDevice(rank.rank, 0, os.getpid(), host, device, pci, product), instance_id(read_file)


def processor_name() -> str:
    names = [line.partition(":")[2].strip() for line in read_file("/proc/cpuinfo").splitlines() if "model name" in line]
    return next(iter(names), platform.machine())


def read_file(path: str) -> str:
    try:
        with open(path, errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def describe(ask: CollectiveAsk, rank: CollectiveRank) -> NcclTable:
    """Return the table without its rows. All ranks must call this."""
    device, known = describe_device(rank)
    found = gather_json([asdict(device), known], rank.size, rank.device)
    devices = tuple(NcclDevice(**each) for each, _ in found)
    ids = {each["host"]: known for each, known in found}
    library = ".".join(map(str, torch.cuda.nccl.version())) if rank.backend == "nccl" else "gloo"
    program = f"measured with torch {torch.__version__}, {'NCCL ' * (rank.backend == 'nccl')}{library}"
    hosts = tuple(f"host {host} instance {known or 'unknown'}" for host, known in ids.items())
    return NcclTable(TESTS[ask.test].test, (), devices, ask.settings(), notes=(program, *hosts))


def finish_table(table: NcclTable, rows: Sequence[NcclRow]) -> NcclTable:
    """Return the table with its rows and its summary."""
    done = tuple(rows)
    wrong = sum(row.wrong > 0 for row in done)
    return replace(table, rows=done, out_of_bounds=wrong, avg_busbw=average_busbw(done), concluded=True)


def measure(ask: CollectiveAsk, rank: CollectiveRank, write: Callable[[str], object]) -> NcclTable:
    """Measure on this rank. Rank 0 passes the output, in the format of nccl-tests, to `write` row by row."""
    say: Callable[[str], object] = write if rank.rank == 0 else lambda text: None
    table = describe(ask, rank)
    say(render_header(table))
    rows = []
    for row in measure_rows(ask, rank):
        rows.append(row)
        say(render_row(row, table.columns))
    table = finish_table(table, rows)
    say(render_footer(table))
    return table


def main(arguments: Sequence[str]) -> int:
    """Run each test in the arguments as the rank that the environment variables give. Rank 0 prints the results."""
    from dalsegno.hostlist import expand

    os.environ.update(world_env(os.environ, first_host=lambda hosts: expand(hosts)[0]) or {})

    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    asks = [CollectiveAsk.from_json(each) for each in arguments]
    last = int(os.environ["WORLD_SIZE"]) - 1
    if any(ask.root > last for ask in asks):
        sys.stderr.write(f"-r names a rank that does not exist: the last rank is {last}\n")
        return 2
    rank = CollectiveRank(asks[0].device)
    try:
        return int(any([measure(ask, rank, write).out_of_bounds for ask in asks]))
    except UsageError as error:  # for example, the backend does not support the operation
        sys.stderr.write(f"{error.what}: {error.hint}\n")
        return error.exit_code
    finally:
        rank.leave()
