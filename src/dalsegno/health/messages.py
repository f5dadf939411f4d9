"""Messages between node agents and the controller: heartbeats, reports, orders and their answers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, fields, replace
from typing import Any, TypeVar

from dalsegno.health.result import Remedy, Result, Verdict
from dalsegno.wire.frames import Message

# The reader does not trust the sender of a report: the node may be broken, or the message forged.


MAX_FINDINGS = 256
MAX_GPUS = 64
MAX_TEXT = 500  # maximum characters of a string; the sender truncates longer strings, the reader refuses them

_E = TypeVar("_E", Verdict, Remedy)


class BadReport(Exception):
    """Raised if a message is not a valid report."""


@dataclass(frozen=True)
class Finding:
    """The result of a check, and its time (seconds since 1970, by the node's clock)."""

    check: str
    result: Result
    at: float


@dataclass(frozen=True)
class GpuIdentity:
    """The identity of one GPU."""

    index: int
    uuid: str
    serial: str = ""
    model: str = ""


@dataclass(frozen=True)
class NodeReport:
    """The state of a node. `boot` changes with every boot."""

    node: str
    boot: str
    findings: tuple[Finding, ...] = ()
    gpus: tuple[GpuIdentity, ...] = ()


@dataclass(frozen=True)
class GpuReading:
    """The last reading of one GPU. None means that a value is not available."""

    index: int
    temperature_c: float | None = None
    memory_used_mib: float | None = None
    memory_total_mib: float | None = None
    utilization_percent: float | None = None
    clock_mhz: float | None = None
    pcie_width: float | None = None


def report_message(report: NodeReport) -> dict[str, Any]:
    findings = [_finding_message(each) for each in report.findings[:MAX_FINDINGS]]
    gpus = [{"index": gpu.index, "uuid": gpu.uuid, "serial": gpu.serial, "model": gpu.model} for gpu in report.gpus]
    return {"node": report.node, "boot": report.boot, "findings": findings, "gpus": gpus}


def _finding_message(finding: Finding) -> dict[str, Any]:
    result = finding.result
    outcome = {"verdict": result.verdict.value, "text": result.text[:MAX_TEXT], "remedy": result.remedy.value}
    return {"check": finding.check, "at": finding.at, **outcome, "code": result.code[:MAX_TEXT]}


def parse_report(message: Mapping[str, Any]) -> NodeReport:
    """Parse a report; raise BadReport if it is not valid."""
    if set(message) != {"node", "boot", "findings", "gpus"}:
        raise BadReport(f"unexpected keys {sorted(map(str, message))}"[:MAX_TEXT])
    report = NodeReport(_text(message, "node"), _text(message, "boot"))
    findings = tuple(map(_finding, _list(message, "findings", MAX_FINDINGS)))
    return replace(report, findings=findings, gpus=tuple(map(_gpu, _list(message, "gpus", MAX_GPUS))))


def _finding(entry: Mapping[str, Any]) -> Finding:
    result = Result(
        _member(Verdict, entry, "verdict"), _text(entry, "text"), _member(Remedy, entry, "remedy"), _text(entry, "code")
    )
    return Finding(_text(entry, "check"), result, _time(entry, "at"))


def _gpu(entry: Mapping[str, Any]) -> GpuIdentity:
    index = entry.get("index")
    if type(index) is not int or not 0 <= index < MAX_GPUS:
        raise BadReport("a GPU without an index")
    return GpuIdentity(index, _text(entry, "uuid"), _text(entry, "serial"), _text(entry, "model"))


def _list(message: Mapping[str, Any], key: str, most: int) -> list[Mapping[str, Any]]:
    entries = message.get(key)
    if not isinstance(entries, list) or len(entries) > most or not all(isinstance(each, dict) for each in entries):
        raise BadReport(f"`{key}` is not a list of at most {most} entries")
    return entries


def _text(entry: Mapping[str, Any], key: str) -> str:
    value = entry.get(key)
    if not isinstance(value, str) or len(value) > MAX_TEXT or not value.isprintable():
        raise BadReport(f"`{key}` is not a line of text")
    return value


def _time(entry: Mapping[str, Any], key: str) -> float:
    value = entry.get(key)
    # NaN and infinity are refused too.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e11:
        raise BadReport(f"`{key}` is not a time")
    return float(value)


def _member(kind: type[_E], entry: Mapping[str, Any], key: str) -> _E:
    try:
        return kind(entry.get(key))
    except ValueError:
        raise BadReport(f"`{key}` is not one of {', '.join(each.value for each in kind)}") from None


# Heartbeats, reports and answers


MAX_PART = 32 << 10  # maximum characters of a file in one message
MAX_PART_BYTES = 96 << 10  # maximum size of such a part as JSON, in which one character may take twelve bytes
_FILE = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
BEAT: Message = {"beat": True}


@dataclass(frozen=True)
class AgentBeat:
    """A heartbeat."""


@dataclass(frozen=True)
class NewFindings:
    """New or changed findings. `all` has the names of all current checks; findings of other checks are dropped."""

    report: NodeReport
    all: frozenset[str] | None = None


@dataclass(frozen=True)
class Reply:
    """A part of the answer to an order; `done` marks the last part."""

    order: int
    done: bool = False
    error: str = ""
    report: NodeReport | None = None
    port: int = 0  # the port on which the node listens, for a pair test
    file: str = ""
    part: str = ""  # the next characters of the file


@dataclass(frozen=True)
class GpuReadings:
    """The readings of all GPUs of a node. They are only shown to people; no decision depends on them."""

    gpus: tuple[GpuReading, ...]


Word = AgentBeat | NewFindings | GpuReadings | Reply


_WIDTHS = (5, len(fields(GpuReading)))  # valid lengths of a row; earlier versions of the agent send five fields


def readings_message(gpus: Iterable[GpuReading]) -> Message:
    """Return the readings as short rows, in the order of the fields of `GpuReading`."""
    return {"readings": readings_rows(gpus)}


def readings_rows(gpus: Iterable[GpuReading]) -> list[list[float | None]]:
    return [list(astuple(gpu)) for gpu in gpus][:MAX_GPUS]


def parse_readings(rows: object) -> tuple[GpuReading, ...]:
    """Parse rows of readings; raise BadReport if they are not valid."""
    if not isinstance(rows, list) or len(rows) > MAX_GPUS:
        raise BadReport(f"`readings` is not a list of at most {MAX_GPUS} rows")
    return tuple(map(_reading, rows))


def _reading(row: object) -> GpuReading:
    if not isinstance(row, list) or len(row) not in _WIDTHS or type(row[0]) is not int or not 0 <= row[0] < MAX_GPUS:
        raise BadReport("not a reading of a GPU")
    return GpuReading(row[0], *(_figure(value) for value in row[1:]))


def _figure(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e9:
        raise BadReport("a reading is not a number")
    return value


def findings_message(news: NewFindings) -> Message:
    message: Message = {"report": report_message(news.report)}
    return message if news.all is None else {**message, "all": sorted(news.all)}


def reply_message(reply: Reply) -> Message:
    message: Message = {
        "answer": reply.order,
        "done": reply.done,
        "error": reply.error[:MAX_TEXT],
        "port": reply.port,
    }
    message.update(file=reply.file, part=reply.part)
    return message if reply.report is None else {**message, "report": report_message(reply.report)}


def parts(text: str) -> Iterator[str]:
    """Yield the parts of a file's text, at least one. Each fits into a message, even if users control the text."""
    start = 0
    while start == 0 or start < len(text):
        length = MAX_PART
        while len(json.dumps(text[start : start + length])) > MAX_PART_BYTES:
            length //= 2
        yield text[start : start + length]
        start += length


def parse_agent_message(message: Mapping[str, Any]) -> Word:
    """Parse a message from an agent; raise BadReport if it is not valid."""
    if message == BEAT:
        return AgentBeat()
    if "answer" in message:
        return _read_reply(message)
    if set(message) == {"readings"}:
        return GpuReadings(parse_readings(message["readings"]))
    if set(message) - {"all"} == {"report"}:
        return NewFindings(_report(message["report"]), _names(message["all"]) if "all" in message else None)
    raise BadReport("not a message of an agent")


def _read_reply(message: Mapping[str, Any]) -> Reply:
    if set(message) - {"report"} != {"answer", "done", "error", "port", "file", "part"}:
        raise BadReport("not an answer to an order")
    order, port = _number(message, "answer", 1 << 53), _number(message, "port", 65535)
    error, file, part = (_text_field(message, key) for key in ("error", "file", "part"))
    if file and not _FILE.fullmatch(file):
        raise BadReport("invalid file name")
    report = _report(message["report"]) if "report" in message else None
    return Reply(order, message["done"] is True, error, report, port, file, part)


def _report(value: object) -> NodeReport:
    if not isinstance(value, dict):
        raise BadReport("not a report")
    return parse_report(value)


def _names(value: object) -> frozenset[str]:
    if not isinstance(value, list) or len(value) > MAX_FINDINGS:
        raise BadReport("`all` is not a list of checks")
    if not all(isinstance(name, str) and len(name) <= MAX_TEXT for name in value):
        raise BadReport("`all` is not a list of names")
    return frozenset(value)


def _number(message: Mapping[str, Any], key: str, most: int) -> int:
    value = message[key]
    if type(value) is not int or not 0 <= value <= most:
        raise BadReport(f"`{key}` is not a number up to {most}")
    return value


def _text_field(message: Mapping[str, Any], key: str) -> str:
    value = message[key]
    if not isinstance(value, str) or len(value) > (MAX_PART if key == "part" else MAX_TEXT):
        raise BadReport(f"`{key}` is not text, or too long")
    return value


# Orders from the controller to a node agent


@dataclass(frozen=True)
class Order:
    """An order from the controller to an agent.

    `do` is `check` (argument: context), `evidence`, `validate` (alone, or with a partner node), `pair-listen` (be the
    partner; argument: secret) or `rest` (argument: seconds; release the GPUs, so that they can be reset).
    """

    number: int
    do: str
    arguments: Mapping[str, str]


def order_message(order: Order) -> Message:
    return {"order": order.number, "do": order.do, "arguments": dict(order.arguments)}


def read_order(message: Mapping[str, Any]) -> Order:
    """Parse an order; raise BadReport if it is not valid. The controller is authenticated, but may have another
    version."""
    arguments = message.get("arguments")
    if set(message) != {"order", "do", "arguments"} or not isinstance(arguments, dict):
        raise BadReport("not an order")
    if not all(isinstance(value, str) and len(value) <= MAX_TEXT for value in arguments.values()):
        raise BadReport("invalid arguments of an order")
    return Order(_number(message, "order", 1 << 53), _text_field(message, "do"), arguments)
