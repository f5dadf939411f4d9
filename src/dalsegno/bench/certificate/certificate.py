"""The certificate of a cluster: its measurements, its verdict, and the changes since an older certificate. Pure.

`Certificate.level` is the verdict, and `compare_certificates` finds the changes. `read_certificate` reads the output of
`to_json`, which does not include the pictures.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from dalsegno.bench.nccl.verdict import BenchLevel
from dalsegno.bench.picture import Picture
from dalsegno.errors import UsageError

FORMAT = "dalsegno-certificate-1"


class CertifyPart(str, Enum):
    """The parts of a certificate, in the order in which they are measured."""

    HEALTH = "health"
    VERSIONS = "versions"
    STORAGE = "storage"
    PAIRS = "pairs"
    COLLECTIVES = "collectives"
    GEMM = "gemm"
    CONTAINER = "container"
    POWER_CUT = "power-cut"


TITLES = {
    CertifyPart.HEALTH: "Health of the nodes",
    CertifyPart.VERSIONS: "Versions and drift between nodes",
    CertifyPart.STORAGE: "Storage",
    CertifyPart.PAIRS: "Pairs of nodes",
    CertifyPart.COLLECTIVES: "Collectives",
    CertifyPart.GEMM: "Matrix products of each device",
    CertifyPart.CONTAINER: "Start of a container",
    CertifyPart.POWER_CUT: "A survived power cut",
}
# A figure that changes by at most this share of its older value counts as unchanged. The parts listed here vary more
# from run to run than the others, for which TOLERANCE applies.
TOLERANCES = {CertifyPart.STORAGE: 0.3, CertifyPart.CONTAINER: 0.3, CertifyPart.POWER_CUT: 0.5}
TOLERANCE = 0.1
ON_REQUEST = (CertifyPart.CONTAINER, CertifyPart.POWER_CUT)  # measured only if an option requests them


class PartOutcome(str, Enum):
    """The states of a part: whether it was measured, and if not, why."""

    MEASURED = "measured"
    NOT_MEASURED = "not measured"  # the part was requested, but could not be run
    SKIPPED = "skipped"  # the part was not requested


class BetterFigure(str, Enum):
    """The direction in which a figure gets better."""

    HIGHER = "higher"
    LOWER = "lower"


@dataclass(frozen=True)
class CertifiedFigure:
    """A measured number with a name that is unique within its part."""

    name: str
    value: float
    unit: str
    better: BetterFigure = BetterFigure.HIGHER

    def __str__(self) -> str:
        number = f"{self.value:,.0f}" if abs(self.value) >= 10_000 else f"{self.value:.4g}"
        return f"{number} {self.unit}".strip()


@dataclass(frozen=True)
class CertifiedPart:
    """One part: its verdict, figures, a table for people, and the command that measures it again."""

    part: CertifyPart
    outcome: PartOutcome
    level: BenchLevel = BenchLevel.UNKNOWN
    summary: str = ""  # one sentence; the reason, if the part was not measured
    figures: tuple[CertifiedFigure, ...] = ()
    findings: tuple[str, ...] = ()  # what is wrong, and what to do
    head: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    commands: tuple[str, ...] = ()
    pictures: tuple[Picture, ...] = field(default=(), compare=False)  # not in the JSON report

    @property
    def word(self) -> str:
        """Return the verdict as shown to people."""
        if self.outcome is not PartOutcome.MEASURED:
            return str(self.outcome.value)
        return "no verdict" if self.level is BenchLevel.UNKNOWN else self.level.value


def not_measured(part: CertifyPart, reason: str, commands: Sequence[str] = ()) -> CertifiedPart:
    return CertifiedPart(part, PartOutcome.NOT_MEASURED, summary=reason, commands=tuple(commands))


def skipped(part: CertifyPart, reason: str) -> CertifiedPart:
    return CertifiedPart(part, PartOutcome.SKIPPED, summary=reason)


@dataclass(frozen=True)
class Certificate:
    """The parts of a certificate, where and when they were measured, and what was simulated."""

    cluster: str
    at: float
    nodes: tuple[str, ...]
    parts: tuple[CertifiedPart, ...]
    simulated: tuple[str, ...] = ()
    quick: bool = False
    version: str = ""  # the version of Dal Segno
    measured: int = 0  # number of nodes that were idle and measured; the part `health` covers all nodes

    @property
    def level(self) -> BenchLevel:
        """Return the verdict.

        A requested part that could not be measured rules out PASS. A measured part without a verdict does not. An
        impossible bandwidth means that the measurement is wrong, which counts as a failure.
        """
        levels = {each.level for each in self.parts if each.outcome is PartOutcome.MEASURED}
        if levels & {BenchLevel.FAIL, BenchLevel.IMPOSSIBLE}:
            return BenchLevel.FAIL
        if BenchLevel.DEGRADED in levels:
            return BenchLevel.DEGRADED
        complete = all(each.outcome is not PartOutcome.NOT_MEASURED for each in self.parts)
        return BenchLevel.PASS if BenchLevel.PASS in levels and complete else BenchLevel.UNKNOWN

    @property
    def heading(self) -> str:
        """Return the verdict for people. If parts were left out, name either these parts or the requested ones,
        whichever are fewer.

        A part that is only measured on request does not make a certificate partial.
        """
        word = "no verdict" if self.level is BenchLevel.UNKNOWN else self.level.value
        left_out = [each.part.value for each in self.parts if each.outcome is PartOutcome.SKIPPED]
        if all(name in ON_REQUEST for name in left_out):
            return word
        chosen = [each.part.value for each in self.parts if each.outcome is not PartOutcome.SKIPPED]
        missing = [name for name in left_out if name not in ON_REQUEST]
        if not chosen or len(missing) < len(chosen):
            return f"{word}, without {', '.join(missing)}"
        return f"{word}, only {', '.join(chosen)}"

    def sentences(self) -> list[str]:
        """Return the summary of the whole certificate."""
        found = [f"{self.measured} of {len(self.nodes)} nodes of {self.cluster} were idle and measured"]
        for outcome in PartOutcome:
            names = [each.part.value for each in self.parts if each.outcome is outcome]
            found += [f"{outcome.value}: {', '.join(names)}"] if names else []
        return found

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT, "cluster": self.cluster, "at": self.at, "level": self.level.value,
            "heading": self.heading, "nodes": list(self.nodes),
            "simulated": list(self.simulated), "quick": self.quick, "version": self.version,
            "measured": self.measured,
            "parts": [_part_to_dict(each) for each in self.parts],
        }  # fmt: skip


def _part_to_dict(each: CertifiedPart) -> dict[str, Any]:
    figures = [
        {"name": one.name, "value": one.value, "unit": one.unit, "better": one.better.value} for one in each.figures
    ]
    return {
        "part": each.part.value, "outcome": each.outcome.value, "level": each.level.value, "summary": each.summary,
        "figures": figures, "findings": list(each.findings), "head": list(each.head),
        "rows": [list(row) for row in each.rows], "commands": list(each.commands),
    }  # fmt: skip


class CertificateUnreadable(UsageError):
    """Raised if a file is not a certificate."""


def read_certificate(text: str, source: str = "") -> Certificate:
    """Return the certificate in a JSON report. Parts that this version of Dal Segno does not know are left out."""
    try:
        found = json.loads(text)
        if found["format"] != FORMAT:
            raise ValueError(f"its format is {found['format']!r}")
        known = [each for each in found["parts"] if each["part"] in set(CertifyPart)]
        return Certificate(
            str(found["cluster"]), float(found["at"]), _texts(found["nodes"]), tuple(map(_read_part, known)),
            _texts(found["simulated"]), bool(found["quick"]), str(found["version"]),
            int(found["measured"]),
        )  # fmt: skip
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CertificateUnreadable(
            f"`{source}` is not a certificate: {type(error).__name__} {error}",
            hint="give the file `certificate.json` that `dalsegno certify` wrote",
        ) from error


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise TypeError("a list is missing")
    return tuple(map(str, value))


def _read_part(value: Mapping[str, Any]) -> CertifiedPart:
    figures = [
        CertifiedFigure(str(one["name"]), float(one["value"]), str(one["unit"]), BetterFigure(one["better"]))
        for one in value["figures"]
    ]
    return CertifiedPart(
        CertifyPart(value["part"]), PartOutcome(value["outcome"]), BenchLevel(value["level"]), str(value["summary"]),
        tuple(figures), _texts(value["findings"]), _texts(value["head"]), tuple(map(_texts, value["rows"])),
        _texts(value["commands"]),
    )  # fmt: skip


# Comparison with an older certificate


class CertificateTrend(str, Enum):
    """The change of a verdict or figure since the older certificate: worse, better, or no longer measured."""

    WORSE = "worse"
    BETTER = "better"
    MISSING = "no longer measured"


@dataclass(frozen=True)
class CertificateChange:
    """A changed figure, or a changed verdict of a part. For a verdict, `name` is "verdict"."""

    part: CertifyPart
    name: str
    before: str
    now: str
    trend: CertificateTrend
    share: float | None = None  # the change of a figure as a share of its older value


# The order of verdicts for comparisons. A part without a verdict is neither better nor worse than another.
_RANKS = {BenchLevel.PASS: 0, BenchLevel.DEGRADED: 1, BenchLevel.FAIL: 2, BenchLevel.IMPOSSIBLE: 2}


def compare_certificates(old: Certificate, new: Certificate) -> list[CertificateChange]:
    """Return the differences between the parts that both certificates have.

    What got worse comes first, then what is no longer measured, then what got better. In each of these groups, verdicts
    come before figures, and figures are sorted by the size of their change.
    """
    before = {each.part: each for each in old.parts}
    changes = [change for each in new.parts if each.part in before for change in _changes(before[each.part], each)]
    order = [CertificateTrend.WORSE, CertificateTrend.MISSING, CertificateTrend.BETTER]
    return sorted(changes, key=lambda each: (order.index(each.trend), each.share is not None, -abs(each.share or 0.0)))


def _changes(old: CertifiedPart, new: CertifiedPart) -> list[CertificateChange]:
    found = []
    if old.outcome is PartOutcome.MEASURED and new.outcome is not PartOutcome.MEASURED:
        return [CertificateChange(new.part, "verdict", old.word, new.word, CertificateTrend.MISSING)]
    ranks = _RANKS.get(old.level), _RANKS.get(new.level)
    if ranks[0] is not None and ranks[1] is not None and ranks[0] != ranks[1]:
        trend = CertificateTrend.WORSE if ranks[1] > ranks[0] else CertificateTrend.BETTER
        found.append(CertificateChange(new.part, "verdict", old.word, new.word, trend))
    now = {each.name: each for each in new.figures}
    for each in old.figures:
        if new.outcome is not PartOutcome.MEASURED:
            break
        found += _figure_change(new.part, each, now.get(each.name))
    return found


def _figure_change(part: CertifyPart, old: CertifiedFigure, new: CertifiedFigure | None) -> list[CertificateChange]:
    before = str(old)
    if new is None or new.unit != old.unit:
        return [CertificateChange(part, old.name, before, "-", CertificateTrend.MISSING)]
    share = (new.value - old.value) / abs(old.value) if old.value else float(new.value != old.value)
    if abs(share) <= TOLERANCES.get(part, TOLERANCE):
        return []
    worse = (share < 0) == (new.better is BetterFigure.HIGHER)
    trend = CertificateTrend.WORSE if worse else CertificateTrend.BETTER
    return [CertificateChange(part, old.name, before, str(new), trend, share)]


def comparison_notes(old: Certificate, new: Certificate) -> list[str]:
    """Return the reasons why the figures of the two certificates may not be comparable."""
    notes = []
    if old.cluster != new.cluster:
        notes.append(f"the older certificate is of another cluster: {old.cluster}")
    if old.quick != new.quick:
        notes.append("only one of them was made with --quick: their figures differ for that reason too")
    if old.simulated != new.simulated:
        notes.append("different things were simulated")
    if set(old.nodes) != set(new.nodes):
        notes.append(f"other nodes: {len(old.nodes)} then, {len(new.nodes)} now")
    return notes


CHANGE_HEAD = ("PART", "WHAT", "BEFORE", "NOW", "CHANGE")


def change_rows(changes: Sequence[CertificateChange]) -> list[list[str]]:
    return [
        [
            each.part.value, each.name, each.before, each.now,
            each.trend.value if each.share is None else f"{each.trend.value}: {each.share:+.0%}",
        ]
        for each in changes
    ]  # fmt: skip
