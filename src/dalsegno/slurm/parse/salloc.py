"""What salloc says. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

_GRANTED = re.compile(r"(Granted|Pending) job allocation (\d+)")
_OWN_NAME = re.compile(r"salloc: (?:error: )?")


@dataclass(frozen=True)
class SallocAnswer:
    """Which job it waits for, or has; and the last that it said of it."""

    job: int | None = None
    granted: bool = False
    last_words: str = ""


def read_answer(text: str) -> SallocAnswer:
    found = _GRANTED.findall(text)
    if not found:
        return SallocAnswer(last_words=_last_words(text))
    word, job = found[-1]
    return SallocAnswer(int(job), word == "Granted", _last_words(text))


def _last_words(text: str) -> str:
    """Why salloc gave up, without its own name."""
    lines = [_OWN_NAME.sub("", line).strip() for line in text.splitlines() if line.startswith("salloc:")]
    return next((line for line in reversed(lines) if line and "Relinquishing" not in line), "")
