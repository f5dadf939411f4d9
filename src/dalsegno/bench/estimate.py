"""Estimate a training run: time, cost, memory, failures, and the share of time that makes progress. Pure.

Every formula and every assumption is in docs/estimate.md. Published failure rates are in `failure_rates.csv`. The
measured cost of a failure with Dal Segno is in docs/performance.md.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import sqrt
from pathlib import Path

from dalsegno.bench.nccl.machines import named_instance
from dalsegno.bench.training_memory import STATE, MemoryChoice, MemoryFit, ModelShape, memory_choices
from dalsegno.errors import DalsegnoError, UsageError
from dalsegno.hardware import Gpu, Instance, gpu_of
from dalsegno.hardware.catalog import ListPrice, find_price

MFU = 0.4  # model FLOPs utilization; Llama 3 reached 0.38 to 0.43 on 8,192 to 16,384 H100
DAY_S = 86400.0
LARGEST = 1e20  # largest number of parameters or tokens

# Recovery without Dal Segno has three steps: Slurm declares a silent node down (SlurmdTimeout), Slurm requeues the job,
# and the script starts.
SLURM_TIMEOUT_S, REQUEUE_S, SCRIPT_START_S = 300.0, 121.0, 600.0
STORAGE_MOST, STORAGE_PER_NODE = 20.0, 2.0  # highest speed of writing checkpoints in GB/s: in total, and per node
# With Dal Segno: the time from a power cut to the next step, measured on virtual hosts (docs/performance.md), and an
# assumed time to start the script, CUDA and NCCL on real machines.
RESUME_S, START_ALLOWANCE_S = 1.83, 60.0
SNAPSHOT_INTERVAL_S = 60.0  # time between snapshots; longer if they would take more than SNAPSHOT_SHARE of the time
SNAPSHOT_SHARE = 0.01  # the same limit as `memory_every="auto"`
SNAPSHOT_S_PER_BYTE = 0.081 / (4 << 30)  # seconds per byte of one GPU's state, measured on an H200

_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12, "p": 1e15}


def parse_count(text: str, option: str) -> float:
    """Parse a number such as 70B, 1.4T or 7e9."""
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?(?:e\+?\d{1,2})?)([kmbgtp]?)", text.strip().lower())
    value = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if not found:
        raise UsageError(f"invalid number `{text}`", where=option, hint="such as 70B, 1.4T or 7e9")
    if not 1 <= value <= LARGEST:
        raise UsageError(f"`{text}` is not between 1 and {LARGEST:g}", where=option, hint="such as 70B, 1.4T or 7e9")
    return value


@dataclass(frozen=True)
class FailureRate:
    """A published rate of failures that interrupt training."""

    name: str
    per_1000_node_days: float
    source: str


@cache
def failure_rates() -> tuple[FailureRate, ...]:
    """Return the published rates. The table has no quotes and no commas inside a cell."""
    lines = (Path(__file__).parent / "failure_rates.csv").read_text(encoding="utf-8").splitlines()[1:]
    cells = (line.split(",") for line in lines)
    return tuple(FailureRate(name, float(rate), source) for name, _, _, _, rate, source in cells)


@dataclass(frozen=True)
class TrainingAsk:
    """The model and data to train, and the machines."""

    shape: ModelShape
    tokens: float
    instance: Instance
    nodes: int
    mfu: float = MFU
    per_1000_node_days: float | None = None  # failures per 1000 node-days; None means the first published rate
    storage_gbytes_per_s: float | None = None


@dataclass(frozen=True)
class GoodputEstimate:
    """The slowdown of a run through failures and checkpoints. `share` is the share of the time with progress."""

    interval_s: float  # the time between two checkpoints or snapshots
    stall_share: float  # the share of the time that saving takes
    recovery_s: float
    lost_s: float  # time of the work that is repeated after a failure
    share: float
    elapsed_s: float


@dataclass(frozen=True)
class TrainingEstimate:
    """The estimate of one run."""

    ask: TrainingAsk
    gpu: Gpu
    flop: float
    flop_per_s: float  # the sum of all GPUs, at the given MFU
    ideal_s: float
    price: ListPrice | None
    memory: tuple[MemoryChoice, ...]
    rate: float  # failures per 1000 node-days
    mtbf_s: float  # the mean time between failures on all nodes of the run
    plain_slurm: GoodputEstimate
    with_dalsegno: GoodputEstimate

    @property
    def fits(self) -> bool:
        """Return whether the model fits into the GPUs' memory in at least one way to spread it."""
        return any(each.fit is not MemoryFit.NO for each in self.memory)

    @property
    def gpus(self) -> int:
        return self.ask.nodes * self.ask.instance.gpus

    def cost_usd(self, seconds: float) -> float | None:
        """Return the list price of all GPUs for this time; None if the price is unknown."""
        return self.price.usd_per_gpu_hour * self.gpus * seconds / 3600 if self.price else None

    def failures(self, per_1000_node_days: float | None = None) -> float:
        """Return how many failures to expect in the training time, without the time that failures add."""
        rate = self.rate if per_1000_node_days is None else per_1000_node_days
        return rate / 1000 * self.ask.nodes * self.ideal_s / DAY_S

    def to_dict(self) -> dict[str, object]:
        """Return the estimate for `--json`."""
        shape = self.ask.shape
        return {
            "params": shape.params, "tokens": self.ask.tokens, "layers": shape.layers, "hidden": shape.hidden,
            "sequence": shape.sequence, "micro_batch": shape.micro_batch, "instance": self.ask.instance.name,
            "nodes": self.ask.nodes, "gpus": self.gpus, "mfu": self.ask.mfu, "flop": self.flop,
            "flop_per_s": self.flop_per_s, "ideal_s": self.ideal_s, "cost_usd": self.cost_usd(self.ideal_s),
            "usd_per_gpu_hour": self.price.usd_per_gpu_hour if self.price else None,
            "price_date": self.price.date if self.price else None,
            "fits": self.fits, "memory": [choice.to_dict() for choice in self.memory],
            "failures_per_1000_node_days": self.rate, "failures": self.failures(),
            "mtbf_s": self.mtbf_s if self.rate else None,
            "failures_by_source": [
                {"name": each.name, "failures": self.failures(each.per_1000_node_days), "source": each.source}
                for each in failure_rates()
            ],
            "without": self._goodput(self.plain_slurm), "with_dalsegno": self._goodput(self.with_dalsegno),
        }  # fmt: skip

    def _goodput(self, goodput: GoodputEstimate) -> dict[str, object]:
        return {
            "interval_s": goodput.interval_s, "stall_share": goodput.stall_share, "recovery_s": goodput.recovery_s,
            "lost_s": goodput.lost_s, "goodput": goodput.share, "elapsed_s": goodput.elapsed_s,
            "cost_usd": self.cost_usd(goodput.elapsed_s),
        }  # fmt: skip


