"""The rates of a run. Scripts report the rate of one rank; users are shown the rate of all ranks. No I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dalsegno.runs.coordinator.reports.goodput import TrainingProgress
    from dalsegno.runs.status import RunStatus

MOST = 1e15  # larger numbers are treated as invalid
SAMPLES_RATE, TOKENS_RATE = "samples_per_s", "tokens_per_s"
RATES = {SAMPLES_RATE: "samples/s", TOKENS_RATE: "tokens/s"}  # name of the figure -> unit shown to users


def rate_of_ranks(name: str, status: RunStatus, progress: TrainingProgress | None) -> float | None:
    """Return the rate of all ranks: the rate reported by rank 0, times the number of ranks; None if unknown."""
    found = believable(progress.figures.get(name) if progress else None)
    ranks = believable(status.world_size)
    return found * ranks if found is not None and ranks else None


def believable(value: float | None) -> float | None:
    """Return the number if it is finite and plausible, otherwise None."""
    return float(value) if value is not None and -MOST < value < MOST else None
