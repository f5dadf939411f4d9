"""A drill as it happens: a line that stays below on a terminal, else one now and then."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import click

from dalsegno.cli import out

if TYPE_CHECKING:
    from dalsegno.cli.drill_stage import Training
    from dalsegno.drill.story import Blow, Mark

DRAW_EVERY_S = 0.2


class View:
    """`every_s`: how often training is told of where no line can be drawn anew."""

    def __init__(self, every_s: float) -> None:
        self._live, self._every_s = sys.stderr.isatty(), every_s
        self._began, self._said, self._drawn = time.monotonic(), 0.0, False

    def __enter__(self) -> View:
        return self

    def __exit__(self, *error: object) -> None:
        self.clear()

    def say(self, blow: Blow | str) -> None:
        self.clear()
        text = blow if isinstance(blow, str) else f"{blow.fault} on {blow.node}"
        out.step(text if isinstance(blow, str) else click.style(f"{self._clock()}  >>> {text}", bold=True))

    def tell(self, training: Training, marks: list[Mark]) -> None:
        for mark in marks:
            self.clear()
            out.step(f"{self._clock()}  {mark.node or 'the run'}: {mark.text}")
        pause_s = DRAW_EVERY_S if self._live else self._every_s
        if training.over() or time.monotonic() - self._said < pause_s:
            return
        self._said = time.monotonic()
        line = f"{self._clock()}  {_now(training)}"
        if self._live:
            out.replace_line(f"  {line}")
            self._drawn = True
        else:
            out.step(line)

    def clear(self) -> None:
        if self._drawn:
            click.echo(out.ERASE, nl=False, err=True)
            self._drawn = False

    def _clock(self) -> str:
        return f"{time.monotonic() - self._began:5.1f} s"


def _now(training: Training) -> str:
    step = training.newest()
    if step is None:
        return f"the run is {training.status().phase}"
    nodes = ", ".join(training.members()) or "none at the moment"
    return f"step {step.step}, loss {step.loss:.2f}, generation {step.generation}; trains on {nodes}"
