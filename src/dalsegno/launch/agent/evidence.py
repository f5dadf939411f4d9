"""What a dead worker left to tell why it died: torch's error file, the traceback in its log, the kernel's OOM count."""

from __future__ import annotations

import contextlib
import json
import os
import re
from typing import Any

_TAIL_BYTES = 65536
# A script that does not parse has no traceback: it is not in any frame yet.
_NOT_PARSED = re.compile(r'^  File ".+", line \d+\n(?:    .*\n)*(?:Syntax|Indentation|Tab)Error: .*$', re.MULTILINE)
_COMPLAINT = re.compile(r"error|exception|fatal|cannot|can't|not found|no such|denied|invalid|usage:", re.IGNORECASE)
_START = "Traceback (most recent call last):"
MAX_CHARS = 8000
_LINE_CHARS = 300


def gather(log: str, error_file: str, since: int = 0) -> dict[str, Any]:
    """`traceback` and, where torch's `record` wrote one, the `time` of the error. Empty if there is nothing to tell."""
    told = _read_error_file(error_file)
    tail = "" if told.get("traceback") else _tail(log, since)
    traceback = told.get("traceback") or last_traceback(tail) or _not_parsed(tail)
    found = {"traceback": traceback[-MAX_CHARS:]} if traceback else {}
    return dict(found, at=told["at"]) if "at" in told else found


def last_words(log: str, since: int = 0) -> dict[str, Any]:
    """Of one that gave up without a traceback: the last line of its log, if that is a complaint."""
    line = next((line.strip() for line in reversed(_tail(log, since).splitlines()) if line.strip()), "")
    return {"traceback": line[:_LINE_CHARS]} if _COMPLAINT.search(line) else {}


def _not_parsed(text: str) -> str:
    found = _NOT_PARSED.findall(text)
    return found[-1] if found else ""


def last_traceback(text: str) -> str:
    """The last traceback in a log, from its first line to the line of the exception; "" if there is none.

    Chained exceptions are one traceback: the first of the chain is where it began.
    """
    lines = text.splitlines()
    starts = [number for number, line in enumerate(lines) if _bare(line).startswith(_START)]
    if not starts:
        return ""
    first = starts[-1]
    for earlier in reversed(starts[:-1]):
        between = " ".join(lines[earlier:first])
        if "During handling of the above exception" not in between and "was the direct cause" not in between:
            break
        first = earlier
    return "\n".join(lines[first : _end(lines, starts[-1])])


def _bare(line: str) -> str:
    """Without a prefix such as torch's `[rank2]: `."""
    return line.partition("]: ")[2] if line.startswith("[rank") else line


def _end(lines: list[str], start: int) -> int:
    """One past the first line that is neither indented nor empty: `ValueError: …`."""
    for number in range(start + 1, len(lines)):
        line = _bare(lines[number])
        if line and not line[0].isspace():
            return number + 1
    return len(lines)


def _tail(path: str, since: int) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(since, file.tell() - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _read_error_file(path: str) -> dict[str, Any]:
    """What `torch.distributed.elastic.multiprocessing.errors.record` writes; "" and nothing where it did not."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError), open(path) as file:
        message = json.load(file)["message"]
        if isinstance(message, str):
            return {"traceback": message}
        extra = message.get("extraInfo") or {}
        return {"traceback": extra.get("py_callstack") or message["message"], "at": float(extra.get("timestamp") or 0)}
    return {}


def oom_kills() -> int:
    """How often the kernel has killed a process for memory since it booted."""
    with contextlib.suppress(OSError, ValueError), open("/proc/vmstat") as file:
        for line in file:
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
