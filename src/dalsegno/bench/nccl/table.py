"""The table that nccl-tests print, as values.

`parse.read_tables` reads these values from any output of nccl-tests, and `render` writes them as nccl-tests do. Our own
benchmarks fill the same classes, so the same code judges and prints their results.

A size is in bytes, a time in microseconds, and a bandwidth in GB/s (1e9 bytes per second), as nccl-tests print them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from dalsegno.errors import DalsegnoError


class NcclTest(str, Enum):
    """A program of nccl-tests, by its name without `_perf`."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    ALLTOALL = "alltoall"
    ALLTOALLV = "alltoallv"
    SCATTER = "scatter"
    GATHER = "gather"
    SENDRECV = "sendrecv"
    HYPERCUBE = "hypercube"
    UNKNOWN = "unknown"

    @property
    def program(self) -> str:
        return f"{self.value}_perf"

    def bus_factor(self, ranks: int) -> float:
        """Return busbw / algbw: the bytes that cross the slowest link for each byte of the message."""
        if self is NcclTest.ALL_REDUCE:
            return 2 * (ranks - 1) / ranks
        return (ranks - 1) / ranks if self in _SHARED_BY_RANKS else 1.0


_SHARED_BY_RANKS = {
    NcclTest.ALL_GATHER, NcclTest.REDUCE_SCATTER, NcclTest.ALLTOALL, NcclTest.ALLTOALLV, NcclTest.SCATTER,
    NcclTest.GATHER,
}  # fmt: skip


def find_test(program: str) -> NcclTest:
    """Return the test of a program's path or name, such as `/opt/nccl-tests/build/all_reduce_perf`."""
    name = program.rpartition("/")[2].removesuffix(".exe").removesuffix("_perf")
    return next((test for test in NcclTest if test.value == name), NcclTest.UNKNOWN)


CPU = "cpu"  # stands in place of the PCI address for a rank that our own benchmark ran on a processor


@dataclass(frozen=True)
class NcclDevice:
    """A line of "Using devices": the GPU of one rank."""

    rank: int
    group: int
    pid: int
    host: str
    device: int
    pci: str  # PCI address: "0000:0a:00" since nccl-tests 2.17, "0x0a" in older versions
    product: str


@dataclass(frozen=True)
class NcclSettings:
    """The settings of the test, from the line that starts with nThread."""

    threads: int
    gpus: int
    min_bytes: int
    max_bytes: int
    step: int
    step_is_factor: bool
    warmup_iters: int
    iters: int
    agg_iters: int = 1
    validation: int = 1
    graph: int = 0
    unalign: int | None = 0  # None if the output has no such value, as before nccl-tests 2.18


@dataclass(frozen=True)
class IterationTimes:
    """The spread of the times of all iterations (`-I 1`)."""

    min_us: float
    max_us: float
    p99_us: float
    cv_percent: float


@dataclass(frozen=True)
class NcclTiming:
    """Half of a row: out-of-place or in-place. `wrong` is None where the test printed N/A."""

    time_us: float
    algbw: float
    busbw: float
    wrong: float | None = 0.0
    iterations: IterationTimes | None = None


@dataclass(frozen=True)
class NcclRow:
    """The results of one message size."""

    size: int
    count: int
    dtype: str
    redop: str  # "none" where there is no operation
    root: int  # -1 where there is no root
    out_of_place: NcclTiming | None
    in_place: NcclTiming | None = None
    timestamp: str = ""  # only with the option -S 1, for example "2026-11-18 08:27:12"

    @property
    def timings(self) -> tuple[NcclTiming, ...]:
        return tuple(each for each in (self.out_of_place, self.in_place) if each is not None)

    @property
    def busbw(self) -> float:
        """Return the lower bus bandwidth of the two placements."""
        first, second = self.out_of_place, self.in_place
        if first is None or second is None:
            one = first or second
            return one.busbw if one else 0.0
        return min(first.busbw, second.busbw)

    @property
    def wrong(self) -> float:
        first, second = self.out_of_place, self.in_place
        return ((first.wrong or 0.0) if first else 0.0) + ((second.wrong or 0.0) if second else 0.0)


@dataclass(frozen=True)
class NcclColumns:
    """The optional columns that the table has."""

    in_place: bool = True
    per_iteration: bool = False  # the option -I 1 adds these columns
    timestamps: bool = False  # the option -S 1 adds this column
    cpu_time: bool = False  # the option -C 1 adds this column


@dataclass(frozen=True)
class NcclTable:
    """One run of one program of nccl-tests. Values that the output lacks are "", None, or empty."""

    test: NcclTest
    rows: tuple[NcclRow, ...]
    devices: tuple[NcclDevice, ...] = ()
    settings: NcclSettings | None = None
    columns: NcclColumns = NcclColumns()
    version: str = ""  # the version of nccl-tests, which prints it since 2.17
    nccl_headers: int | None = None  # the version of NCCL: 22907 is 2.29.7
    nccl_library: int | None = None
    notes: tuple[str, ...] = ()  # further lines of the header, without "# "
    out_of_bounds: int | None = None  # None if the test did not finish
    avg_busbw: float | None = None
    avg_ok: bool | None = None  # whether the average reaches NCCL_TESTS_MIN_BW; None if that was not set
    memory: str = ""  # the value of "GPU memory usage", with -M 1
    error: str = ""
    concluded: bool = False  # whether "Collective test concluded" was printed, which nccl-tests do since 2.16.7
    stream: str = ""  # the rank that a launcher put in front of each line; "" if there is none
    line: int = 0  # the line of the file at which the table starts

    @property
    def hosts(self) -> tuple[str, ...]:
        """Return the names of the hosts in order of their ranks, without repetitions."""
        return tuple(dict.fromkeys(each.host for each in self.devices))

    @property
    def listed_ranks(self) -> int | None:
        """Return the number of ranks that the header states; None without a header.

        The list of devices may be incomplete, so the number of processes and their GPUs counts too. The text header
        truncates the list of a process with many GPUs, and JSON lists only the first device of a process.
        """
        if not self.devices:
            return None
        processes = len({(each.host, each.pid) for each in self.devices})
        per_process = self.settings.threads * self.settings.gpus if self.settings else 1
        return max(len(self.devices), processes * per_process)


def average_busbw(rows: tuple[NcclRow, ...]) -> float:
    """Return the mean over all rows and placements, which nccl-tests print as "Avg bus bandwidth"."""
    timings = [timing.busbw for row in rows for timing in row.timings]
    return sum(timings) / len(timings) if timings else 0.0


class NcclOutputUnreadable(DalsegnoError):
    """Raised if a file contains no table of nccl-tests."""
