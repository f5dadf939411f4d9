"""The ladder benchmark: its settings, its report, and the environment of its processes. Does not import torch.

Each rung of the ladder is one way to average gradients.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import struct
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from statistics import median
from typing import Any

from dalsegno.errors import DalsegnoError, UsageError

BASELINE = "ddp"  # torch's DDP with its default bucket_cap_mb
ASK, MEETING, PROGRESS, REPORT = (
    "ask.json",
    "meeting",
    "progress",
    "report.json",
)  # files through which the ranks on one machine communicate


@dataclass(frozen=True)
class RankTraffic:
    """The messages that one rank sends in one step. If `computed` is true, they follow from the formula of a ring
    all-reduce; otherwise they were counted."""

    calls: int
    messages: int
    sent_bytes: int
    received_bytes: int
    computed: bool
    tcp_bytes: int | None = None  # bytes sent, as counted by the kernel; None without TCP


@dataclass(frozen=True)
class StepSpan:
    """A span of one rank's step (forward, backward, update or communicate), in seconds from the start of the step."""

    rank: int
    kind: str
    label: str
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class RungResult:
    """The result of one rung. `steps_s` is the time of each step on its slowest rank. If the rung was not measured,
    `why_not` says why."""

    name: str
    steps_s: tuple[float, ...] = ()
    traffic: tuple[RankTraffic, ...] = ()  # one entry per rank
    marks: tuple[StepSpan, ...] = ()
    why_not: str = ""

    @property
    def median_s(self) -> float:
        return median(self.steps_s)

    @property
    def busiest(self) -> RankTraffic | None:
        """Return the traffic of the rank that sends the most, because the others wait for it."""
        return max(self.traffic, key=lambda each: each.sent_bytes, default=None)


@dataclass(frozen=True)
class LadderReport:
    """The results of all rungs, and the hardware and software they ran on."""

    processes: int
    backend: str
    device: str
    torch: str
    parameters: int
    gradient_bytes: int
    rungs: tuple[RungResult, ...] = field(default=())

    @property
    def headline(self) -> str:
        where = f"{count_processes(self.processes)}, {self.backend} on {self.device}"
        return f"{where}, {self.gradient_bytes / 2**20:.2f} MiB of gradients"

    def ratio(self, rung: RungResult) -> float | None:
        """Return a rung's time divided by DDP's time; None if either is missing."""
        ddp = next((each for each in self.rungs if each.name == BASELINE), None)
        return rung.median_s / ddp.median_s if rung.steps_s and ddp and ddp.steps_s else None

    def to_dict(self) -> dict[str, Any]:
        rungs = [
            {**asdict(each), "median_s": each.median_s if each.steps_s else None, "times_ddp": self.ratio(each)}
            for each in self.rungs
        ]
        return {**asdict(self), "rungs": rungs}


def count_processes(number: int) -> str:
    return f"{number} process{'es' * (number != 1)}"


def read_report(text: str) -> LadderReport:
    found = json.loads(text)
    return LadderReport(**{**found, "rungs": tuple(_rung(each) for each in found["rungs"])})


def _rung(found: dict[str, Any]) -> RungResult:
    return RungResult(
        name=found["name"],
        steps_s=tuple(found["steps_s"]),
        traffic=tuple(RankTraffic(**each) for each in found["traffic"]),
        marks=tuple(StepSpan(**each) for each in found["marks"]),
        why_not=found["why_not"],
    )


