"""A drill as it happens: a line that stays below on a terminal, else one now and then."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import click

from dalsegno.cli import out
from dalsegno.launch.status import RUNNING, Status

if TYPE_CHECKING:
    from dalsegno.cli.drill_stage import Training
    from dalsegno.drill.story import Blow, Mark, Step

DRAW_EVERY_S = 0.2


class View:
    """`every_s`: how often training is told of where no line can be drawn anew."""

    def __init__(self, every_s: float) -> None:
        self._live, self._every_s = sys.stderr.isatty(), every_s
        self._began, self._said, self._drawn = time.monotonic(), 0.0, False
        self._told = ""

    def __enter__(self) -> View:
        return self

    def __exit__(self, *error: object) -> None:
        self.clear()

    def say(self, blow: Blow | str) -> None:
        self.clear()
        text = blow if isinstance(blow, str) else f"{blow.fault} on {blow.node}"
        if isinstance(blow, str):
            out.step(text)
        else:
            out.step(f"{self._clock()}  >>> {text}", bold=True)

    def tell(self, training: Training, marks: list[Mark]) -> None:
        for mark in marks:
            self.clear()
            out.step(f"{self._clock()}  {mark.node or 'the run'}: {mark.text}")
        pause_s = DRAW_EVERY_S if self._live else self._every_s
        if training.over() or time.monotonic() - self._said < pause_s:
            return
        self._said = time.monotonic()
        text = now(training.newest(), training.status())
        if self._live:
            out.replace_line(f"  {self._clock()}  {text}")
            self._drawn = True
        elif text != self._told:
            out.step(f"{self._clock()}  {text}")
            self._told = text

    def clear(self) -> None:
        if self._drawn:
            click.echo(out.ERASE, nl=False, err=True)
            self._drawn = False

    def _clock(self) -> str:
        return f"{time.monotonic() - self._began:5.1f} s"


def now(step: Step | None, status: Status) -> str:
    """Where training is. The last step may be of a generation that is over, and the next has none yet."""
    if step is None:
        return f"the run is {status.phase}"
    if status.phase != RUNNING:
        return f"step {step.step} was the last so far; the run is {status.phase}"
    nodes = ", ".join(node.name for node in status.nodes if node.state == "member")
    if step.generation < status.generation:
        on = f" on {nodes}" if nodes else ""
        return f"step {step.step} was the last so far; generation {status.generation} begins{on}"
    on = f"; trains on {nodes}" if nodes else ""  # at the end they leave one by one
    return f"step {step.step}, loss {step.loss:.2f}, generation {step.generation}{on}"
