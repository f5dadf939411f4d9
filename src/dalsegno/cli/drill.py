"""`dalsegno drill`: a game day. A small training, faults by lot, and a report of what each cost."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dalsegno.cli import out
from dalsegno.cli.interrupts import stoppable
from dalsegno.cli.options import cluster_option, json_option
from dalsegno.errors import DalsegnoError, UsageError

if TYPE_CHECKING:
    from dalsegno.cli.drill_traces import Traces
    from dalsegno.drill.story import Drill

SAY_EVERY_S = 10.0
ELSEWHERE = "`--report FILE` names another place"


@click.command()
@click.option("--faults", type=click.IntRange(1, 1000), default=5, show_default=True, help="How many.")
@click.option("--seed", type=int, help="Draws the same faults again. Default: another each time.")
@click.option("--nodes", "-N", type=click.IntRange(1, 512), help="How many train. Default: 4, if there are so many.")
@click.option("--spares", type=click.IntRange(0, 64), help="How many more stand by. Default: 1, if there is one more.")
@click.option("--report", type=click.Path(dir_okay=False), help="Where the page goes. Default: drill-SEED.html here.")
@click.option("--only", multiple=True, metavar="FAULT", help="Only this kind of fault; may be given again.")
@click.option("--with-spares", is_flag=True, help="Strike only while the spares stand by: each fault by itself.")
@click.option("--no-compare", is_flag=True, help="Leave out the undisturbed run, and with it the look at the weights.")
@cluster_option
@json_option
def command(
    faults: int,
    seed: int | None,
    nodes: int | None,
    spares: int | None,
    report: str | None,
    only: tuple[str, ...],
    with_spares: bool,
    no_compare: bool,
    name: str | None,
    json_: bool,
) -> None:
    """Train a small model on the cluster, break things, and report what each fault cost.

    Exit code 0: the run survived, nothing is left behind, and its weights are those of an undisturbed run, bit for bit.
    Then its runs are removed, and the report is what stays; else they are kept.

    \b
    dalsegno drill --faults 10 --seed 7
    dalsegno drill --only power-off --only xid
    """
    import random

    from dalsegno.cli.drill_stage import Theatre
    from dalsegno.cli.drill_view import View
    from dalsegno.drill.lots import chosen, draw
    from dalsegno.drill.page import render_page
    from dalsegno.drill.words import as_json

    seed = random.SystemRandom().randrange(1_000_000) if seed is None else seed
    path = Path(report or f"drill-{seed}.html").absolute()
    kinds = chosen(only)
    check_page(path)
    theatre = Theatre.open(name, nodes, spares, with_spares)
    view = View(SAY_EVERY_S)
    with stoppable(), view:
        found = theatre.perform(draw(faults, seed, kinds), seed, compare=not no_compare, say=view.say, tell=view.tell)
    if json_:
        out.as_json({**as_json(found), "report": str(path)})
    else:
        _show(found)
    write_page(path, render_page(found, f"Drill on {theatre.place.name}"))
    out.talk(f"the report: {path}")
    _part(theatre.traces, found.survived)
    raise SystemExit(0 if found.survived else 1)


def _part(traces: Traces, survived: bool) -> None:
    """Of a drill that went well the report is all; what went wrong can be looked into."""
    from dalsegno.cluster import runs_home

    if survived:
        traces.discard(runs_home())
        return
    named = " and ".join(f"`dalsegno why {run.run}`" for run in reversed(traces.runs))
    out.talk(f"its runs are kept: {named}")


def check_page(path: Path) -> None:
    """Before anything is begun: can the page be written when all is done? The caller's rights decide, not sudo's."""
    from dalsegno.system.sudo import as_caller

    as_caller(lambda: _check_page(path))


def _check_page(path: Path) -> None:
    import tempfile

    if not path.parent.is_dir():
        raise UsageError(_no_page(path, f"there is no folder {path.parent}"), hint=ELSEWHERE)
    if path.is_dir():
        raise UsageError(_no_page(path, "it is a folder"), hint=ELSEWHERE)
    if path.exists() and not path.is_file():
        if not os.access(path, os.W_OK):  # not opened: whoever reads a pipe would take that for its end
            raise UsageError(_no_page(path, "it may not be written to"), hint=ELSEWHERE)
        return
    try:
        # A file is replaced as a whole: a new one comes first.
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise UsageError(_no_page(path, error.strerror or str(error)), hint=ELSEWHERE) from error


def write_page(path: Path, text: str) -> None:
    """What is no plain file, such as /dev/null or a pipe, is written to; a file is replaced as a whole."""
    from dalsegno.system.sudo import as_caller

    as_caller(lambda: _write_page(path, text))


def _write_page(path: Path, text: str) -> None:
    from dalsegno.system.files import write_atomic

    try:
        if not path.exists() or path.is_file():
            write_atomic(path, text, mode=0o644)
        else:
            path.write_text(text)
    except OSError as error:
        raise DalsegnoError(_no_page(path, error.strerror or str(error)), hint=ELSEWHERE) from error
    except DalsegnoError as error:
        raise DalsegnoError(_no_page(path, error.what), hint=ELSEWHERE) from error


def _no_page(path: Path, why: str) -> str:
    return f"the report cannot go to {path}: {why}"


def _show(drill: Drill) -> None:
    from dalsegno.drill.words import COLUMNS, rows, sentences

    out.data("")
    out.table(COLUMNS, rows(drill))
    out.data("")
    for line in sentences(drill):
        out.data(line)
