"""`scontrol ping`: which controllers answer."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dalsegno.slurm.parse.text import malformed

PING_ARGV = ("scontrol", "ping")

_CONTROLLER = re.compile(r"^Slurmctld\((\w+)\) at (.+?) (?:is|are) (\w+)", re.MULTILINE)


@dataclass(frozen=True)
class ControllerPing:
    role: str  # primary, backup, backup2 ...
    host: str
    up: bool


def parse_ping(text: str) -> list[ControllerPing]:
    """The answer to PING_ARGV, which exits 1 when the primary is down and answers all the same."""
    found = [ControllerPing(role, host, state == "UP") for role, host, state in _CONTROLLER.findall(text)]
    if not found:
        raise malformed("scontrol ping", text)
    return found
