"""A strict reader of Prometheus' text format, as an oracle: it refuses what Prometheus would refuse, and more."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

HELP = re.compile(r"# HELP ([a-zA-Z_:][a-zA-Z0-9_:]*) ((?:[^\\\n]|\\\\|\\n)+)")
TYPE = re.compile(r"# TYPE ([a-zA-Z_:][a-zA-Z0-9_:]*) (gauge|counter|histogram)")
LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n\x00-\x1f\x7f]|\\["\\n])*"'
SAMPLE = re.compile(rf"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{{({LABEL}(?:,{LABEL})*)\}})? (-?[0-9][0-9.e+-]*|[+-]Inf|NaN)")
PAIR = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
UNESCAPED = {r"\\": "\\", r"\"": '"', r"\n": "\n"}


@dataclass
class ReadFamily:
    """A family as it was read: its type, its label names, and its samples by name and labels."""

    type: str
    labels: set[tuple[str, ...]] = field(default_factory=set)
    samples: dict[tuple[str, tuple[tuple[str, str], ...]], float] = field(default_factory=dict)

    def value(self, **labels: str) -> float:
        found = {tuple(sorted(key)): value for (_, key), value in self.samples.items()}
        return found[tuple(sorted(labels.items()))]


def read_families(text: bytes) -> dict[str, ReadFamily]:
    """Return all families by name. Raise an AssertionError for a line that is not strictly right."""
    lines = text.decode().split("\n")
    assert lines.pop() == "", "the text ends with a line break"
    families: dict[str, ReadFamily] = {}
    name, at = "", 0
    while at < len(lines):
        if lines[at].startswith("#"):
            help, kind = HELP.fullmatch(lines[at]), TYPE.fullmatch(lines[at + 1])
            assert help and kind and help[1] == kind[1], lines[at : at + 2]
            name = help[1]
            assert name not in families, f"{name} occurs twice"
            families[name] = ReadFamily(kind[2])
            at += 2
            continue
        _read_sample(families[name], name, lines[at])
        at += 1
    return families


def _read_sample(family: ReadFamily, name: str, line: str) -> None:
    found = SAMPLE.fullmatch(line)
    assert found, f"not a sample: {line!r}"
    suffixes = ("_bucket", "_sum", "_count") if family.type == "histogram" else ("",)
    assert found[1] in [name + suffix for suffix in suffixes], line
    pairs = [
        (pair[1], re.sub(r"\\.", lambda two: UNESCAPED[two[0]], pair[2])) for pair in PAIR.finditer(found[2] or "")
    ]
    key = (found[1], tuple(pairs))
    assert key not in family.samples, f"twice: {line}"
    family.samples[key] = float(found[3].replace("Inf", "inf"))
    family.labels.add(tuple(label for label, _ in pairs))
