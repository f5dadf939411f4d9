"""The journal of a run: one line of JSON per event, appended in one write and never changed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

from dalsegno.system.ownership import open_beneath

MAX_BYTES = 256 << 20
MAX_TIME = 1e11
MAX_FOREIGN_BYTES = 16 << 20  # another user's journal must not exhaust this process's memory


class RunEvent(str, Enum):
    """The kind of a journal entry. Other versions of Dal Segno may write other kinds."""

    BEGAN = "began"
    CAME_BACK = "came back"
    SUBMITTED = "submitted"
    GRANTED = "granted"
    REFUSED = "refused"
    JOB_OVER = "job over"
    READY = "ready"
    COLD = "cold"
    SIGNAL = "signal"
    LOST = "lost"
    LEFT = "left"
    NOTICE = "notice"  # the cloud has announced that it will reclaim a node
    GENERATION = "generation"
    FIRST_STEP = "first step"  # a generation has completed its first step
    FAILED = "failed"
    IDLE = "idle"
    HUNG = "hung"  # a generation hangs; the entry says why (`hang.HangReport`)
    CORRUPTION = "corruption"  # ranks disagree about the gradients of a step
    PAUSE = "pause"
    NOTE = "note"
    RESTS = "rests"
    ENDED = "ended"


Entry = dict[str, Any]  # "at" (Unix time), "event", and its details


def append(path: Path, at: float, event: RunEvent, **what: object) -> None:
    """Append an entry in one write, so that lines from two writers never mix."""
    line = json.dumps({"at": round(at, 6), "event": event, **what}, separators=(",", ":")) + "\n"
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(handle).st_size
        cut_off = size and os.pread(handle, 1, size - 1) != b"\n"
        os.write(handle, (b"\n" if cut_off else b"") + line.encode())
    finally:
        os.close(handle)


def read(path: Path) -> Iterator[Entry]:
    """Yield all entries, or only the last ones if the journal is too long. A line cut off by a crash is skipped."""
    try:
        handle = open_beneath(path.parent, path.name)
    except (FileNotFoundError, NotADirectoryError):
        return
    with open(handle, "rb") as file:
        about = os.fstat(handle)
        own = not hasattr(os, "geteuid") or about.st_uid == os.geteuid()
        file.seek(max(0, about.st_size - (MAX_BYTES if own else MAX_FOREIGN_BYTES)))
        data = file.read(MAX_BYTES)
    for line in data.decode(errors="replace").splitlines():
        entry = parse_entry(line)
        if entry is not None:
            yield entry


def parse_entry(line: str) -> Entry | None:
    """Return the entry in a line; None if the line is not an entry."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) and _is_time(entry.get("at")) else None


def _is_time(value: object) -> bool:
    return isinstance(value, (int, float)) and abs(value) < MAX_TIME  # False for NaN; isfinite raises for huge ints
