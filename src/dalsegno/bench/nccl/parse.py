"""Read tables from output of any version of nccl-tests, even behind launchers' prefixes and among other lines. Pure.

Columns are found by their names in the header, so old and new formats need no version. Unknown text is skipped. Time
and memory are linear in the length of the text: long lines are truncated, and the number of tables is limited.

    tables = read_tables(text)   # text of a log, or a file that `-J` wrote
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from math import isfinite

from dalsegno.bench.nccl.table import (
    IterationTimes,
    NcclColumns,
    NcclDevice,
    NcclRow,
    NcclSettings,
    NcclTable,
    NcclTest,
    NcclTiming,
    find_test,
)

MAX_LINE = 4096  # nccl-tests truncate their own lines at 2048 characters
MAX_STREAMS = 1024
MAX_TABLES = 1024
MAX_NOTES = 32

_NAME = r"[^\s\]]{1,256}"
_PREFIX = re.compile(
    r"[ \t]{0,8}(?:"
    r"\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[\d.,:Z+-]{0,20}\]?:?[ \t]"  # a time, as kubectl and journalctl print it
    r"|\w{3} \w{3} [ \d]\d \d\d:\d\d:\d\d \d{4}(?=[\[<])"  # mpirun --timestamp-output
    r"|(?P<srun>\d{1,7}):(?=[ \t#]) ?"  # srun -l
    r"|\[(?:[^\]\s,]{0,64}@)?\d{1,9},(?P<mpi>\d{1,7})\](?:<std(?:out|err)>)?: ?"  # mpirun --tag-output
    r"|\[(?:default|rank)?(?P<tag>\d{1,7})\](?:: ?| (?=[ #]))"  # torchrun, and MPICH with -prepend-rank
    r")"
)
_DEBUG = re.compile(r":\d{1,9}:\d{1,9} \[-?\d{1,4}\] ")  # gpu49:65234:65300 [0] NCCL INFO …
_HOST = re.compile(r"[A-Za-z_][\w.-]*\Z")
_COLOUR = re.compile(r"\x1b\[[0-9;]{0,16}[A-Za-z]")
_VERSION = re.compile(r"# nccl-tests version (\S{1,32})(?: nccl-headers=(\d{1,9}))?(?: nccl-library=(\d{1,9}))?")
_STARTING = re.compile(r"# Collective test (starting|concluded): (\S{1,256})")
_SETTINGS = re.compile(
    r"# nThread:? (\d{1,9}) nGpus:? (\d{1,9}) minBytes:? (\d{1,19}) maxBytes:? (\d{1,19}) step: (\d{1,19})\((\w{1,9})\)"
    r" warmup iters: (\d{1,9}) iters: (\d{1,9})(?: agg iters: (\d{1,9}))? validation: (\d{1,9})(?: graph: (\d{1,9}))?"
    r"(?: unalign: (\d{1,9}))?"
)
_DEVICE = re.compile(
    rf"# +Rank +(\d{{1,9}})(?: +Group +(\d{{1,9}}))?(?: +Pid +(\d{{1,9}}))? +on +({_NAME}) +device +(\d{{1,9}})"
    r" +\[([^\]]{1,64})\] ?(.{0,256})"
)
_FOOTER = re.compile(r"(Out of bounds values|Avg bus bandwidth|GPU memory usage) {0,9}: (.{0,512})")
_FAILURE = re.compile(r"Test (?:CUDA|NCCL) failure \S{1,256}:\d{1,9} '([^'\n]{1,512})")
_PREAMBLE = re.compile(r"\s{0,32}(\d{1,19})\s+(\d{1,19})\s+([A-Za-z]\w{0,15})(?:\s+([a-z]{1,9}))?(?:\s+(-?\d{1,9}))?")
_STAMP = re.compile(r"\d{4}-\d\d-\d\d")
_VALUE = re.compile(r"[\d.:eE+-]{1,24}|-?(?:nan|inf)|N/A")

_OLD_NAMES = {"bytes": "size", "N": "count", "op": "redop", "res": "error"}  # column names of nccl-tests 1
_TIMES = ("time", "cputime")
_ITERATION = ("i_min", "i_max", "i_p99", "i_cv%")
_LEAD = ("size", "count", "type", "redop", "root")
_TYPES = {
    "int8", "uint8", "int32", "uint32", "int64", "uint64", "half", "float", "double", "bfloat16", "f8e4m3", "f8e5m2",
    "fp8_e4m3", "fp8_e5m2", "char", "int",
}  # fmt: skip


@dataclass(frozen=True)
class _TableColumns:
    """The columns of a table, from its header or guessed from its first row."""

    lead: tuple[str, ...] = _LEAD
    placements: tuple[tuple[str, ...], ...] = (("time", "algbw", "busbw", "#wrong"),) * 2
    timestamps: bool = False
    milliseconds: bool = False

    @property
    def values(self) -> int:
        return sum(map(len, self.placements)) + 2 * self.timestamps


_USUAL = _TableColumns()


@dataclass
class _Draft:
    """A table whose lines are still being read. `stage` is the number of the part of the output that was read last."""

    stream: str
    line: int
    stage: int = 0
    test: NcclTest = NcclTest.UNKNOWN
    version: str = ""
    headers: int | None = None
    library: int | None = None
    settings: NcclSettings | None = None
    devices: list[NcclDevice] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    layout: _TableColumns | None = None
    cpu_time: bool = False
    rows: list[NcclRow] = field(default_factory=list)
    out_of_bounds: int | None = None
    avg_busbw: float | None = None
    avg_ok: bool | None = None
    memory: str = ""
    error: str = ""
    concluded: bool = False
    pending: list[str] = field(default_factory=list)  # the beginning of a row that other output interrupted

    def table(self) -> NcclTable:
        layout = self.layout or _TableColumns()
        columns = NcclColumns(
            in_place=len(layout.placements) > 1,
            per_iteration=any("i_min" in each for each in layout.placements),
            timestamps=layout.timestamps,
            cpu_time=self.cpu_time,
        )
        return NcclTable(
            self.test, tuple(self.rows), tuple(self.devices), self.settings, columns, self.version, self.headers,
            self.library, tuple(self.notes), self.out_of_bounds, self.avg_busbw, self.avg_ok, self.memory, self.error,
            self.concluded, self.stream, self.line,
        )  # fmt: skip


def read_tables(text: str) -> tuple[NcclTable, ...]:
    """Return all tables in a log or in a JSON file of nccl-tests, in the order in which they start."""
    if text.lstrip("\ufeff \t\r\n")[:1] == "{":
        from dalsegno.bench.nccl.json_file import read_json

        if found := read_json(text):
            return found
    reader = _NcclLogReader()
    for number, line in enumerate(text.split("\n"), 1):
        if len(line) > 7:  # shorter lines contain no part of a table
            reader.read(number, line)
    return reader.tables()


class _NcclLogReader:
    """The reader of a log. It keeps a draft per rank, because the lines of several ranks may be mixed."""

    def __init__(self) -> None:
        self._open: dict[str, _Draft] = {}
        self._done: list[_Draft] = []
        self._others: dict[str, str] = {}  # unknown prefix of a header line -> the name of its stream

    def tables(self) -> tuple[NcclTable, ...]:
        drafts = sorted((*self._done, *self._open.values()), key=lambda draft: draft.line)
        # A lone number or comment is not a table: a test prints at least its settings or devices.
        return tuple(draft.table() for draft in drafts if draft.rows or draft.settings or draft.devices)

    def read(self, number: int, line: str) -> None:
        if len(line) > MAX_LINE:
            line = line[:MAX_LINE]
        if "\x1b" in line or "\x00" in line:
            line = _COLOUR.sub("", line).replace("\x00", "")
        stream, body = self._split(line)
        complete = True
        if "NCCL" in body and (noise := _DEBUG.search(body)):
            host = _HOST.search(body, max(0, noise.start() - 256), noise.start())
            body, complete = body[: host.start() if host else noise.start()], False
        head = body.lstrip()
        if not head:
            return
        if head[0] == "#":
            self._comment(number, stream, head.rstrip("\r\n"))
        elif " failure " in head and (found := _FAILURE.search(head)):
            self._failure(stream, found[1].strip())
        elif head[0] in "0123456789":
            self._values(number, stream, body, complete)
        elif "Out of bounds" in head or "Avg bus" in head:  # nccl-tests 1 printed no "#" here
            self._comment(number, stream, f"# {head}")

    def _failure(self, stream: str, message: str) -> None:
        """Record why a rank failed. If the rank has no table, record it in the first open one: only rank 0 prints a
        table, but any rank may fail."""
        draft = self._open.get(stream) or next(iter(self._open.values()), None)
        if draft is not None and not draft.error:
            draft.error = message

    def _split(self, line: str) -> tuple[str, str]:
        """Return the rank, or another prefix, that a launcher put in front of the line, and the rest of the line."""
        stream, body = "", line
        for _ in range(3):
            found = _PREFIX.match(body)
            if not found:
                break
            stream = found["srun"] or found["mpi"] or found["tag"] or stream
            body = body[found.end() :]
        if self._others and body[:1] not in ("#", " "):
            for prefix, name in self._others.items():
                if body.startswith(prefix):
                    return name, body[len(prefix) :]
        if not stream and body[:1] not in ("#", " ") and "# " in body:
            prefix, mark, rest = body.partition("#")
            if len(prefix) <= 80 and len(self._others) < 64 and _is_header(mark + rest):
                self._others[prefix] = prefix.strip(" |:")
                return self._others[prefix], mark + rest
        return stream, body

    def _draft(self, number: int, stream: str, stage: int, *, again: bool = False) -> _Draft | None:
        """Return the draft that a line of this stage belongs to; None if there are too many tables.

        A line of an earlier stage starts a new table. So does a repeated stage, unless `again` allows it.
        """
        draft = self._open.get(stream)
        if draft is None or stage < draft.stage or (stage == draft.stage and not again):
            if len(self._done) >= MAX_TABLES or (draft is None and len(self._open) >= MAX_STREAMS):
                return None
            if draft is not None:
                self._done.append(draft)
            draft = self._open[stream] = _Draft(stream, number)
        draft.stage = max(stage, draft.stage)
        return draft

    def _comment(self, number: int, stream: str, text: str) -> None:
        if found := _DEVICE.match(text):  # tested first, because most lines of a header are devices
            if draft := self._draft(number, stream, 4, again=True):
                draft.devices.append(_device(found))
        elif found := _VERSION.match(text):
            if draft := self._draft(number, stream, 1):
                draft.version, draft.headers, draft.library = found[1], _whole(found[2]), _whole(found[3])
        elif found := _STARTING.match(text):
            starts = found[1] == "starting"
            if draft := self._draft(number, stream, 2 if starts else 9):
                draft.test, draft.concluded = find_test(found[2]), not starts
        elif found := _SETTINGS.match(text):
            if draft := self._draft(number, stream, 3):
                draft.settings = _settings(found)
        elif found := _FOOTER.search(text):
            self._footer(number, stream, found[1], found[2].strip())
        elif "busbw" in text and ("size" in text or "bytes" in text):
            if draft := self._draft(number, stream, 5):
                draft.layout, draft.cpu_time = _layout(text), "cputime" in text
        elif draft := self._open.get(stream):
            if text.startswith("# error: "):
                draft.error = text[9:].strip()
            elif draft.stage in (3, 4) and len(draft.notes) < MAX_NOTES and _is_note(text):
                draft.notes.append(text[2:])

    def _footer(self, number: int, stream: str, name: str, value: str) -> None:
        draft = self._draft(number, stream, 7, again=True)
        words = value.split()
        if draft is None or not words:
            return
        if name.startswith("GPU"):
            draft.memory = value
        elif name.startswith("Out"):
            draft.out_of_bounds = int(words[0]) if re.fullmatch(r"-?\d{1,18}", words[0]) else None
        else:
            draft.avg_busbw = _number(words[0])
            draft.avg_ok = words[1] == "OK" if len(words) > 1 and words[1] in ("OK", "FAILED") else None

    def _values(self, number: int, stream: str, body: str, complete: bool) -> None:
        """Read a row or a part of a row. Lines that NCCL logs may interrupt a row after any value."""
        draft = self._open.get(stream)
        tokens = body.split()
        usual = complete and len(tokens) == 13 and draft and draft.stage in (5, 6) and draft.layout == _USUAL
        if usual and draft and (found := _usual_row(tokens)):
            draft.stage = 6
            draft.pending = []
            draft.rows.append(found)
            return
        rest = None
        if len(tokens) > 2 and (tokens[2] in _TYPES or (draft and draft.layout and _PREAMBLE.match(body))):
            start = self._draft(number, stream, 6, again=True)
            if start is None:
                return
            draft = start
            if draft.layout is None:
                draft.layout = _guess_layout(tokens)
            draft.pending = []
            rest = _split_lead(tokens, draft.layout)
        elif draft and draft.pending and draft.layout:
            rest = [*draft.pending, *tokens]
        if rest is None or draft is None or draft.layout is None:
            return
        lead = len(draft.layout.lead)
        good = [*rest[:lead], *_leading_values(rest[lead:])]
        row = _make_row(good, draft.layout, body) if complete or len(good) >= lead + draft.layout.values else None
        if row:
            draft.rows.append(row)
        draft.pending = [] if row or len(good) > lead + draft.layout.values else good


def _is_header(text: str) -> bool:
    return bool(_SETTINGS.match(text) or _VERSION.match(text) or _STARTING.match(text) or " busbw " in text)


def _is_note(text: str) -> bool:
    words = text.split()
    return len(words) > 1 and words[1] not in ("Using", "out-of-place", "(B)") and text.startswith("# ")


def _settings(found: re.Match[str]) -> NcclSettings:
    return NcclSettings(
        threads=int(found[1]), gpus=int(found[2]), min_bytes=int(found[3]), max_bytes=int(found[4]),
        step=int(found[5]), step_is_factor=found[6] == "factor", warmup_iters=int(found[7]), iters=int(found[8]),
        agg_iters=int(found[9] or 1), validation=int(found[10]), graph=int(found[11] or 0), unalign=_whole(found[12]),
    )  # fmt: skip


def _device(found: re.Match[str]) -> NcclDevice:
    rank, group, pid, host, device, pci, product = found.groups()
    return NcclDevice(int(rank), int(group or 0), int(pid or 0), host, int(device), pci, product.strip())


def _layout(header: str) -> _TableColumns:
    names = [_OLD_NAMES.get(name, name) for name in header.split()[1:]]
    starts = [index for index, name in enumerate(names) if name in _TIMES]
    stamps = "timestamp" in names
    end = names.index("timestamp") if stamps else len(names)
    if not starts:
        return _TableColumns()
    placements = tuple(tuple(names[start:stop]) for start, stop in zip(starts, [*starts[1:], end], strict=True))
    return _TableColumns(tuple(names[: starts[0]]), placements[:2], stamps, milliseconds=" bytes " in header)


def _guess_layout(tokens: list[str]) -> _TableColumns:
    """Return the layout of a table without a header, from the values in its first row."""
    stamps = len(tokens) > 2 and bool(_STAMP.match(tokens[-2]))
    lead = 3 + sum(1 for token in tokens[3:5] if token.isalpha() or re.fullmatch(r"-?\d{1,3}", token))
    count = len(tokens) - lead - 2 * stamps
    placement = ("time", "algbw", "busbw", "#wrong") + (_ITERATION if count >= 16 else ())
    return _TableColumns(_LEAD[:lead], (placement,) * (1 if count < 2 * len(placement) else 2), stamps)


def _split_lead(tokens: list[str], layout: _TableColumns) -> list[str]:
    """Return the tokens. If other output follows the last leading column without a space, that output is removed."""
    last = len(layout.lead) - 1
    if len(tokens) > last and (found := re.match(r"-?\d+", tokens[last])) and found[0] != tokens[last]:
        return [*tokens[:last], found[0]]
    return tokens


def _leading_values(tokens: list[str]) -> list[str]:
    values = []
    for token in tokens:
        if not _VALUE.fullmatch(token):
            break
        values.append(token)
    return values


def _usual_row(tokens: list[str]) -> NcclRow | None:
    """Return a row of the usual 13 columns without reading the header; None if the row has another format."""
    size, count, dtype, redop, root, *texts = tokens
    try:
        values = [0.0 if text == "N/A" else float(text) for text in texts]
        first = NcclTiming(values[0], values[1], values[2], None if texts[3] == "N/A" else values[3])
        second = NcclTiming(values[4], values[5], values[6], None if texts[7] == "N/A" else values[7])
        row = NcclRow(_digits(size), _digits(count), dtype, redop, _digits(root), first, second)
    except ValueError:
        return None
    return row if isfinite(sum(values)) else None


def _make_row(tokens: list[str], layout: _TableColumns, line: str) -> NcclRow | None:
    """Return the row of these tokens; None if there are too few of them, or if one is malformed."""
    lead = dict(zip(layout.lead, tokens, strict=False))
    values = tokens[len(layout.lead) :]
    stamp = " ".join(values[-2:]) if len(values) > 2 and _STAMP.match(values[-2]) else ""
    if stamp:
        values = values[:-2]
    width = len(layout.placements[0])
    if len(values) < width or len(lead) < len(layout.lead):
        return None
    try:
        timings = [_timing(layout.placements[0], values[:width], layout.milliseconds)]
        if len(layout.placements) > 1 and len(values) >= width + len(layout.placements[1]):
            timings.append(_timing(layout.placements[1], values[width:], layout.milliseconds))
        size, count, root = _digits(lead["size"]), _digits(lead["count"]), _digits(lead.get("root", "-1"))
    except (ValueError, KeyError):
        return None
    first: NcclTiming | None = timings[0]
    second = timings[1] if len(timings) > 1 else None
    if second is None and len(layout.placements) > 1 and " " * 24 in line.strip():
        first, second = None, timings[0]  # the out-of-place columns are blank
    return NcclRow(size, count, lead.get("type", ""), lead.get("redop", "none"), root, first, second, stamp)


def _timing(names: tuple[str, ...], values: list[str], milliseconds: bool) -> NcclTiming:
    cells = dict(zip(names, values, strict=False))
    count = cells.get("#wrong", "N/A")  # the older column `error` is a difference, not a number of elements
    spread = None
    if "i_min" in cells:
        spread = IterationTimes(*(_number(cells[name]) for name in _ITERATION))
    time = _number(cells.get("time") or cells["cputime"]) * (1000 if milliseconds else 1)
    busbw, algbw = _number(cells["busbw"]), _number(cells["algbw"])
    return NcclTiming(time, algbw, busbw, None if count == "N/A" else _number(count), spread)


def _number(text: str) -> float:
    """Return a number; 0 for nan and inf, because comparisons with NaN are always false."""
    value = float(text)
    return value if isfinite(value) else 0.0


def _digits(text: str) -> int:
    """Return a whole number. Raise ValueError if it is larger than any memory."""
    if len(text) > 19:
        raise ValueError
    return int(text)


def _whole(text: str | None) -> int | None:
    return int(text) if text else None
