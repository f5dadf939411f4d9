"""Find ranks whose steps take longer than those of the others, and collect what their nodes report. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from dalsegno.health.messages import GpuReading
from dalsegno.health.result import Verdict
from dalsegno.printable import one_line
from dalsegno.runs.status import RunStatus, SlowRank

SLOW = 1.3  # multiple of the median step time from which a rank counts as slow
LASTING_S = 30.0  # how long a rank must be slow before the run reports it
MAX_FINDINGS = 3


def find_slow_rank(ratios: Mapping[str, float], places: Mapping[int, str]) -> SlowRank | None:
    """Return the slowest rank if it is much slower than the others.

    `ratios` maps each rank to its step time divided by the median, and may come from a user's file. `places` maps each
    rank to its node.
    """
    known = {int(rank): ratio for rank, ratio in ratios.items() if rank.isdecimal() and len(rank) < 10}
    rank = max(known, key=lambda each: known[each], default=None)
    if rank is None or not known[rank] >= SLOW:
        return None
    return SlowRank(rank, places.get(rank, ""), known[rank])


class SlowWatch:
    """Finds a rank that is slow for LASTING_S. `lasting` is that rank, with its values at the end of that time."""

    def __init__(self) -> None:
        self.lasting: SlowRank | None = None
        self._rank: int | None = None
        self._since = 0.0

    def update(self, slow: SlowRank | None, now: float) -> bool:
        """Record the rank that is slow now, if any. Return True once, when one rank has been slow for LASTING_S."""
        rank = slow.rank if slow else None
        if rank != self._rank:
            self._rank, self._since, self.lasting = rank, now, None
        if slow is None or self.lasting is not None or now - self._since < LASTING_S:
            return False
        self.lasting = slow
        return True


# Evidence


@dataclass(frozen=True)
class CheckRemark:
    """A check that did not pass on a node, and its text for people."""

    check: str
    verdict: Verdict
    text: str


@dataclass(frozen=True)
class NodeReading:
    """The report of a node agent: the node's GPUs, and the checks that did not pass."""

    gpus: tuple[GpuReading, ...] = ()
    findings: tuple[CheckRemark, ...] = ()


@dataclass(frozen=True)
class _Figure:
    name: str
    unit: str
    value: Callable[[GpuReading], float | None]


_FIGURES = (
    _Figure("clock", " MHz", lambda gpu: gpu.clock_mhz),
    _Figure("temperature", " °C", lambda gpu: gpu.temperature_c),
    _Figure("PCIe lanes", "", lambda gpu: gpu.pcie_width),
    _Figure("utilization", " %", lambda gpu: gpu.utilization_percent),
)


def describe_slow_rank(status: RunStatus, nodes: Mapping[str, NodeReading]) -> str:
    """Return a sentence about the rank that the run waits for, with the evidence; "" if there is no such rank."""
    slow = status.slow_rank
    if slow is None or status.over:
        return ""
    found = find_evidence(slow, status.nproc_per_node, nodes, [node.name for node in status.nodes])
    return one_line("; ".join([slow.sentence(), *found]))


def find_evidence(slow: SlowRank, each_node: int, nodes: Mapping[str, NodeReading], own: Collection[str]) -> list[str]:
    """Return the slow rank's GPU figures with the medians of the other nodes, and its node's unusual check results.

    `own` lists the run's nodes. `each_node` is the number of ranks per node. The GPU of the rank has the same index on
    the node as the rank.
    """
    here = nodes.get(slow.node)
    if here is None:
        return []
    gpu = next((each for each in here.gpus if each.index == slow.rank % max(1, each_node)), None)
    beside = [nodes[name] for name in own if name != slow.node and name in nodes]
    others = [gpu for node in beside for gpu in node.gpus]
    lines = [line for figure in _FIGURES if (line := _compare(figure, gpu, others))] if gpu else []
    texts = [f"GPU {gpu.index}: {', '.join(lines)}"] if gpu and lines else []
    special = [each for each in here.findings if not _is_common(each, beside)]
    return texts + [f"{each.check}: {each.text}" for each in special][:MAX_FINDINGS]


def _is_common(remark: CheckRemark, others: Sequence[NodeReading]) -> bool:
    """Return whether so many other nodes share the verdict that it does not explain a slow rank.

    If the check has no result, half of the other nodes are enough. Otherwise more than half are required: in a small
    run, the neighbours of a node that loses packets have to retransmit too.
    """
    same = (remark.check, remark.verdict)
    alike = sum(any((each.check, each.verdict) == same for each in node.findings) for node in others)
    return alike > 0 and 2 * alike >= len(others) + (remark.verdict is not Verdict.UNKNOWN)


def _compare(figure: _Figure, gpu: GpuReading, others: Sequence[GpuReading]) -> str:
    value = figure.value(gpu)
    if value is None:
        return ""
    known = [found for each in others if (found := figure.value(each)) is not None]
    beside = f" (others {median(known):g}{figure.unit})" if known else ""
    return f"{figure.name} {value:g}{figure.unit}{beside}"
