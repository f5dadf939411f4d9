"""What happened to a run, in order: a line of JSON each, appended whole, never changed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Entry = dict[str, Any]  # "at" (seconds since 1970), "event", and whatever belongs to it


def append(path: Path, at: float, event: str, **what: object) -> None:
    """One write, so that lines of two writers never mix."""
    line = json.dumps({"at": round(at, 6), "event": event, **what}, separators=(",", ":")) + "\n"
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(handle).st_size
        cut_off = size and os.pread(handle, 1, size - 1) != b"\n"
        os.write(handle, (b"\n" if cut_off else b"") + line.encode())
    finally:
        os.close(handle)


def read(path: Path) -> Iterator[Entry]:
    """All entries; a last line that a crash has cut off is passed over."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict):
            yield entry
