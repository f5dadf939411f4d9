"""The table that nccl-tests print, as values.

`parse.read_tables` reads these values from any output of nccl-tests, and `render` writes them as nccl-tests
do. The measuring commands fill the same classes: measured and read tables are judged and printed by the same code.

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


@dataclass(frozen=True)
class NcclDevice:
    """A line of "Using devices": the GPU of one rank."""

    rank: int
    group: int
    pid: int
    host: str
    device: int
    pci: str  # "0000:0a:00" since 2.17, "0x0a" before
    product: str


@dataclass(frozen=True)
class NcclSettings:
    """The line that starts with nThread: what the test was asked to do."""

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
    unalign: int | None = 0  # None: before 2.18


@dataclass(frozen=True)
class IterationTimes:
    """The spread of the single iterations (`-I 1`)."""

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
    timestamp: str = ""  # "2026-11-18 08:27:12" with -S 1

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
    """Which optional columns the table has."""

    in_place: bool = True
    per_iteration: bool = False  # -I 1
    timestamps: bool = False  # -S 1
    cpu_time: bool = False  # -C 1


@dataclass(frozen=True)
class NcclTable:
    """One run of one program of nccl-tests. What the output did not say is "", None, or empty."""

    test: NcclTest
    rows: tuple[NcclRow, ...]
    devices: tuple[NcclDevice, ...] = ()
    settings: NcclSettings | None = None
    columns: NcclColumns = NcclColumns()
    version: str = ""  # of nccl-tests, since 2.17
    nccl_headers: int | None = None  # 22907 is NCCL 2.29.7
    nccl_library: int | None = None
    notes: tuple[str, ...] = ()  # further lines of the header, without "# "
    out_of_bounds: int | None = None  # None: the test did not finish
    avg_busbw: float | None = None
    avg_ok: bool | None = None  # None: NCCL_TESTS_MIN_BW was not set
    memory: str = ""  # the value of "GPU memory usage", with -M 1
    error: str = ""
    concluded: bool = False  # the line "Collective test concluded" was printed; since 2.16.7
    stream: str = ""  # the rank that a launcher put in front of each line; "" if there is none
    line: int = 0  # where the table starts in its file

    @property
    def hosts(self) -> tuple[str, ...]:
        """Return the names of the hosts in order of their ranks, without repetitions."""
        return tuple(dict.fromkeys(each.host for each in self.devices))

    @property
    def listed_ranks(self) -> int | None:
        """Return the number of ranks that the header states; None without a header.

        The text header truncates the list of a process with many GPUs. JSON lists only the first device of a process.
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
    """A file holds no table of nccl-tests."""
