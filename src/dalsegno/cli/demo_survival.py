"""`dalsegno demo --scene survival`: a host loses power, a GPU falls off the bus, and training continues."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from dalsegno.cli import out
from dalsegno.cli.interrupts import Interrupted
from dalsegno.errors import NotThere

if TYPE_CHECKING:
    from dalsegno.cluster import ClusterPlace
    from dalsegno.drill.impacts import Drill
    from dalsegno.runs.folder import RunFolder

NODES, SPARES = 4, 1
PAGE = "dalsegno-demo.html"
SAY_EVERY_S = 2.0


def check(report: str | None) -> None:
    """Check what the scene needs before anything is made."""
    from dalsegno.cli.drill import check_page
    from dalsegno.runs.submit.program import find_python

    check_page(_page(report))

    if not find_python(os.environ, "torch"):
        raise NotThere(
            "the demo needs PyTorch for its training",
            hint="install it with `./dalsegno setup --torch`, or run `dalsegno demo --scene researchers` without it",
        )


def _page(report: str | None) -> Path:
    return Path(report or PAGE).absolute()


def play(place: ClusterPlace, report: str | None, runs: list[RunFolder], keep: bool) -> None:
    """Play the scene; runs that can be removed with the cluster are added to `runs`."""
    from dalsegno.cli.drill import DrillView, write_page
    from dalsegno.cli.drill_stage import DrillCluster
    from dalsegno.demo.survival import LOTS, SEED, compare, remove_paths
    from dalsegno.drill.report import render_page

    out.heading("A small GPT trains on four nodes; a fifth stands by")
    theatre = DrillCluster.open(place.name, NODES, SPARES)
    try:
        with DrillView(SAY_EVERY_S) as view:
            drill = theatre.perform(LOTS, SEED, compare=True, say=view.say, tell=view.tell)
    except Interrupted:
        runs += theatre.traces.runs
        raise
    _show(drill)
    shown = drill if keep else remove_paths(drill, str(place.folder))
    write_page(_page(report), render_page(shown, "Dal Segno: the demo", compare(drill)))
    out.data(f"\nall of it as a page, with a picture: {_page(report)}")
    if not drill.survived:
        raise SystemExit(1)
    runs += theatre.traces.runs


def _show(drill: Drill) -> None:
    from dalsegno.demo.survival import compare
    from dalsegno.drill.report import COLUMNS, rows, sentences

    out.heading("What it cost")
    out.table(COLUMNS, rows(drill))
    out.data("")
    for line in sentences(drill):
        out.data(line)
    out.heading("Beside it")
    compared = compare(drill)
    out.table(compared.head, compared.lines)
    for note in compared.notes:
        out.data(note)
