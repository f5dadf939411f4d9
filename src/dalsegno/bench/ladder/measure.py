"""The ladder benchmark on one rank. Rungs are measured in turn, so that noise affects all of them equally.

`python -m dalsegno.bench.ladder.measure FOLDER` runs one rank on this machine. `examples/` must be on its import path.
The folder holds `ask.json` and the rendezvous file of the ranks. Rank 0 writes `progress` and `report.json` there.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from statistics import median_low
from typing import Any

import torch
import torch.distributed as dist

from dalsegno.bench.ladder.ladder import (
    ASK,
    BASELINE,
    MEETING,
    PROGRESS,
    REPORT,
    LadderAsk,
    LadderReport,
    RankTraffic,
    RungResult,
    StepSpan,
    tcp_bytes_sent,
)
from ladder import RUNGS, Rung
from ladder.torch_data_parallel import why_not_measured
from ladder.torch_ddp import TorchDDP
from ladder.train import make_model, train_step, width_of
from ladder.watch import CudaWatch, Span, Watch
from ladder.wire import Tally, Wire

# Device and process group: nccl if there is a GPU for each rank, else gloo on the CPU

_TIMEOUT = timedelta(seconds=120)


class RankDevice:
    """This rank's device and groups. Barriers use a second group over gloo, so that they do not use the GPU."""

    def __init__(self, wanted: str, meeting: str = "env://") -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.local_size = int(os.environ.get("LOCAL_WORLD_SIZE", self.size))
        self.device = _device(wanted, self.local_size)
        self.backend = "nccl" if self.device.type == "cuda" else "gloo"
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        dist.init_process_group(
            self.backend, init_method=meeting, rank=self.rank, world_size=self.size, timeout=_TIMEOUT
        )
        self._aside = dist.new_group(backend="gloo", timeout=_TIMEOUT)

    def barrier(self) -> None:
        """Wait until all ranks have called this and their devices are idle."""
        self.finish()
        dist.barrier(group=self._aside)

    def finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def tcp_bytes_sent(self) -> int | None:
        """Return the bytes sent over TCP; None with NCCL, which uses TCP only if there is no faster way."""
        return tcp_bytes_sent() if self.backend == "gloo" else None

    def gather(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self._aside)
        return found

    def leave(self) -> None:
        dist.destroy_process_group()


def _device(wanted: str, local_size: int) -> Any:
    gpus, local_rank = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", 0))
    if wanted == "cpu" or (wanted == "auto" and gpus < local_size):
        return torch.device("cpu")
    return torch.device("cuda", local_rank if local_rank < gpus else 0)  # srun may show each task only its own GPU


# The rungs that are measured

LEARNING_RATE = 1e-3


@dataclass
class WatchedStep:
    """The duration of one step, its spans and its traffic."""

    took_s: float
    spans: list[Span]
    tally: dict[str, Any]


@dataclass
class MeasuredRung:
    """One variant under test (a rung of `examples/ladder`), with its model and its measurements on this rank."""

    name: str
    rung: Rung
    optimizer: Any
    batch: tuple[Any, Any]
    steps_s: list[float] = field(default_factory=list)
    tcp_bytes: list[int | None] = field(default_factory=list)
    watched: list[WatchedStep] = field(default_factory=list)

    def step(self, place: RankDevice) -> float:
        """Run one step, starting at the same time as the other ranks. Return its duration in seconds."""
        place.barrier()
        begin = time.perf_counter()
        if place.rank == 0 or not self.rung.whole_batch:
            train_step(self.rung, *self.batch, self.optimizer)
        place.finish()
        return time.perf_counter() - begin

    def timed_step(self, place: RankDevice) -> None:
        before = place.tcp_bytes_sent()
        self.steps_s.append(self.step(place))
        after = place.tcp_bytes_sent()
        self.tcp_bytes.append(None if after is None or before is None else after - before)

    def watched_step(self, place: RankDevice) -> None:
        wire = self.rung.wire
        wire.watch.on, wire.tally = True, Tally()
        took_s = self.step(place)
        self.watched.append(WatchedStep(took_s, wire.watch.spans(), asdict(wire.tally)))
        wire.watch.on = False


def list_rungs(ask: LadderAsk) -> list[tuple[str, str, float | None]]:
    """Return the name, rung and bucket cap in MiB of each row of the report. If the cap is None, torch's default
    applies."""
    caps = ask.bucket_caps_mb
    return [
        ("alone", "", None),
        ("gather", "gather", None),
        ("per-parameter", "per-parameter", None),
        ("buckets", "buckets", None),
        *((f"overlap {cap:g}", "overlap", cap) for cap in caps),
        ("ring", "ring", None),
        ("data-parallel", "data-parallel", None),
        (BASELINE, "ddp", None),
        *((f"ddp {cap:g}", "ddp", cap) for cap in caps),
    ]


def why_not(rung: str, place: RankDevice) -> str:
    """Return why a rung cannot be measured here; empty if it can."""
    if rung != "data-parallel":
        return ""
    if place.local_size != place.size:
        return "one process cannot use the GPUs of other machines"
    return why_not_measured(torch.cuda.device_count() if place.device.type == "cuda" else 0)


