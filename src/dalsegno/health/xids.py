"""Xids, the NVIDIA driver's error numbers: a table of remedies (xids.csv), and a parser for the kernel log."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from dalsegno.errors import UsageError
from dalsegno.health.facts import LogLine
from dalsegno.health.node_reader import NodeReader
from dalsegno.health.result import Remedy
from dalsegno.system.files import make_folder, write_atomic
from dalsegno.system.hanging_calls import NoAnswer

SAYS_ITSELF = 154  # the text of this Xid names the action, which takes precedence over the table
_LINE = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9A-Fa-f:.]+)\): (\d+),?\s*(.*)")
_ACTION = re.compile(r"\bto 0x[0-9a-fA-F]+ \(([^)]*)\)")
_ACTIONS = {
    "none": Remedy.WATCH,
    "gpu reset required": Remedy.RESET,
    "drain and reset": Remedy.RESET,
    "node reboot required": Remedy.REBOOT,
    "drain p2p": Remedy.DRAIN,
}


@dataclass(frozen=True)
class XidRemedies:
    """The remedies for an Xid when it occurs once, when it occurs once on an A100, and when it is repeated."""

    xid: int
    remedy: Remedy
    on_a100: Remedy | None
    repeated: Remedy | None
    meaning: str


@dataclass(frozen=True)
class XidEvent:
    """An Xid in the kernel log."""

    gpu: str  # PCI address
    xid: int
    at: float
    text: str


@cache
def table() -> Mapping[int, XidRemedies]:
    lines = (Path(__file__).parent / "xids.csv").read_text(encoding="utf-8").splitlines()[1:]
    return {row.xid: row for row in map(_row, lines)}


def _row(line: str) -> XidRemedies:
    xid, remedy, on_a100, repeated, meaning = line.split(",", 4)
    return XidRemedies(int(xid), Remedy(remedy), _maybe(on_a100), _maybe(repeated), meaning)


def _maybe(cell: str) -> Remedy | None:
    return Remedy(cell) if cell else None


def events(lines: Iterable[LogLine]) -> list[XidEvent]:
    found = ((line, match) for line in lines if (match := _LINE.search(line.text)))
    return [XidEvent(match[1].lower(), int(match[2]), line.at, match[3]) for line, match in found]


def named_action(event: XidEvent) -> Remedy | None:
    """Return the action that the text of Xid 154 names; None for another Xid or an unknown action."""
    found = _ACTION.search(event.text) if event.xid == SAYS_ITSELF else None
    if found:
        return _ACTIONS.get(found[1].strip().lower())
    lower = event.text.lower() if event.xid == SAYS_ITSELF else ""
    return next((remedy for action, remedy in _ACTIONS.items() if action != "none" and action in lower), None)


def remedy_for(xid: int, count: int, repeats: float, a100: bool) -> Remedy:
    """Return the remedy in the table; an Xid that is not in the table is only watched."""
    row = table().get(xid)
    if row is None:
        return Remedy.WATCH
    if row.repeated is not None and count >= repeats:
        return row.repeated
    return row.on_a100 if a100 and row.on_a100 is not None else row.remedy


def meaning(xid: int) -> str:
    row = table().get(xid)
    return row.meaning if row else "not in the table"


# The file with the time of the last GPU reset. Older log lines do not count; a reboot clears the log anyway.


MARK = "/run/dalsegno-health/repaired"  # root writes this file, and a reboot removes it
FORMER_MARK = "/run/dalsegno-health/mended"  # the name of the file in earlier releases


def record_repair(now: float, uid: int, mark: str = MARK) -> None:
    if uid != 0:
        raise UsageError("only root can mark a machine as repaired", hint="use sudo")
    make_folder(Path(mark).parent, 0o700)
    write_atomic(Path(mark), f"{now:.3f}\n", 0o600)


def repaired_at(node: NodeReader) -> float:
    """Return when the GPUs were last reset; 0 if unknown."""
    return max(node.seen.since, *(_time_in(node, mark) for mark in (MARK, FORMER_MARK)))


def _time_in(node: NodeReader, mark: str) -> float:
    try:
        return float(node.read(mark))
    except (NoAnswer, ValueError):
        return 0.0
