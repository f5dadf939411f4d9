"""The one printer. Standard output is data, standard error is talk; both can be read without colour."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import click

from dalsegno.errors import Problem
from dalsegno.targets.base import Say

ERASE = "\r\x1b[2K"  # to the start of the line, and clear it


def talk(text: str) -> None:
    click.echo(text, err=True)


def data(text: str) -> None:
    click.echo(text)


def heading(text: str) -> None:
    talk(click.style(f"\n{text}", bold=True))


def step(text: str) -> None:
    """A line of a story that is being told."""
    talk(f"  {text}")


def as_json(value: object) -> None:
    click.echo(json.dumps(value, indent=2))


def error(what: str, where: str = "", hint: str = "") -> None:
    """`error: what (where)` and, below it, `hint: …`."""
    first, newline, rest = what.partition("\n")
    talk(click.style("error: ", fg="red", bold=True) + first + (f" ({where})" if where else "") + newline + rest)
    if hint:
        talk(click.style("hint: ", fg="cyan") + hint)


def warn(text: str) -> None:
    talk(click.style("warning: ", fg="yellow") + text)


def problems(found: Sequence[Problem]) -> None:
    for problem in found:
        error(problem.what, problem.where, problem.hint or "`dalsegno schema` tells what can stand there")
    talk(f"{len(found)} {'fault' if len(found) == 1 else 'faults'} found")


@contextmanager
def progress() -> Iterator[Say]:
    """A `say` for the steps of something that takes a while: in a terminal one line that changes, else plain lines."""
    started = time.monotonic()
    live = sys.stderr.isatty()

    def say(text: str) -> None:
        line = f"{click.style(f'{time.monotonic() - started:5.1f} s', dim=True)}  {text}"
        click.echo(f"{ERASE}{line}" if live else line, nl=not live, err=True)

    try:
        yield say
    finally:
        if live:
            click.echo(ERASE, nl=False, err=True)


def replace_line(text: str) -> None:
    """Write over the line that a terminal shows."""
    click.echo(f"{ERASE}{text}", nl=False, err=True)


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as they need to be, as sinfo and squeue print them."""
    widths = [max(len(row[column]) for row in [headers, *rows]) for column in range(len(headers))]
    for row in [headers, *rows]:
        data("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