def create_measured_rung(name: str, rung: str, cap_mb: float | None, ask: LadderAsk, place: RankDevice) -> MeasuredRung:
    """Create a rung to measure. Every rung gets its own model, with the same weights and data."""
    watch = CudaWatch() if place.device.type == "cuda" else Watch()
    model = make_model(ask.model_mb, ask.layers).to(place.device)
    made = RUNGS.get(rung, Rung)(model, Wire(watch), bucket_cap_mb=cap_mb)
    data = torch.randn(2, ask.batch * place.size, width_of(ask.model_mb, ask.layers), device=place.device)
    batch = made.my_part(data[0]), made.my_part(data[1])
    return MeasuredRung(name, made, torch.optim.SGD(made.parameters, lr=LEARNING_RATE), batch)


def make_countable(measured: MeasuredRung) -> None:
    """Install the hook that counts the buckets of torch's DDP. Timed steps run without it."""
    if isinstance(measured.rung, TorchDDP):
        measured.rung.count_buckets()


# Measurement of all rungs

EachRound = Callable[[int], None]  # called with the number of the next step
WARM_UP_ROUNDS = 2  # DDP rebuilds its buckets after the first step
WATCHED_ROUNDS = 3


def measure(ask: LadderAsk, meeting: str, each_round: EachRound) -> LadderReport | None:
    """Measure as the rank that the environment variables give. Return the report on rank 0, and None on all other
    ranks."""
    place = RankDevice(ask.device, meeting)
    try:
        return _measure(ask, place, each_round)
    finally:
        place.leave()


def _measure(ask: LadderAsk, place: RankDevice, each_round: EachRound) -> LadderReport | None:
    rows = [(*row, why_not(row[1], place)) for row in list_rungs(ask)]
    measured_rungs = [create_measured_rung(name, rung, cap, ask, place) for name, rung, cap, why in rows if not why]
    for measured in measured_rungs * WARM_UP_ROUNDS:
        measured.step(place)
    for number in range(ask.steps):
        each_round(number)
        for measured in _rotated(measured_rungs, number):
            measured.timed_step(place)
    for measured in measured_rungs:
        make_countable(measured)
        for _ in range(WATCHED_ROUNDS):
            measured.watched_step(place)
    found = [place.gather(_facts(each)) for each in measured_rungs]
    if place.rank:
        return None
    return _report(place, measured_rungs, [_result(*row[::3], found, measured_rungs) for row in rows])


def _rotated(measured_rungs: Sequence[MeasuredRung], number: int) -> list[MeasuredRung]:
    """Return the rungs with a different one first in each round, so that the order does not affect the result."""
    first = number % len(measured_rungs)
    return [*measured_rungs[first:], *measured_rungs[:first]]


def _facts(measured: MeasuredRung) -> tuple[list[float], list[int | None], list[WatchedStep]]:
    return measured.steps_s, measured.tcp_bytes, measured.watched


def _report(place: RankDevice, measured_rungs: Sequence[MeasuredRung], results: list[RungResult]) -> LadderReport:
    parameters = measured_rungs[0].rung.parameters
    return LadderReport(
        processes=place.size,
        backend=place.backend,
        device=torch.cuda.get_device_name() if place.device.type == "cuda" else "cpu",
        torch=torch.__version__,
        parameters=sum(each.numel() for each in parameters),
        gradient_bytes=sum(each.numel() * each.element_size() for each in parameters),
        rungs=tuple(results),
    )


def _result(name: str, why: str, found: list[Any], measured_rungs: Sequence[MeasuredRung]) -> RungResult:
    if why:
        return RungResult(name, why_not=why)
    by_rank = next(facts for facts, each in zip(found, measured_rungs, strict=True) if each.name == name)
    steps = zip(*(steps_s for steps_s, _, _ in by_rank), strict=True)
    watched = _typical([watched for _, _, watched in by_rank])
    return RungResult(
        name,
        steps_s=tuple(max(by_ranks) for by_ranks in steps),
        traffic=tuple(_traffic(each, tcp) for each, (_, tcp, _) in zip(watched, by_rank, strict=True)),
        marks=tuple(StepSpan(rank, *span) for rank, each in enumerate(watched) for span in each.spans),
    )


def _typical(by_rank: list[list[WatchedStep]]) -> list[WatchedStep]:
    """Return every rank's record of the same step: the watched step of median duration on its slowest rank."""
    lengths = [max(each.took_s for each in step) for step in zip(*by_rank, strict=True)]
    at = lengths.index(median_low(lengths))
    return [steps[at] for steps in by_rank]


def _traffic(watched: WatchedStep, tcp_bytes: list[int | None]) -> RankTraffic:
    known = [each for each in tcp_bytes if each is not None]
    return RankTraffic(**watched.tally, tcp_bytes=median_low(known) if known else None)


def main(folder: Path) -> None:
    """Measure as one of the ranks that `dalsegno bench ddp` starts on this machine."""
    parent = os.getppid()
    ask = LadderAsk.from_json((folder / ASK).read_text())

    def each_round(number: int) -> None:
        if os.getppid() != parent:
            sys.exit("the process that started this benchmark has ended")
        if os.environ["RANK"] == "0" and ask.progress(number):
            (folder / PROGRESS).write_text(ask.progress(number))

    report = measure(ask, f"file://{folder / MEETING}", each_round)
    if report:
        (folder / REPORT).write_text(json.dumps(report.to_dict()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