def find_training_instance(name: str) -> tuple[Instance, Gpu]:
    """Return an instance type and its GPU. Raise an error if the type has no GPU, or if the catalog lists no bfloat16
    speed for it."""
    instance = named_instance(name)
    gpu = gpu_of(instance)
    if gpu is None:
        raise UsageError(
            f"`{instance.name}` has no GPUs", where="--instance", hint="use a type with GPUs, such as p5.48xlarge"
        )
    if not gpu.bf16_tflops:
        raise DalsegnoError(
            f"the catalog has no bfloat16 speed of the {gpu.product} in `{instance.name}`",
            hint="use an instance type with A100, H100 or later GPUs",
        )
    return instance, gpu


def estimate(ask: TrainingAsk) -> TrainingEstimate:
    """Return the estimate. Without failures, the time is 6 x parameters x tokens / (GPUs x peak x MFU)."""
    _, gpu = find_training_instance(ask.instance.name)
    gpus = ask.nodes * ask.instance.gpus
    flop = 6 * ask.shape.params * ask.tokens
    speed = gpus * (gpu.bf16_tflops or 0.0) * 1e12 * ask.mfu
    ideal_s = flop / speed
    rate = failure_rates()[0].per_1000_node_days if ask.per_1000_node_days is None else ask.per_1000_node_days
    mtbf_s = DAY_S * 1000 / (rate * ask.nodes) if rate else float("inf")
    memory = memory_choices(ask.shape, gpus, ask.instance.gpus, ask.instance.gpu_memory_gib or gpu.memory_gib)
    return TrainingEstimate(
        ask, gpu, flop, speed, ideal_s, find_price(ask.instance.name, gpu.name), tuple(memory), rate, mtbf_s,
        plain_slurm=_plain_slurm(ask, ideal_s, mtbf_s), with_dalsegno=_with_dalsegno(ask, ideal_s, mtbf_s),
    )  # fmt: skip