@dataclass(frozen=True)
class LadderAsk:
    """The settings of a benchmark."""

    model_mb: float = 16.0
    layers: int = 8
    steps: int = 20
    batch: int = 64  # samples per rank
    device: str = "auto"  # auto, cpu or cuda
    bucket_caps_mb: tuple[float, ...] = (1.0, 5.0, 25.0)

    def progress(self, number: int) -> str:
        """Return the progress line to show before a step; "" for most steps."""
        return "" if number % max(1, self.steps // 4) else f"step {number + 1} of {self.steps}, all rungs in turn"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> LadderAsk:
        found = json.loads(text)
        return cls(**{**found, "bucket_caps_mb": tuple(found["bucket_caps_mb"])})


def parse_caps(text: str) -> tuple[float, ...]:
    """Parse `1,5,25` into 1.0, 5.0, 25.0 without duplicates."""
    try:
        caps = tuple(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        caps = ()
    if not caps or not all(0 < cap < float("inf") for cap in caps):
        raise UsageError(f"invalid list of sizes `{text}`", where="--bucket-cap-mb", hint="use MiB with commas: 1,5,25")
    return caps


# The report as a table

HEADERS = ("RUNG", "STEP", "TIMES DDP", "CALLS", "MESSAGES", "SENT", "BY TCP")
NOTES = (
    "STEP: median of the slowest rank. CALLS, MESSAGES and bytes: one step of the rank that sends the most.",
    "~ computed for a ring all-reduce: 2(N-1) messages and 2(N-1)/N of the bytes. BY TCP: counted by the kernel.",
)


def table_rows(report: LadderReport) -> list[list[str]]:
    return [_row(report, each) for each in report.rungs]


def _row(report: LadderReport, rung: RungResult) -> list[str]:
    if rung.why_not:
        return [rung.name, "-", "-", "-", "-", "-", "-"]
    ratio = report.ratio(rung)
    times = f"{ratio:.2f}" if ratio is not None else "-"
    return [rung.name, f"{rung.median_s * 1000:.1f} ms", times, *_traffic(rung.busiest)]


def _traffic(traffic: RankTraffic | None) -> list[str]:
    if traffic is None:
        return ["-"] * 4
    mark = "~" if traffic.computed else ""
    by_tcp = "-" if traffic.tcp_bytes is None else mib(traffic.tcp_bytes)
    return [str(traffic.calls), f"{mark}{traffic.messages}", f"{mark}{mib(traffic.sent_bytes)}", by_tcp]


def mib(size: int) -> str:
    return f"{size / 2**20:.2f} MiB"


def describe_unmeasured(report: LadderReport) -> list[str]:
    return [f"{each.name} was not measured: {each.why_not}" for each in report.rungs if each.why_not]


# The example `ladder`, which is part of an installed package, or in the folder `examples` of a clone

_HERE = Path(__file__).resolve()


def examples_folder() -> Path:
    """Return the folder that contains the example `ladder`."""
    places = (_HERE.parents[1] / "examples", _HERE.parents[4] / "examples")
    found = next((place for place in places if (place / "ladder" / "__init__.py").exists()), None)
    if found is None:
        raise DalsegnoError("the example `ladder` is missing", hint="reinstall dalsegno, or use a complete clone")
    return found


def make_importable() -> None:
    """Change the import path so that `import ladder` finds the example before any other module of that name."""
    sys.path.insert(0, str(examples_folder()))


def check_torch(find: Callable[[str], object] = find_spec) -> None:
    """Raise DalsegnoError if torch is not installed. torch is not imported, because that takes seconds."""
    if find("torch") is None:
        raise DalsegnoError(
            "`dalsegno bench ddp` needs PyTorch, which this Python does not have",
            hint="pip install 'dalsegno[torch]', or in a clone: ./dalsegno setup --torch",
        )


# Environment of the processes that are measured

_FIRST_PORT, _PORTS = 20_000, 20_000


def world_env(environ: Mapping[str, str], first_host: Callable[[str], str]) -> dict[str, str] | None:
    """Return the missing variables that torch needs. Return None if no launcher has started this process as a rank.

    `first_host` returns the first host of a Slurm hostlist. A batch script has SLURM_PROCID too, but only a task of
    srun has SLURM_STEP_NUM_TASKS.
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return {}
    if not environ.get("SLURM_STEP_NUM_TASKS") or "SLURM_PROCID" not in environ:
        return None
    return {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": environ["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environ.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": _first_number(environ.get("SLURM_STEP_TASKS_PER_NODE", "")) or "1",
        "MASTER_ADDR": first_host(environ["SLURM_STEP_NODELIST"]),
        "MASTER_PORT": str(_port(environ)),
    }


def local_env(rank: int, processes: int) -> dict[str, str]:
    """Return the variables for one process on this machine. Each process gets one thread, as under torchrun."""
    local = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(processes)}
    return {"RANK": str(rank), "WORLD_SIZE": str(processes), **local, "OMP_NUM_THREADS": "1"}


def _first_number(tasks_per_node: str) -> str:
    """Return the first number in a Slurm list: 4 for `4(x2),3`, which means 4 tasks on two nodes and 3 on a third."""
    return "".join(takewhile(str.isdigit, tasks_per_node))


def _port(environ: Mapping[str, str]) -> int:
    """Return a port that is the same for all tasks of a step and differs between steps."""
    job, step = int(environ.get("SLURM_JOB_ID", 0)), int(environ.get("SLURM_STEP_ID", 0))
    return _FIRST_PORT + (job * 101 + step) % _PORTS


# Bytes sent over TCP. The kernel counts them, so traffic from libraries is included.

_BYTES_SENT = 200  # offset of `tcpi_bytes_sent` in the kernel's `struct tcp_info`, since Linux 4.19
_LENGTH = _BYTES_SENT + 8


def tcp_bytes_sent() -> int | None:
    """Return the bytes that this process sent on its open TCP connections; None if it has none, or if the kernel does
    not count them."""
    try:
        numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        return None
    counts = [count for number in numbers if (count := _sent(number)) is not None]
    return sum(counts) if counts else None


def _sent(number: int) -> int | None:
    with contextlib.suppress(OSError):  # the descriptor was closed meanwhile, or is not a TCP socket
        if not stat.S_ISSOCK(os.fstat(number).st_mode):
            return None
        with socket.socket(fileno=os.dup(number)) as connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LENGTH)
        return int(struct.unpack_from("=Q", info, _BYTES_SENT)[0]) if len(info) >= _LENGTH else None
    return None
