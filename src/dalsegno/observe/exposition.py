"""Metric families and Prometheus' text format 0.0.4.

No client library is used: names that dashboards query, such as `DCGM_FI_DEV_XID_ERRORS` or `node_amazonefa_tx_bytes`,
are not legal OpenMetrics counters, and client libraries rename them.
"""

from __future__ import annotations

import bisect
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_LABEL = 200  # maximum characters of a label value; names and reasons from Slurm may be longer

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_UNSAFE = re.compile(r'[\\"\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]')


class MetricType(Enum):
    """The type of a family, as its TYPE line names it."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"
    UNTYPED = "untyped"


@dataclass(frozen=True)
class MetricFamily:
    """The samples of one metric: a value for each combination of label values, in the order of `labels`."""

    name: str
    type: MetricType
    help: str
    labels: tuple[str, ...] = ()
    values: Mapping[tuple[str, ...], float] = field(default_factory=dict)

    def lines(self) -> Iterator[str]:
        """Yield the lines of the family."""
        yield from self._heading()
        if not self.labels:
            yield from (f"{self.name} {number(value)}" for value in self.values.values())
            return
        # Two long label values may be equal after truncation, but a series must not occur twice.
        unique = {_label_set(self.labels, key): value for key, value in self.values.items()}
        yield from (f"{self.name}{shown} {number(value)}" for shown, value in unique.items())

    def _heading(self) -> Iterator[str]:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"invalid metric name {self.name!r}")
        yield f"# HELP {self.name} {self.help.translate(_IN_HELP)}"
        yield f"# TYPE {self.name} {self.type.value}"


_IN_HELP = {ord("\\"): "\\\\", ord("\n"): "\\n"}


def gauge(name: str, help: str, value: float) -> MetricFamily:
    """Return a gauge without labels."""
    return MetricFamily(name, MetricType.GAUGE, help, (), {(): value})


def counter(name: str, help: str, value: float) -> MetricFamily:
    """Return a counter without labels."""
    return MetricFamily(name, MetricType.COUNTER, help, (), {(): value})


def labelled(
    name: str,
    help: str,
    labels: Sequence[str],
    values: Mapping[tuple[str, ...], float],
    type: MetricType = MetricType.GAUGE,
) -> MetricFamily:
    """Return a family with labels."""
    return MetricFamily(name, type, help, tuple(labels), values)


@dataclass(frozen=True)
class Histogram:
    """Counts of observations by upper bound, their sum and number. It is immutable: `observe` returns a new one."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...] = ()  # one count per bound, and one for larger values; not cumulative
    sum: float = 0.0

    def observe(self, value: float) -> Histogram:
        """Return the histogram with one more observation."""
        counts = list(self.counts or (0,) * (len(self.bounds) + 1))
        counts[bisect.bisect_left(self.bounds, value)] += 1
        return Histogram(self.bounds, tuple(counts), self.sum + value)

    @property
    def total(self) -> int:
        return sum(self.counts)


@dataclass(frozen=True)
class HistogramFamily:
    """A histogram for each combination of label values."""

    name: str
    help: str
    labels: tuple[str, ...] = ()
    values: Mapping[tuple[str, ...], Histogram] = field(default_factory=dict)

    def lines(self) -> Iterator[str]:
        """Yield the lines of the family: cumulative buckets, sum and count."""
        yield f"# HELP {self.name} {self.help.translate(_IN_HELP)}"
        yield f"# TYPE {self.name} histogram"
        unique = {tuple(map(label_text, key)): histogram for key, histogram in self.values.items()}
        for key, histogram in unique.items():
            own = [f'{label}="{text}"' for label, text in zip(self.labels, key, strict=True)]
            counts = histogram.counts or (0,) * (len(histogram.bounds) + 1)
            below = 0
            for bound, count in zip((*histogram.bounds, math.inf), counts, strict=True):
                below += count
                inner = ",".join([*own, f'le="{number(bound)}"'])
                yield f"{self.name}_bucket{{{inner}}} {below}"
            labels = f"{{{','.join(own)}}}" if own else ""
            yield f"{self.name}_sum{labels} {number(histogram.sum)}"
            yield f"{self.name}_count{labels} {below}"


Family = MetricFamily | HistogramFamily


def render(families: Iterable[Family]) -> bytes:
    """Return the text of all families. Each name must occur once."""
    return ("\n".join(line for family in families for line in family.lines()) + "\n").encode()


@lru_cache(1 << 15)  # the same labels of a node occur in many families
def _label_set(labels: tuple[str, ...], key: tuple[str, ...]) -> str:
    return "{" + ",".join([f'{label}="{label_text(text)}"' for label, text in zip(labels, key, strict=True)]) + "}"


def label_text(text: str) -> str:
    """Return untrusted text escaped as a label value, so that the text cannot end the value, the line or the
    encoding."""
    text = text if len(text) <= MAX_LABEL else text[: MAX_LABEL - 1] + "…"
    return _UNSAFE.sub(_escape, text) if _UNSAFE.search(text) else text


def _escape(found: re.Match[str]) -> str:
    letter = found[0]
    if letter in '\\"':
        return "\\" + letter
    return "\\n" if letter == "\n" else "\ufffd"


def number(value: float) -> str:
    """Return a value as Prometheus writes it."""
    if isinstance(value, int):
        return str(value)
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    if math.isnan(value):
        return "NaN"
    return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
