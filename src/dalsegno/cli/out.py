"""The one printer. Standard output is data, standard error is talk; both can be read without colour."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import click

from dalsegno.errors import Problem
from dalsegno.targets.base import Say

ERASE = "\r\x1b[2K"  # to the start of the line, and clear it
USUAL_COLUMNS = 80


def style(text: str, *, env: Mapping[str, str] = os.environ, **how: Any) -> str:
    """Coloured, bold or dim, unless NO_COLOR says that nothing is to be (https://no-color.org)."""
    return text if env.get("NO_COLOR") else click.style(text, **how)


def fitted(text: str, columns: int) -> str:
    """What of a line fits into a terminal: one that wraps could not be written over."""
    return text[: columns - 1]


def columns() -> int:
    """How wide the terminal is that our talk goes to."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or USUAL_COLUMNS
    except (OSError, ValueError):
        return USUAL_COLUMNS


def talk(text: str) -> None:
    click.echo(text, err=True)


def data(text: str) -> None:
    click.echo(text)


def heading(text: str) -> None:
    talk(style(f"\n{text}", bold=True))


def step(text: str) -> None:
    """A line of a story that is being told."""
    talk(f"  {text}")


def as_json(value: object) -> None:
    click.echo(json.dumps(value, indent=2))


def error(what: str, where: str = "", hint: str = "") -> None:
    """`error: what (where)` and, below it, `hint: …`."""
    first, newline, rest = what.partition("\n")
    talk(style("error: ", fg="red", bold=True) + first + (f" ({where})" if where else "") + newline + rest)
    if hint:
        advise(hint)


def advise(hint: str) -> None:
    talk(style("hint: ", fg="cyan") + hint)


def warn(text: str) -> None:
    talk(style("warning: ", fg="yellow") + text)


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
        clock = f"{time.monotonic() - started:5.1f} s"
        room = columns() - len(clock) - 2 if live else len(text) + 1
        line = f"{style(clock, dim=True)}  {fitted(text, room)}"
        click.echo(f"{ERASE}{line}" if live else line, nl=not live, err=True)

    try:
        yield say
    finally:
        if live:
            click.echo(ERASE, nl=False, err=True)


def replace_line(text: str) -> None:
    """Write over the line that a terminal shows."""
    click.echo(f"{ERASE}{fitted(text, columns())}", nl=False, err=True)


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as they need to be, as sinfo and squeue print them."""
    widths = [max(len(row[column]) for row in [headers, *rows]) for column in range(len(headers))]
    for row in [headers, *rows]:
        data("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
