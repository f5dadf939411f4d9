"""`dalsegno drill`: a game day. A small training, faults by lot, and a report of what each cost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from dalsegno.cli import out
from dalsegno.cli.options import cluster_option, json_option

if TYPE_CHECKING:
    from dalsegno.cli.drill_stage import Training
    from dalsegno.drill.story import Blow, Drill, Mark


@click.command()
@click.option("--faults", type=click.IntRange(1, 1000), default=5, show_default=True, help="How many.")
@click.option("--seed", type=int, help="Draws the same faults again. Default: another each time.")
@click.option("--nodes", "-N", type=click.IntRange(1, 512), default=4, show_default=True, help="How many train.")
@click.option("--spares", type=click.IntRange(0, 64), default=1, show_default=True, help="How many more stand by.")
@click.option("--report", type=click.Path(dir_okay=False), help="Where the page goes. Default: drill-SEED.html here.")
@click.option("--only", multiple=True, metavar="FAULT", help="Only this kind of fault; may be given again.")
@click.option("--no-compare", is_flag=True, help="Leave out the undisturbed run, and with it the look at the weights.")
@cluster_option
@json_option
def command(
    faults: int,
    seed: int | None,
    nodes: int,
    spares: int,
    report: str | None,
    only: tuple[str, ...],
    no_compare: bool,
    name: str | None,
    json_: bool,
) -> None:
    """Train a small model on the cluster, break things, and report what each fault cost.

    Exit code 0: the run survived, nothing is left behind, and its weights are those of an undisturbed run, bit for bit.

    \b
    dalsegno drill --faults 10 --seed 7
    dalsegno drill --only power-off --only xid
    """
    import random

    from dalsegno.cli.drill_stage import Theatre
    from dalsegno.drill.lots import chosen, draw
    from dalsegno.drill.page import render_page
    from dalsegno.drill.words import as_json

    seed = random.SystemRandom().randrange(1_000_000) if seed is None else seed
    path = Path(report or f"drill-{seed}.html").absolute()
    kinds = chosen(only)
    theatre = Theatre.open(name, nodes, spares)
    found = theatre.perform(draw(faults, seed, kinds), seed, compare=not no_compare, say=_tell, tell=_tell_marks)
    write_page(path, render_page(found, f"Drill on {theatre.place.name}"))
    if json_:
        out.as_json({**as_json(found), "report": str(path)})
    else:
        _show(found)
    out.talk(f"the report: {path}")
    raise SystemExit(0 if found.survived else 1)


def write_page(path: Path, text: str) -> None:
    """What is no plain file, such as /dev/null or a pipe, is written to; a file is replaced as a whole."""
    from dalsegno.system.files import explain, write_atomic

    if not path.exists() or path.is_file():
        write_atomic(path, text, mode=0o644)
        return
    try:
        path.write_text(text)
    except OSError as error:
        raise explain(error, path) from error


def _tell(blow: Blow | str) -> None:
    out.step(blow if isinstance(blow, str) else f"{blow.number}: {blow.fault} on {blow.node}")


def _tell_marks(training: Training, marks: list[Mark]) -> None:
    for mark in marks:
        out.step(f"   {mark.node or 'the run'}: {mark.text}")


def _show(drill: Drill) -> None:
    from dalsegno.drill.words import COLUMNS, rows, sentences

    out.data("")
    out.table(COLUMNS, rows(drill))
    out.data("")
    for line in sentences(drill):
        out.data(line)
