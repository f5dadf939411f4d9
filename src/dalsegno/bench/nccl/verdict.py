"""Judge a table of nccl-tests: impossible, pass, degraded or fail, with the arithmetic. Pure.

    verdict = judge(table, find_machines(table))
    verdict.level, verdict.reason    # for decisions
    verdict.sentences()              # for people

The plateau is the highest bus bandwidth at 1 GiB or more, taking the lower of both placements. It is compared with a
limit that nothing can exceed and with the least that is expected (`limits`). Earlier results of the same cluster raise
the expectation to their median minus k times their median absolute deviation (MAD).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import median

from dalsegno.bench.nccl.limits import (
    Bottleneck,
    Bound,
    Expectation,
    VendorFloor,
    find_bound,
    find_expectation,
    unreachable_floors,
)
from dalsegno.bench.nccl.machines import BenchMachines, count_ranks, ranks_of_ratio
from dalsegno.bench.nccl.table import CPU, NcclRow, NcclTable, NcclTest

LARGE_BYTES = 1 << 30  # from this size on, the bandwidth hardly grows
TOLERANCE = 1.02  # factor allowed above the limit, for rounding and clock errors
DEGRADED_SHARE = 0.85  # share of the expectation below which the test fails
PLATEAU_SHARE = 0.8
HISTORY_K = 3.0
HISTORY_LEAST = 5  # with fewer results, the median is not reliable
HISTORY_SPREAD = 0.01  # minimum spread, as a share of the median: after equal results, a slightly lower one passes
SPREAD_PERCENT = 5.0  # larger variations are mentioned; the script of nccl-tests that reads `-J` files uses this value

_MAD_TO_SIGMA = 1.4826


class BenchLevel(str, Enum):
    """The verdict on a benchmark."""

    PASS = "PASS"
    DEGRADED = "DEGRADED"
    FAIL = "FAIL"
    IMPOSSIBLE = "IMPOSSIBLE"
    UNKNOWN = "UNKNOWN"

    @property
    def exit_code(self) -> int:
        """Return the exit code for this verdict. Exit code 2 means wrong usage and is not used here."""
        return {"PASS": 0, "FAIL": 1, "DEGRADED": 3, "IMPOSSIBLE": 4, "UNKNOWN": 5}[self.value]


class BenchReason(str, Enum):
    """The reasons for the verdict on a table."""

    REACHED = "expectation reached"
    BELOW = "below the expectation"
    ABOVE_LIMIT = "above the limit"
    WRONG_DATA = "wrong data"
    ERROR = "error"
    NO_ROWS = "no rows"
    OTHER_GPU = "other GPU than named"
    WRONG_RANKS = "wrong number of ranks"
    SEPARATE = "each process ran alone"
    ONE_RANK = "one rank"
    TOO_SMALL = "messages too small"
    NO_TEST = "test not known"
    NO_GPUS = "no GPUs"
    NO_MACHINE = "machines not known"
    NO_EXPECTATION = "no expectation"


_NOT_MEASURED = {  # with these reasons, the bandwidth says nothing about the machines
    BenchReason.WRONG_DATA, BenchReason.ERROR, BenchReason.NO_ROWS, BenchReason.OTHER_GPU, BenchReason.WRONG_RANKS,
    BenchReason.SEPARATE, BenchReason.ONE_RANK, BenchReason.NO_TEST,
}  # fmt: skip


@dataclass(frozen=True)
class BenchVerdict:
    """The verdict on one table, and the values it is based on."""

    test: NcclTest
    machines: BenchMachines
    level: BenchLevel
    reason: BenchReason
    busbw: float = 0.0  # the bandwidth of the plateau
    size: int = 0  # the message size at which the plateau was reached
    knee: int = 0  # the smallest size that reaches 80 % of the plateau
    bound: Bound | None = None
    expected: Expectation | None = None
    floors_above_limit: tuple[VendorFloor, ...] = ()
    wrong: float = 0.0
    ranks_in_table: int | None = None
    cv_percent: float | None = None
    error: str = ""
    separate: int = 0  # number of processes that each ran the test alone

    def to_dict(self) -> dict[str, object]:
        """Return the verdict for `--json`."""
        return {
            "test": self.test.value, "level": self.level.value, "reason": self.reason.value,
            "machines": str(self.machines), "nodes": self.machines.nodes, "gpus_per_node": self.machines.gpus_per_node,
            "instance": self.machines.instance.name if self.machines.instance else None,
            "busbw": round(self.busbw, 2), "size": self.size, "knee": self.knee,
            "limit": round(self.bound.busbw, 1) if self.bound else None,
            "limited_by": self.expected.by.value if self.expected else self.bound.by.value if self.bound else None,
            "expected": round(self.expected.busbw, 1) if self.expected else None,
            "expected_from": self.expected.why if self.expected else None,
            "wrong": self.wrong, "cv_percent": self.cv_percent, "sentences": self.sentences(),
        }  # fmt: skip

    def sentences(self) -> list[str]:
        """Return the verdict and its arithmetic for people, the most important first."""
        lines = [self._headline()]
        if self.reason in _NOT_MEASURED:
            return lines
        if self.bound and self.busbw:
            share = self.busbw / self.bound.busbw
            lines.append(f"limit: {self.bound.formula} = {self.bound.busbw:.1f} GB/s; reached {share:.0%} of it")
        if self.expected and self.busbw:
            share = self.busbw / self.expected.busbw
            lines.append(f"expected: {self.expected.busbw:.1f} GB/s ({self.expected.why}); reached {share:.0%} of it")
        # A result above the limit comes from other machines, so a share of this network would be meaningless.
        possible = self.level is not BenchLevel.IMPOSSIBLE
        if self.machines.nodes > 1 and self.machines.network_gbytes_per_s and self.busbw and possible:
            lines.append(self._ring())
        if self.knee:
            lines.append(f"{PLATEAU_SHARE:.0%} of the highest bandwidth is reached at {size_text(self.knee)}")
        if self.cv_percent is not None and self.cv_percent > SPREAD_PERCENT:
            lines.append(f"the iterations vary by {self.cv_percent:g} %: other jobs, or clocks that change")
        lines += [
            f"{each.owner}'s health check of {each.instance} asks for {each.busbw:g} GB/s, which is above the limit"
            for each in self.floors_above_limit
            if self.machines.instance and each.instance == self.machines.instance.name
        ]
        return lines

    def _ring(self) -> str:
        network = self.machines.used_network_gbytes_per_s
        part = "a node" if network == self.machines.network_gbytes_per_s else "the GPUs in use"
        text = f"a ring is limited by the network of {part}: {8 * network:g} Gbit/s = {network:g} GB/s; "
        share = self.busbw / network
        return f"{text}reached {share:.0%} of it" + (", so NCCL did not use a ring" if share > TOLERANCE else "")

    def _headline(self) -> str:
        where = f"{self.test.value}, {self.machines}"
        rate = f"bus bandwidth {self.busbw:.1f} GB/s at {size_text(self.size)}"
        if self.reason in (BenchReason.REACHED, BenchReason.BELOW) and self.expected:
            by = self.expected.by
            same = by is not Bottleneck.UNKNOWN and (self.bound is None or self.bound.by is by)
            # If the expected value has another bottleneck than the limit, no bottleneck is named.
            bound_by = f", {by.value}-bound" if same else ""
            return f"{where}: {rate}{bound_by}, expected at least {self.expected.busbw:.0f} GB/s"
        if self.reason is BenchReason.ABOVE_LIMIT and self.bound:
            return f"{where}: {rate} is more than the limit of {self.bound.busbw:.0f} GB/s"
        text = {
            BenchReason.WRONG_DATA: f"{self.wrong:,.0f} elements are wrong",
            BenchReason.ERROR: f"the test ended with an error: {self.error}",
            BenchReason.NO_ROWS: "the test ended before its first result",
            BenchReason.OTHER_GPU: self._other_gpu(),
            BenchReason.WRONG_RANKS: f"the test ran with {self.ranks_in_table} ranks, not with {self.machines.ranks}",
            BenchReason.SEPARATE: f"{self.separate} processes ran the test alone instead of together",
            BenchReason.ONE_RANK: "one rank exchanges no data",
            BenchReason.TOO_SMALL: f"{rate}, but only sizes of at least {size_text(LARGE_BYTES)} are judged",
            BenchReason.NO_TEST: f"{rate}; the output does not say which test it is",
            BenchReason.NO_GPUS: f"{rate}; it was measured without GPUs, and the catalog has no figure for processors",
            BenchReason.NO_MACHINE: f"{rate}; the instance type is not known",
            BenchReason.NO_EXPECTATION: f"{rate}; no figure to compare with is published for this test and machine",
        }
        return f"{where}: {text.get(self.reason, rate)}"

    def _other_gpu(self) -> str:
        own = self.machines.gpu.slurm_type.upper() if self.machines.gpu else "no GPU"
        name = self.machines.instance.name if self.machines.instance else "the instance type"
        return f"the output lists {self.machines.other_product}, but {name} has {own}"


def judge(table: NcclTable, machines: BenchMachines, history: Sequence[float] = (), separate: int = 0) -> BenchVerdict:
    """Return the verdict on one table.

    `history` holds bus bandwidths at the plateau's size, from earlier runs of the same test with as many ranks.
    `separate` is the number of processes that did not form one group, so that each printed a table of its own.
    """
    ranks = count_ranks(table)
    plateau = find_plateau(table)
    bound = find_bound(table.test, machines)
    expected = _raise_by_history(find_expectation(table.test, machines, bound) if bound else None, bound, history)
    level, reason = _decide(table, machines, plateau, bound, expected, ranks)
    if separate > 1:
        level, reason = BenchLevel.FAIL, BenchReason.SEPARATE
    timings = [timing.iterations for timing in plateau.timings if timing.iterations] if plateau else []
    return BenchVerdict(
        test=table.test, machines=machines, level=level, reason=reason,
        busbw=plateau.busbw if plateau else 0.0, size=plateau.size if plateau else 0,
        knee=find_knee(table, plateau.busbw) if plateau else 0, bound=bound, expected=expected,
        floors_above_limit=unreachable_floors(table.test, machines, bound) if bound else (),
        wrong=_wrong(table), ranks_in_table=ranks, error=table.error,
        cv_percent=max((each.cv_percent for each in timings), default=None), separate=separate,
    )  # fmt: skip


def find_plateau(table: NcclTable) -> NcclRow | None:
    """Return the row with the highest bus bandwidth among sizes of 1 GiB or more; if there are none, among all rows."""
    rows = [row for row in table.rows if row.out_of_place or row.in_place]
    large = [row for row in rows if row.size >= LARGE_BYTES]
    return max(large or rows, key=lambda row: row.busbw, default=None)


def find_knee(table: NcclTable, plateau: float) -> int:
    """Return the smallest size from which on every size reaches 80 % of the plateau; 0 if all sizes reach 80 %."""
    knee = 0
    for row in sorted(table.rows, key=lambda row: row.size, reverse=True):
        if row.busbw < PLATEAU_SHARE * plateau:
            return knee
        knee = row.size
    return 0


def history_threshold(earlier: Sequence[float], k: float = HISTORY_K) -> float | None:
    """Return the median of earlier results minus k times their MAD, which is scaled to a standard deviation. Return
    None if there are too few results."""
    if len(earlier) < HISTORY_LEAST:
        return None
    middle = median(earlier)
    mad = _MAD_TO_SIGMA * median(abs(each - middle) for each in earlier)
    return middle - k * max(mad, HISTORY_SPREAD * middle)


def _raise_by_history(
    expected: Expectation | None, bound: Bound | None, history: Sequence[float]
) -> Expectation | None:
    """Return the expectation, raised to the threshold from earlier results if that is higher. A threshold above the
    limit of the machines is ignored."""
    own = history_threshold(history)
    if own is None or own <= 0 or (expected and expected.busbw >= own) or (bound and own > bound.busbw):
        return expected
    by = expected.by if expected else bound.by if bound else Bottleneck.UNKNOWN
    why = f"median {median(history):.1f} of {len(history)} earlier results, less {HISTORY_K:g} x MAD"
    return Expectation(own, by, why, earlier=True)


def _wrong(table: NcclTable) -> float:
    return sum(row.wrong for row in table.rows) or float(table.out_of_bounds or 0)


def _decide(
    table: NcclTable, machines: BenchMachines, plateau: NcclRow | None, bound: Bound | None,
    expected: Expectation | None, ranks: int | None,
) -> tuple[BenchLevel, BenchReason]:  # fmt: skip
    if _wrong(table):
        return BenchLevel.FAIL, BenchReason.WRONG_DATA
    if table.error:
        return BenchLevel.FAIL, BenchReason.ERROR
    if plateau is None:
        return BenchLevel.FAIL, BenchReason.NO_ROWS
    if machines.other_product:
        return BenchLevel.UNKNOWN, BenchReason.OTHER_GPU
    if _ranks_differ(ranks, machines.ranks, table):
        return BenchLevel.FAIL, BenchReason.WRONG_RANKS
    if (ranks or machines.ranks) == 1:
        return BenchLevel.UNKNOWN, BenchReason.ONE_RANK
    if table.test is NcclTest.UNKNOWN:
        return BenchLevel.UNKNOWN, BenchReason.NO_TEST
    if bound and plateau.busbw > TOLERANCE * bound.busbw:
        return BenchLevel.IMPOSSIBLE, BenchReason.ABOVE_LIMIT
    if expected and plateau.busbw >= expected.busbw:
        return BenchLevel.PASS, BenchReason.REACHED
    if expected is None and table.devices and all(each.pci == CPU for each in table.devices):
        return BenchLevel.UNKNOWN, BenchReason.NO_GPUS
    if plateau.size < LARGE_BYTES and not (expected and expected.earlier):
        return BenchLevel.UNKNOWN, BenchReason.TOO_SMALL
    if expected is None:
        unknown = machines.gpu is None or bound is None
        return BenchLevel.UNKNOWN, BenchReason.NO_MACHINE if unknown else BenchReason.NO_EXPECTATION
    share = plateau.busbw / expected.busbw
    return BenchLevel.DEGRADED if share >= DEGRADED_SHARE else BenchLevel.FAIL, BenchReason.BELOW


def _ranks_differ(ranks: int | None, wanted: int, table: NcclTable) -> bool:
    """Return whether the test ran with a wrong number of ranks.

    A number above 64 that was computed from the ratio of the bandwidths may be wrong by up to 20 %.
    """
    if ranks is None or ranks == wanted:
        return False
    exact = table.listed_ranks is not None or (ranks_of_ratio(table) or 0) <= 64
    return exact or abs(ranks - wanted) > 0.2 * wanted


def worst(verdicts: Sequence[BenchVerdict]) -> BenchLevel:
    """Return the worst level of several tables, which is the one that a command reports."""
    order = [BenchLevel.FAIL, BenchLevel.IMPOSSIBLE, BenchLevel.DEGRADED, BenchLevel.UNKNOWN, BenchLevel.PASS]
    return min((each.level for each in verdicts), key=order.index, default=BenchLevel.UNKNOWN)


def size_text(size: int) -> str:
    """Return a message size with its unit, such as `16 GiB` or `8 B`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            return f"{size:.4g} {unit}"
        size /= 1024  # type: ignore[assignment]
    return ""