def _plain_slurm(ask: TrainingAsk, ideal_s: float, mtbf_s: float) -> GoodputEstimate:
    """Return the goodput if Slurm requeues a failed job. Training waits for each checkpoint on shared storage."""
    storage = ask.storage_gbytes_per_s or min(STORAGE_MOST, STORAGE_PER_NODE * ask.nodes)
    save_s = STATE * ask.shape.params / (storage * 1e9)
    interval_s = checkpoint_interval(save_s, mtbf_s)
    return make_goodput(
        ideal_s, mtbf_s, interval_s, save_s / (interval_s + save_s), SLURM_TIMEOUT_S + REQUEUE_S + SCRIPT_START_S
    )


def _with_dalsegno(ask: TrainingAsk, ideal_s: float, mtbf_s: float) -> GoodputEstimate:
    """Return the goodput with snapshots in memory and a spare node. The new node fetches its part from a buddy."""
    network, state = (ask.instance.network_gbps or 0.0) / 8, STATE * ask.shape.params
    fetch_s = state / ask.nodes / (network * 1e9) if network else 0.0
    stall_s = SNAPSHOT_S_PER_BYTE * state / (ask.nodes * ask.instance.gpus)
    interval_s = max(SNAPSHOT_INTERVAL_S, stall_s / SNAPSHOT_SHARE)
    recovery_s = RESUME_S + START_ALLOWANCE_S + fetch_s
    return make_goodput(ideal_s, mtbf_s, interval_s, stall_s / interval_s, recovery_s)


def make_goodput(
    ideal_s: float, mtbf_s: float, interval_s: float, stall_share: float, recovery_s: float
) -> GoodputEstimate:
    """Return the goodput (1 - stall share) x MTBF / (MTBF + recovery + half an interval), and the resulting time."""
    lost_s = interval_s / 2
    alive = 1.0 if mtbf_s == float("inf") else mtbf_s / (mtbf_s + recovery_s + lost_s)
    share = max(1e-12, (1 - stall_share) * alive)
    return GoodputEstimate(interval_s, stall_share, recovery_s, lost_s, share, ideal_s / share)


def checkpoint_interval(save_s: float, mtbf_s: float) -> float:
    """Return the best time between checkpoints (Daly 2006): sqrt(2 d M) x (1 + sqrt(d/2M)/3 + d/18M) - d, at most M.

    d is the time that a checkpoint takes, M the mean time between failures. The first factor is Young's formula.
    """
    if mtbf_s == float("inf"):
        return 3600.0  # without failures any interval is fine; an hour limits the work that a bug in the script loses
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = save_s / (2 * mtbf_s)
    return max(1.0, sqrt(2 * save_s * mtbf_s) * (1 + sqrt(ratio) / 3 + ratio / 9) - save_s)


# Text and tables for people

