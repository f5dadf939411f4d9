"""What a benchmark of the ladder is asked to do."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from dalsegno.errors import UsageError


@dataclass(frozen=True)
class LadderAsk:
    """A model of so many MiB in so many layers, trained for so many steps by every rung."""

    model_mb: float = 16.0
    layers: int = 8
    steps: int = 20
    batch: int = 64  # of each rank
    device: str = "auto"  # auto, cpu or cuda
    bucket_caps_mb: tuple[float, ...] = (1.0, 5.0, 25.0)

    def progress(self, number: int) -> str:
        """What to say before a step; empty where it is too soon to say something again."""
        return "" if number % max(1, self.steps // 4) else f"step {number + 1} of {self.steps}, all rungs in turn"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> LadderAsk:
        found = json.loads(text)
        return cls(**{**found, "bucket_caps_mb": tuple(found["bucket_caps_mb"])})


def parse_caps(text: str) -> tuple[float, ...]:
    """`1,5,25` → 1.0, 5.0, 25.0, each once."""
    try:
        caps = tuple(dict.fromkeys(float(word) for word in text.split(",")))
    except ValueError:
        caps = ()
    if not caps or not all(0 < cap < float("inf") for cap in caps):
        raise UsageError(f"`{text}` is no list of sizes", where="--bucket-cap-mb", hint="MiB with commas: 1,5,25")
    return caps
