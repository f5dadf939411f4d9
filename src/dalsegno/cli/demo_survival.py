"""The scene of a training that survives: a host loses its power, a GPU falls off the bus, the cluster mends itself."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dalsegno.cli import out
from dalsegno.errors import NotThere

if TYPE_CHECKING:
    from dalsegno.cli.drill_stage import Training
    from dalsegno.cluster import Place
    from dalsegno.drill.story import Blow, Drill, Mark

NODES, SPARES = 4, 1
PAGE = "dalsegno-demo.html"
SAY_EVERY_S = 2.0


def check_python() -> None:
    """Before anything is made."""
    from dalsegno.jobs import find_python

    if not find_python(os.environ, "torch"):
        raise NotThere(
            "there is no PyTorch for the training of the demo",
            hint="`./dalsegno setup --torch` installs it; `dalsegno demo --scene researchers` does without",
        )


def play(place: Place, report: str | None) -> None:
    from dalsegno.cli.drill import write_page
    from dalsegno.cli.drill_stage import Theatre
    from dalsegno.demo.survival import LOTS, SEED
    from dalsegno.drill.page import render_page

    out.heading("A small GPT trains on four nodes; a fifth stands by")
    view = View()
    theatre = Theatre.open(place.name, NODES, SPARES)
    drill = theatre.perform(LOTS, SEED, compare=True, say=view.say, tell=view.tell)
    view.clear()
    path = Path(report or PAGE).absolute()
    write_page(path, render_page(drill, "Dal Segno: the demo"))
    _show(drill)
    out.data(f"\nall of it as a page, with a picture: {path}")
    if not drill.survived:
        raise SystemExit(1)


class View:
    """What happens, as it happens: a line that stays below on a terminal, else one now and then."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._began, self._said, self._drawn = time.monotonic(), 0.0, False

    def say(self, blow: Blow | str) -> None:
        self.clear()
        text = blow if isinstance(blow, str) else f"{blow.fault} on {blow.node}"
        out.step(text if isinstance(blow, str) else click.style(f"{self._clock()}  >>> {text}", bold=True))

    def tell(self, training: Training, marks: list[Mark]) -> None:
        for mark in marks:
            self.clear()
            out.step(f"{self._clock()}  {mark.node or 'the run'}: {mark.text}")
        step = training.newest()
        pause_s = 0.2 if self._live else SAY_EVERY_S
        if step is None or training.over() or time.monotonic() - self._said < pause_s:
            return
        self._said = time.monotonic()
        nodes = ", ".join(training.members()) or "none at the moment"
        line = (
            f"{self._clock()}  step {step.step}, loss {step.loss:.2f}, generation {step.generation}; trains on {nodes}"
        )
        if self._live:
            click.echo(f"{out.ERASE}  {line}", nl=False, err=True)
            self._drawn = True
        else:
            out.step(line)

    def clear(self) -> None:
        if self._drawn:
            click.echo(out.ERASE, nl=False, err=True)
            self._drawn = False

    def _clock(self) -> str:
        return f"{time.monotonic() - self._began:5.1f} s"


def _show(drill: Drill) -> None:
    from dalsegno.demo.survival import NOTES, beside
    from dalsegno.drill.words import COLUMNS, rows, sentences

    out.heading("What it cost")
    out.table(COLUMNS, rows(drill))
    out.data("")
    for line in sentences(drill):
        out.data(line)
    out.heading("Beside it")
    out.table(["A NODE LOSES ITS POWER", "TRAINING GOES ON AFTER"], beside(drill))
    for note in NOTES:
        out.data(note)
