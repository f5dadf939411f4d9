"""Parse the output of salloc. Pure functions."""

from __future__ import annotations

import re
from dataclasses import dataclass

_GRANTED = re.compile(r"(Granted|Pending) job allocation (\d+)")
_OWN_NAME = re.compile(r"salloc: (?:error: )?")


@dataclass(frozen=True)
class SallocAnswer:
    """The job that salloc waits for or was granted, and its last message."""

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
    """Return salloc's last message, without its `salloc:` prefix."""
    lines = [_OWN_NAME.sub("", line).strip() for line in text.splitlines() if line.startswith("salloc:")]
    return next((line for line in reversed(lines) if line and "Relinquishing" not in line), "")
