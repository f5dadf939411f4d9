"""What a node says of itself to the controller, and how it is read: from a node that may be broken, or not ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from dalsegno.health.result import Remedy, Result, Verdict

MOST_FINDINGS = 256
MOST_GPUS = 64
LONGEST = 500  # characters of one text; more is cut off by the sender and refused by the reader

_E = TypeVar("_E", Verdict, Remedy)


class BadReport(Exception):
    """Not a report: what is wrong with it."""


@dataclass(frozen=True)
class Finding:
    """What a check found, and when (seconds since 1970, by the node's own clock)."""

    check: str
    result: Result
    at: float


@dataclass(frozen=True)
class Gpu:
    """What tells one GPU from all others."""

    index: int
    uuid: str
    serial: str = ""
    model: str = ""


@dataclass(frozen=True)
class Report:
    """All that a node knows of itself. `boot` is another after every boot."""

    node: str
    boot: str
    findings: tuple[Finding, ...] = ()
    gpus: tuple[Gpu, ...] = ()


def report_message(report: Report) -> dict[str, Any]:
    findings = [_finding_message(each) for each in report.findings[:MOST_FINDINGS]]
    gpus = [{"index": gpu.index, "uuid": gpu.uuid, "serial": gpu.serial, "model": gpu.model} for gpu in report.gpus]
    return {"node": report.node, "boot": report.boot, "findings": findings, "gpus": gpus}


def _finding_message(finding: Finding) -> dict[str, Any]:
    result = finding.result
    said = {"verdict": result.verdict.value, "text": result.text[:LONGEST], "remedy": result.remedy.value}
    return {"check": finding.check, "at": finding.at, **said, "code": result.code[:LONGEST]}


def parse_report(message: Mapping[str, Any]) -> Report:
    """The report in a message; BadReport for anything else."""
    if set(message) != {"node", "boot", "findings", "gpus"}:
        raise BadReport(f"its keys are {sorted(map(str, message))}"[:LONGEST])
    report = Report(_text(message, "node"), _text(message, "boot"))
    findings = tuple(map(_finding, _list(message, "findings", MOST_FINDINGS)))
    return replace(report, findings=findings, gpus=tuple(map(_gpu, _list(message, "gpus", MOST_GPUS))))


def _finding(entry: Mapping[str, Any]) -> Finding:
    result = Result(
        _member(Verdict, entry, "verdict"), _text(entry, "text"), _member(Remedy, entry, "remedy"), _text(entry, "code")
    )
    return Finding(_text(entry, "check"), result, _time(entry, "at"))


def _gpu(entry: Mapping[str, Any]) -> Gpu:
    index = entry.get("index")
    if type(index) is not int or not 0 <= index < MOST_GPUS:
        raise BadReport("a GPU without a number")
    return Gpu(index, _text(entry, "uuid"), _text(entry, "serial"), _text(entry, "model"))


def _list(message: Mapping[str, Any], key: str, most: int) -> list[Mapping[str, Any]]:
    entries = message.get(key)
    if not isinstance(entries, list) or len(entries) > most or not all(isinstance(each, dict) for each in entries):
        raise BadReport(f"`{key}` is no list of at most {most} entries")
    return entries


def _text(entry: Mapping[str, Any], key: str) -> str:
    value = entry.get(key)
    if not isinstance(value, str) or len(value) > LONGEST or not value.isprintable():
        raise BadReport(f"`{key}` is no line of text")
    return value


def _time(entry: Mapping[str, Any], key: str) -> float:
    value = entry.get(key)
    # What is no number, and what is beyond all numbers, is not between these two either.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e11:
        raise BadReport(f"`{key}` is no time")
    return float(value)


def _member(kind: type[_E], entry: Mapping[str, Any], key: str) -> _E:
    try:
        return kind(entry.get(key))
    except ValueError:
        raise BadReport(f"`{key}` is none of {', '.join(each.value for each in kind)}") from None
