"""What a worker asks its saver for: one line of JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Terms:
    """What is the same for all saves of one rank in one generation."""

    folder: str
    run: str
    generation: int
    rank: int
    world: int
    keep: int
    keep_every: int | None = None
    sweep: bool = False  # nobody else removes the run's files in memory when the worker is gone


@dataclass(frozen=True)
class Request:
    """Write a rank's share of a snapshot; the first rank makes a checkpoint of all shares."""

    terms: Terms
    step: int
    slot: str  # the file that holds the snapshot


def render(request: Request) -> bytes:
    return json.dumps(asdict(request)).encode() + b"\n"


def parse(line: bytes) -> Request:
    told = json.loads(line)
    return Request(Terms(**told["terms"]), int(told["step"]), str(told["slot"]))
