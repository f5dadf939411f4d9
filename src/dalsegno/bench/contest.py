"""Who takes part in a benchmark of the ladder, and one step of each. Runs in every rank; `ladder` can be imported."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from dalsegno.bench.ask import LadderAsk
from dalsegno.bench.ladder_report import BASELINE
from dalsegno.bench.place import Place
from ladder import RUNGS, Rung
from ladder.torch_data_parallel import why_not_measured
from ladder.torch_ddp import TorchDDP
from ladder.train import make_model, train_step, width_of
from ladder.watch import CudaWatch, Span, Watch
from ladder.wire import Tally, Wire

LEARNING_RATE = 1e-3


@dataclass
class Watched:
    """One step that was looked at closely."""

    took_s: float
    spans: list[Span]
    tally: dict[str, Any]


@dataclass
class Contestant:
    """A rung with a model of its own, and what was measured of it on this rank."""

    name: str
    rung: Rung
    optimizer: Any
    batch: tuple[Any, Any]
    steps_s: list[float] = field(default_factory=list)
    tcp_bytes: list[int | None] = field(default_factory=list)
    watched: list[Watched] = field(default_factory=list)

    def step(self, place: Place) -> float:
        """Seconds of one step, from a common start."""
        place.meet()
        begin = time.perf_counter()
        if place.rank == 0 or not self.rung.whole_batch:
            train_step(self.rung, *self.batch, self.optimizer)
        place.finish()
        return time.perf_counter() - begin

    def timed_step(self, place: Place) -> None:
        before = place.tcp_bytes_sent()
        self.steps_s.append(self.step(place))
        after = place.tcp_bytes_sent()
        self.tcp_bytes.append(None if after is None or before is None else after - before)

    def watched_step(self, place: Place) -> None:
        wire = self.rung.wire
        wire.watch.on, wire.tally = True, Tally()
        took_s = self.step(place)
        self.watched.append(Watched(took_s, wire.watch.spans(), asdict(wire.tally)))
        wire.watch.on = False


def names(ask: LadderAsk) -> list[tuple[str, str, float | None]]:
    """Each row: its name, its rung, its bucket cap in MiB (None: torch's own)."""
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


def why_not(rung: str, place: Place) -> str:
    """Why a rung cannot be measured here; empty if it can."""
    if rung != "data-parallel":
        return ""
    if place.local_size != place.size:
        return "one process cannot use the GPUs of other machines"
    return why_not_measured(torch.cuda.device_count() if place.device.type == "cuda" else 0)


def enter(name: str, rung: str, cap_mb: float | None, ask: LadderAsk, place: Place) -> Contestant:
    """A contestant with a fresh model; all have the same weights and see the same data."""
    watch = CudaWatch() if place.device.type == "cuda" else Watch()
    model = make_model(ask.model_mb, ask.layers).to(place.device)
    made = RUNGS.get(rung, Rung)(model, Wire(watch), bucket_cap_mb=cap_mb)
    data = torch.randn(2, ask.batch * place.size, width_of(ask.model_mb, ask.layers), device=place.device)
    batch = made.my_part(data[0]), made.my_part(data[1])
    return Contestant(name, made, torch.optim.SGD(made.parameters, lr=LEARNING_RATE), batch)


def make_countable(contestant: Contestant) -> None:
    """torch's DDP is timed without the hook that counts its buckets; from here on it has it."""
    if isinstance(contestant.rung, TorchDDP):
        contestant.rung.count_buckets()
