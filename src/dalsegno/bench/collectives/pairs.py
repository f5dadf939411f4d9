"""Decide which pairs of nodes to measure at once, and find the bad node or link. Pure.

A slow node makes all its pairs slow; a slow link makes one pair slow. `judge_pairs` finds both kinds of fault if all
pairs were measured. `next_groups` needs fewer measurements: it halves the slow group until a pair is left, and measures
both nodes of that pair with nodes that are known to be fast.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import combinations
from statistics import median
from typing import Any

from dalsegno.bench.picture import Box, Label, Picture

Pair = tuple[str, str]
LOW = 0.7  # a pair below this share of the usual bandwidth is slow
_MOST = 0.5  # a node is at fault if more than this share of its pairs is slow


def pair_of(one: str, other: str) -> Pair:
    """Return the pair with its nodes in order, so that each pair has one key."""
    return (one, other) if one < other else (other, one)


def rounds(nodes: Sequence[str]) -> list[list[Pair]]:
    """Return the rounds of a tournament in which each pair meets once. The pairs of a round have no node in common."""
    slots: list[str | None] = [*nodes, *([None] if len(nodes) % 2 else [])]
    found = []
    for _ in range(len(slots) - 1):
        half = len(slots) // 2
        meets = zip(slots[:half], reversed(slots[half:]), strict=True)
        found.append([pair_of(one, other) for one, other in meets if one is not None and other is not None])
        slots = [slots[0], slots[-1], *slots[1:-1]]
    return [each for each in found if each]


# Verdict on a measurement of all pairs


class PairFaultKind(Enum):
    """The kinds of faults: a bad node, or a bad link between two nodes that are fast with other nodes."""

    NODE = "node"
    LINK = "link"


@dataclass(frozen=True)
class PairFault:
    """A bad node or link, and the share of the usual bandwidth that it reaches. `nodes` has both ends of a link."""

    kind: PairFaultKind
    nodes: tuple[str, ...]
    share: float

    def __str__(self) -> str:
        where = f"node {self.nodes[0]}" if self.kind is PairFaultKind.NODE else f"link {' - '.join(self.nodes)}"
        return f"{where}: {self.share:.0%} of the usual bandwidth"


@dataclass(frozen=True)
class PairVerdict:
    """The usual bandwidth, the limit below which a pair is slow, and the faults."""

    usual: float
    limit: float
    faults: tuple[PairFault, ...] = ()


def is_compared(report: Mapping[str, Any]) -> bool:
    """Return whether a report of `bench pairs` has anything to compare with: more pairs, a floor or older results."""
    history = report.get("history", {})
    return len(report["nodes"]) > 2 or bool(report.get("floor")) or history.get("threshold") is not None


def judge_pairs(measured: Mapping[Pair, float], low: float = LOW, floor: float = 0.0) -> PairVerdict:
    """Return which nodes and links are bad. A node is bad if more than half of its pairs with good nodes are slow, and
    at least two."""
    usual = _usual(measured)
    limit = max(floor, low * usual)
    slow = {pair for pair, value in measured.items() if value < limit}
    names = sorted({node for pair in measured for node in pair})
    bad = _bad_nodes(names, slow, set(measured))
    faults = [PairFault(PairFaultKind.NODE, (node,), _share(_values(measured, node), usual)) for node in bad]
    faults += [
        PairFault(PairFaultKind.LINK, pair, _share([measured[pair]], usual))
        for pair in sorted(slow)
        if not set(pair) & set(bad)
    ]
    return PairVerdict(usual, limit, tuple(faults))


def _usual(measured: Mapping[Pair, float]) -> float:
    """Return the usual bandwidth: the median of all nodes' medians, each over the faster half of the node's pairs.

    The median of all pairs would be too low with several slow nodes, because each slows down all its pairs.
    """
    names = {node for pair in measured for node in pair}
    best = []
    for node in names:
        values = sorted(_values(measured, node), reverse=True)
        best.append(median(values[: max(1, (len(values) + 1) // 2)]))
    return median(best) if best else 0.0


def _values(measured: Mapping[Pair, float], node: str) -> list[float]:
    return [value for pair, value in measured.items() if node in pair]


def _share(values: Sequence[float], usual: float) -> float:
    return median(values) / usual if values and usual else 0.0


def _bad_nodes(names: Sequence[str], slow: set[Pair], known: set[Pair]) -> list[str]:
    """Return the names of the nodes that explain the slow pairs.

    Most pairs of a bad node with good nodes are slow. The worst node is found first, and its pairs then no longer count
    against other nodes. With only two nodes, a bad node looks the same as a bad link.
    """
    bad: list[str] = []
    while True:
        counts = {}
        for node in names:
            others = [other for other in names if other not in (*bad, node) and pair_of(node, other) in known]
            hit = sum(pair_of(node, other) in slow for other in others)
            if node not in bad and len(others) > 1 and hit > 1 and hit > _MOST * len(others):
                counts[node] = hit / len(others)
        if not counts:
            return sorted(bad)
        bad.append(max(counts, key=lambda node: (counts[node], node)))


# Search for a bad node or link by bisection


Group = tuple[str, ...]
_WITNESSES = 2  # number of fast nodes with which a node is measured before it is called bad


@dataclass(frozen=True)
class GroupResult:
    """The result for one group: whether the exchange of data between its nodes was slow."""

    nodes: Group
    slow: bool


@dataclass(frozen=True)
class PairSearch:
    """The next step of a bisection: groups to measure at once, which have no node in common. If `done` is true, the
    search has ended, and `faults` has all faults."""

    groups: tuple[Group, ...] = ()
    faults: tuple[tuple[str, ...], ...] = ()  # one name is a bad node, two names are the ends of a bad link
    done: bool = False
    unsure: tuple[str, ...] = field(default=())  # slow nodes for which no cause was found


def next_groups(nodes: Sequence[str], results: Iterable[GroupResult]) -> PairSearch:
    """Return the next groups to measure, or the faults.

    Call this function again with the results of all groups so far. It finds one fault at a time, leaves out a node of
    that fault, and continues with the other nodes until they are fast. It gives up if the cause of a slow group cannot
    be found, and returns the nodes of that group as `unsure`.
    """
    known = {frozenset(each.nodes): each.slow for each in results}
    left, faults = list(nodes), list[tuple[str, ...]]()
    while len(left) > 1:
        slow = _slow(left, known)
        if slow is None:
            return PairSearch(groups=(tuple(left),), faults=tuple(faults))
        if not slow:
            break
        step = _narrow(tuple(left), known, nodes)
        if isinstance(step, PairSearch):
            return PairSearch(groups=step.groups, faults=tuple(faults), done=step.done, unsure=step.unsure)
        faults.append(step)
        left.remove(step[0])
    return PairSearch(faults=tuple(sorted(faults)), done=True)


def _slow(group: Iterable[str], known: Mapping[frozenset[str], bool]) -> bool | None:
    """Return whether a group is slow; None if unknown. Every part of a fast group is fast."""
    wanted = frozenset(group)
    if wanted in known:
        return known[wanted]
    if len(wanted) < 2 or any(not slow and wanted <= each for each, slow in known.items()):
        return False
    return None


def _narrow(group: Group, known: Mapping[frozenset[str], bool], nodes: Sequence[str]) -> tuple[str, ...] | PairSearch:
    """Return the fault in a slow group or, if more results are needed, the groups to measure next."""
    if len(group) == 2:
        return _blame(group, known, nodes)
    half = len(group) // 2
    one, other = group[:half], group[half:]
    answers = {part: _slow(part, known) for part in (one, other)}
    unknown = tuple(part for part, slow in answers.items() if slow is None)
    if unknown:
        return PairSearch(groups=unknown)
    for part, slow in answers.items():
        if slow:
            return _narrow(part, known, nodes)
    return _cross(one, other, known, nodes)


def _cross(
    one: Group, other: Group, known: Mapping[frozenset[str], bool], nodes: Sequence[str]
) -> tuple[str, ...] | PairSearch:
    """Return the bad link between two groups that are fast by themselves and slow together. If more results are needed,
    return the groups to measure next."""
    if len(one) == 1 and len(other) == 1:
        return _blame((one[0], other[0]), known, nodes)
    if len(one) < len(other):
        one, other = other, one
    half = len(one) // 2
    for part in (one[:half], one[half:]):
        slow = _slow((*part, *other), known)
        if slow is None:
            return PairSearch(groups=((*part, *other),))
        if slow:
            return _cross(part, other, known, nodes)
    # Each part is fast together with the other group, but all nodes together are slow, so the fault is intermittent.
    return PairSearch(done=True, unsure=(*one, *other))


def _blame(
    pair: Sequence[str], known: Mapping[frozenset[str], bool], nodes: Sequence[str]
) -> tuple[str, ...] | PairSearch:
    """Return the bad node of a slow pair, or the pair if both nodes are fast with other nodes. If more results are
    needed, return the groups to measure next."""
    if _slow(pair, known) is None:
        return PairSearch(groups=(tuple(pair),))
    fast = {node for each, slow in known.items() if not slow for node in each}
    others = sorted((node for node in nodes if node not in pair), key=lambda node: node not in fast)
    found = []
    for node in pair:
        tried = [other for other in others if _slow((node, other), known) is not None]
        if any(not _slow((node, other), known) for other in tried):
            continue
        # Two fast partners are needed, because the link to one may be bad. A partner that may be slow proves nothing.
        untried = [other for other in others if other not in tried]
        if untried and len(fast.intersection(tried)) < _WITNESSES:
            return PairSearch(groups=((node, untried[0]),))
        found.append(node)
    # Without enough fast nodes outside the pair, all other nodes may be slow too, so neither node is called bad yet.
    if len(found) == 2 and len(fast.difference(pair)) < _WITNESSES:
        unknown = [each for each in combinations(others, 2) if _slow(each, known) is None]
        return PairSearch(groups=tuple(unknown[:1])) if unknown else PairSearch(done=True, unsure=tuple(pair))
    return (found[0],) if found else tuple(sorted(pair))


# The measured pairs as a heat map


_SHADES = " .:-=+*#%@"  # darker is faster


def draw_matrix(nodes: Sequence[str], measured: Mapping[Pair, float], usual: float) -> list[str]:
    """Return a heat map as text. Each pair is shown in percent of the usual bandwidth, or as a shade if there are more
    than 16 nodes."""
    width = max(len(node) for node in nodes)
    numbers = len(nodes) <= 16
    lines = []
    for row in nodes:
        cells = [_cell(measured.get(pair_of(row, column)), usual, numbers) if row != column else _blank(numbers)
                 for column in nodes]  # fmt: skip
        lines.append(f"{row.rjust(width)}  {''.join(cells)}".rstrip())
    if numbers:
        heads = "".join(str(at + 1).rjust(5) for at in range(len(nodes)))
        lines = [f"{' ' * width}  {heads}", *lines]
    return lines


def _blank(numbers: bool) -> str:
    return "    -" if numbers else "-"


def _cell(value: float | None, usual: float, numbers: bool) -> str:
    if value is None or not usual:
        return "    ?" if numbers else "?"
    share = value / usual
    return f"{min(share, 9.99):5.0%}" if numbers else _SHADES[min(len(_SHADES) - 1, int(share * (len(_SHADES) - 1)))]


_CELL, _MARGIN, _LETTER = 22, 12, 7  # pixels


def picture_of(nodes: Sequence[str], measured: Mapping[Pair, float], usual: float) -> Picture:
    """Return the heat map as a picture: green is the usual bandwidth, red is zero."""
    left = _MARGIN + _LETTER * max(len(node) for node in nodes)
    shapes: list[Box | Label] = []
    for at, row in enumerate(nodes):
        y = _MARGIN + at * _CELL
        shapes.append(Label(left - 6, y + _CELL - 7, row, align=1.0))
        for beside, column in enumerate(nodes):
            value = measured.get(pair_of(row, column))
            title = f"{row} - {column}: not measured" if value is None else f"{row} - {column}: {value:.3g} GB/s"
            colour = "#eeeeee" if value is None else _colour(value / usual if usual else 0.0)
            shapes.append(Box(left + beside * _CELL, y, _CELL - 1, _CELL - 1, colour, "" if row == column else title))
    side = len(nodes) * _CELL
    below = f"usual: {usual:.3g} GB/s; columns are in the order of the rows"
    shapes.append(Label(left, 2 * _MARGIN + side + 8, below))
    return Picture(left + max(side, _LETTER * len(below)) + _MARGIN, side + 4 * _MARGIN, tuple(shapes))


def _colour(share: float) -> str:
    part = max(0.0, min(1.0, share))
    return f"#{round(200 * (1 - part) + 40):02x}{round(150 * part + 50):02x}46"
