"""Ranks whose steps take longer than those of the others, and what the agents of their nodes report. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from dalsegno.health.messages import GpuReading
from dalsegno.printable import one_line
from dalsegno.runs.status import RunStatus, SlowRank

SLOW = 1.3  # times the median step time, from which a rank stands out
LASTING_S = 30.0  # how long a rank must be slow before the run reports it
MAX_FINDINGS = 3


def find_slow_rank(ratios: Mapping[str, float], places: Mapping[int, str]) -> SlowRank | None:
    """Return the slowest rank if it stands out. `ratios` may come from a user's file; `places`: the node of a rank."""
    known = {int(rank): ratio for rank, ratio in ratios.items() if rank.isdecimal() and len(rank) < 10}
    rank = max(known, key=lambda each: known[each], default=None)
    if rank is None or not known[rank] >= SLOW:
        return None
    return SlowRank(rank, places.get(rank, ""), known[rank])


class SlowWatch:
    """Keeps the rank that has been the slowest for some time, as it was when that was found."""

    def __init__(self) -> None:
        self.lasting: SlowRank | None = None
        self._rank: int | None = None
        self._since = 0.0

    def update(self, slow: SlowRank | None, now: float) -> bool:
        """Return whether another rank stands out from now on."""
        rank = slow.rank if slow else None
        if rank != self._rank:
            self._rank, self._since, self.lasting = rank, now, None
        if slow is None or self.lasting is not None or now - self._since < LASTING_S:
            return False
        self.lasting = slow
        return True


# Evidence


@dataclass(frozen=True)
class NodeReading:
    """What the agent of a node reports: its GPUs, and its checks that did not pass, as `name: text`."""

    gpus: tuple[GpuReading, ...] = ()
    findings: tuple[str, ...] = ()


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
    """Return a sentence about the rank that the run waits for, with the evidence; "" if no rank stands out."""
    slow = status.slow_rank
    if slow is None or status.over:
        return ""
    found = find_evidence(slow, status.nproc_per_node, nodes, [node.name for node in status.nodes])
    return one_line("; ".join([slow.sentence(), *found]))


def find_evidence(
    slow: SlowRank, each_node: int, nodes: Mapping[str, NodeReading], own: Collection[str]
) -> list[str]:
    """Return what the slow rank's node reports beside the median of the run's other nodes, `own`.

    `each_node`: ranks per node. A rank's GPU is the one with its index on the node.
    """
    here = nodes.get(slow.node)
    if here is None:
        return []
    gpu = next((each for each in here.gpus if each.index == slow.rank % max(1, each_node)), None)
    others = [each for name in own if name != slow.node and name in nodes for each in nodes[name].gpus]
    lines = [line for figure in _FIGURES if (line := _compare(figure, gpu, others))] if gpu else []
    texts = [f"GPU {gpu.index}: {', '.join(lines)}"] if gpu and lines else []
    elsewhere = {text for name in own if name != slow.node and name in nodes for text in nodes[name].findings}
    return texts + [text for text in here.findings if text not in elsewhere][:MAX_FINDINGS]


def _compare(figure: _Figure, gpu: GpuReading, others: Sequence[GpuReading]) -> str:
    value = figure.value(gpu)
    if value is None:
        return ""
    known = [found for each in others if (found := figure.value(each)) is not None]
    beside = f" (others {median(known):g}{figure.unit})" if known else ""
    return f"{figure.name} {value:g}{figure.unit}{beside}"
