"""Times as people write them."""

from __future__ import annotations

import re

from dalsegno.errors import UsageError

UNITS_S = {"": 1.0, "s": 1.0, "ms": 0.001, "m": 60.0, "h": 3600.0}


def parse_time(text: str) -> float:
    """Seconds: `5`, `5s`, `0.3s`, `300ms`, `2m`."""
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)(ms|s|m|h|)", text.strip())
    seconds = float(found[1]) * UNITS_S[found[2]] if found else 0.0
    if seconds <= 0:
        raise UsageError(f"`{text}` is no time", hint="such as `5s`, `300ms` or `2m`")
    return seconds
