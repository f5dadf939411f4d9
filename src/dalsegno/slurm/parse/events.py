"""`sacctmgr show event`: when a node was out of service, and why. Slurm itself forgets it when the node is back."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dalsegno.slurm.parse.text import epoch, known

# What a reason says may hold anything, the sign between fields too: it comes last.
_FIELDS = ("NodeName", "TimeStart", "State", "User", "Reason")
EVENTS_ARGV = ("sacctmgr", "--noheader", "--parsable2", "show", "event", f"format={','.join(_FIELDS)}")


@dataclass(frozen=True)
class NodeEvent:
    """A node left service. `at`: seconds since 1970."""

    node: str
    at: int
    state: str  # DRAIN, DOWN
    user: str
    reason: str


def parse_events(text: str) -> list[NodeEvent]:
    """The answer to EVENTS_ARGV; what is told of the cluster as a whole is left out."""
    rows = [line.split("|", len(_FIELDS) - 1) for line in text.splitlines()]
    return [_event(*row, at=at) for row in rows if len(row) == len(_FIELDS) and row[0] and (at := epoch(row[1]))]


def _event(node: str, _: str, state: str, user: str, reason: str, *, at: int) -> NodeEvent:
    return NodeEvent(node, at, state, known(re.sub(r"\(\d+\)$", "", user)), reason)