MEMORY_HEADERS = ("CHOICE", "STATE", "ACTIVATIONS", "RECOMPUTED", "FITS")


def memory_rows(choices: Sequence[MemoryChoice]) -> list[list[str]]:
    """Return table rows of the memory that each GPU needs. RECOMPUTED is the size of the activations with
    recomputation."""
    return [[each.name, _gib(each.state), _gib(each.kept), _gib(each.recomputed), each.fit.value] for each in choices]


def _gib(size: float) -> str:
    gib = size / (1 << 30)
    return f"{gib:,.1f} GiB" if gib < 100 else f"{gib:,.0f} GiB"


NO_FIT = "memory   the model fits with none of the choices below: time, cost and goodput are only theoretical"


def headline(found: TrainingEstimate) -> list[str]:
    """Return what is trained, how long it takes and what it costs, without failures."""
    ask, shape = found.ask, found.ask.shape
    sustained = found.flop_per_s / 1e15
    lines = [
        f"{count_text(shape.params)} parameters, {count_text(ask.tokens)} tokens, {ask.nodes} x {ask.instance.name}"
        f" ({found.gpus} x {found.gpu.slurm_type.upper()})",
        *([] if found.fits else [NO_FIT]),
        f"compute  {found.flop:.3g} FLOP (6 x parameters x tokens), {sustained:,.3g} PFLOP/s"
        f" ({ask.mfu:.0%} of {found.gpu.bf16_tflops:g} TFLOP/s per GPU)",
        f"time     {time_text(found.ideal_s)} without failures",
    ]
    cost = found.cost_usd(found.ideal_s)
    if cost is None or found.price is None:
        return [*lines, "cost     no list price is known"]
    price = found.price
    return [
        *lines,
        f"cost     {usd_text(cost)} at {price.usd_per_gpu_hour:g} $ per GPU hour ({price.source}, {price.date})",
    ]


GOODPUT_HEADERS = ("", "PLAIN SLURM", "DAL SEGNO")


def goodput_rows(found: TrainingEstimate) -> list[list[str]]:
    """Return rows that compare plain Slurm (a requeued job with checkpoints on disk) with a run of Dal Segno."""
    sides = (found.plain_slurm, found.with_dalsegno)
    rows = [
        ["checkpoint or snapshot every", *(time_text(each.interval_s) for each in sides)],
        ["saving takes", *(f"{each.stall_share:.1%}" for each in sides)],
        ["a failure costs", *(time_text(each.recovery_s + each.lost_s) for each in sides)],
        ["goodput", *(f"{each.share:.1%}" for each in sides)],
        ["time", *(time_text(each.elapsed_s) for each in sides)],
    ]
    if found.price:
        rows.append(["cost", *(usd_text(found.cost_usd(each.elapsed_s) or 0.0) for each in sides)])
    return rows


def failure_text(found: TrainingEstimate) -> str:
    """Return how many failures to expect, and the range of the published rates."""
    others = [found.failures(each.per_1000_node_days) for each in failure_rates()]
    if not found.rate:
        return "failures  none expected"
    return (
        f"failures  {_number(found.failures())} expected, one every {time_text(found.mtbf_s)}"
        f" ({found.rate:g} per 1000 node-days); {_number(min(others))} to {_number(max(others))} by published rates"
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"


def count_text(value: float) -> str:
    """Return a number as people write it, such as 70B or 1.4T."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def time_text(seconds: float) -> str:
    """Return a duration in its largest unit, such as 18.8 years, 67.2 days or 45 s."""
    for unit, size in (("years", 365.25 * DAY_S), ("days", DAY_S), ("h", 3600.0), ("min", 60.0)):
        if seconds >= size * (1 if unit != "days" else 2):
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:.0f} s"


def usd_text(cost: float) -> str:
    """Return an amount, such as 2.84 million $ or 950 $."""
    return f"{cost / 1e6:,.2f} million $" if cost >= 1e6 else f"{cost:,.0f} $"
