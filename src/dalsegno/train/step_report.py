"""The function `report`, which sends the progress of any script, with or without torch.

`dalsegno runs`, charts, metrics and hang detection use this progress.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from dalsegno.train import contract
from dalsegno.train.agent import AgentLink, find_agent
from dalsegno.train.progress import ProgressReporter, SaveCounts
from dalsegno.train.schedule import StepClock

# Variables with the rank of this process, set by Slurm and by the launchers of several frameworks
RANK_VARIABLES = ("RANK", "JAX_PROCESS_ID", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")


class StepReporter:
    """Reports the steps of one process. Without an agent, it does nothing."""

    def __init__(self, agent: AgentLink | None, generation: int, rank: int, now: float) -> None:
        self._reporter = ProgressReporter(agent, generation, rank)
        self._clock = StepClock(now)
        self._begun = False

    def report(self, step: int, loss: Any, figures: dict[str, Any], last: bool, now: float) -> None:
        if self._begun:
            self._clock.step(now)
        else:  # the start of the first step is unknown, so it gives no duration
            self._begun = True
            self._clock.begin(now)
        self._reporter.report(step, self._clock, loss, figures, SaveCounts())
        if last:
            self._reporter.report_end(step)


_own: dict[int, StepReporter] = {}  # by PID, because a forked process must not use its parent's connection


def report(
    step: int, *, loss: Any = None, samples: float = 0, tokens: float = 0, last: bool = False, **figures: Any
) -> None:
    """Report that this process has completed a step.

    Call it after every step. It sends at most two messages a second, and none without Dal Segno's launcher. A loss on a
    GPU is read only when it is sent. `samples` and `tokens` are those of this step on this rank, and appear as rates.
    Set `last` at the last step, so that a long evaluation is not taken for a hang. A script with a `Checkpointer` need
    not call it, because `done` reports the steps.
    """
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise ValueError(f"a step is a number from 0, not {step!r}")
    now = time.monotonic()
    reporter = _own.get(os.getpid())
    if reporter is None:
        _own.clear()
        reporter = _own[os.getpid()] = StepReporter(find_agent(), _generation(os.environ), find_rank(os.environ), now)
    reporter.report(step, loss, {**figures, "samples": samples, "tokens": tokens}, last, now)


def find_rank(environ: Mapping[str, str]) -> int:
    """Return the rank of this process; 0 if no variable names it."""
    return next((int(environ[name]) for name in RANK_VARIABLES if environ.get(name, "").isdigit()), 0)


def _generation(environ: Mapping[str, str]) -> int:
    value = environ.get(contract.GENERATION, "")
    return int(value) if value.isdigit() else 0
