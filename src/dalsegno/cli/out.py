"""The one module that prints. Standard output is data, standard error is messages; both can be read without colour.

Everything that is printed here is made safe for terminals first: another user may have written names, reasons and
messages. Only the output of a run's own program is printed unchanged (`follow.Screen.lines`).
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dalsegno.errors import Problem, UsageError
from dalsegno.printable import lines, one_line

if TYPE_CHECKING:
    from dalsegno.targets.base import Say

ERASE = "\r\x1b[2K"  # move to the start of the line and clear it
USUAL_COLUMNS = 80


def style(text: str, *, env: Mapping[str, str] = os.environ, **how: Any) -> str:
    """Return the text coloured, bold or dim, unless NO_COLOR is set (https://no-color.org)."""
    return text if env.get("NO_COLOR") else click.style(text, **how)


def fitted(text: str, columns: int) -> str:
    """Return the part of a line that fits into a terminal: a wrapped line cannot be overwritten."""
    return one_line(text)[: columns - 1]


def columns() -> int:
    """Return the width of the terminal on stderr; 80 if stderr is not a terminal."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or USUAL_COLUMNS
    except (OSError, ValueError):
        return USUAL_COLUMNS


def message(text: str, *, nl: bool = True) -> None:
    """Print to standard error. If nothing reads it any more, discard this and all later messages.

    In `dalsegno up 2>&1 | head -1`, the change of the cluster must not stop halfway because `head` has ended.
    """
    try:
        click.echo(text, nl=nl, err=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def talk(text: str) -> None:
    message(lines(text))


def data(text: str) -> None:
    click.echo(lines(text))


def heading(text: str) -> None:
    message(style(f"\n{lines(text)}", bold=True))


def step(text: str, *, bold: bool = False) -> None:
    """Print one step of a longer operation, indented."""
    message("  " + (style(lines(text), bold=True) if bold else lines(text)))


def as_json(value: object) -> None:
    click.echo(json.dumps(value, indent=2))


def error(what: str, where: str = "", hint: str = "") -> None:
    """Print `error: what (where)` and, below it, `hint: …`."""
    first, newline, rest = what.partition("\n")
    said = first + (f" ({where})" if where else "") + newline + rest
    message(style("error: ", fg="red", bold=True) + lines(said))
    if hint:
        advise(hint)


def advise(hint: str) -> None:
    message(style("hint: ", fg="cyan") + lines(hint))


def warn(text: str) -> None:
    message(style("warning: ", fg="yellow") + lines(text))


def problems(found: Sequence[Problem]) -> None:
    for problem in found:
        error(problem.what, problem.where, problem.hint or "`dalsegno schema` shows what is allowed there")
    talk(f"{len(found)} {'error' if len(found) == 1 else 'errors'} found")


@contextmanager
def progress() -> Iterator[Say]:
    """Yield a function that shows each step of a long operation.

    In a terminal, it rewrites one line; elsewhere, it prints one line per step.
    """
    started = time.monotonic()
    live = sys.stderr.isatty()

    def say(text: str) -> None:
        clock = f"{time.monotonic() - started:5.1f} s"
        shown = fitted(text, columns() - len(clock) - 2) if live else lines(text)
        line = f"{style(clock, dim=True)}  {shown}"
        message(f"{ERASE}{line}" if live else line, nl=not live)

    try:
        yield say
    finally:
        if live:
            message(ERASE, nl=False)


def replace_line(text: str) -> None:
    """Replace the current line of the terminal."""
    message(f"{ERASE}{fitted(text, columns())}", nl=False)


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print columns as wide as their longest cell, as sinfo and squeue do. A line break in a cell does not start a new
    row."""
    shown = [headers, *([one_line(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in shown) for column in range(len(headers))]
    for row in shown:
        data("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


# Sizes as text


def size(count: float) -> str:
    """Return a number of bytes as text, such as 512 B or 3.2 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


# Times as text


UNITS_S = {"": 1.0, "s": 1.0, "ms": 0.001, "m": 60.0, "h": 3600.0}


def parse_time(text: str) -> float:
    """Return a time such as `5`, `5s`, `0.3s`, `300ms` or `2m` in seconds."""
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)(ms|s|m|h|)", text.strip())
    seconds = float(found[1]) * UNITS_S[found[2]] if found else 0.0
    if seconds <= 0:
        raise UsageError(f"invalid time `{text}`", hint="such as `5s`, `300ms` or `2m`")
    return seconds


# Options that several commands share


file_argument = click.argument("file", type=click.Path(), default="cluster.yaml", metavar="[FILE]")
cluster_option = click.option(
    "--cluster", "-M", "name", metavar="NAME", help="Cluster to use. Default: $DALSEGNO_CLUSTER, or the only one."
)
json_option = click.option("--json", "json_", is_flag=True, help="Print JSON.")


def finite(_: click.Context, option: click.Parameter, value: float | None) -> float | None:
    """Return the value of an option; raise an error for `nan`, which click accepts in every range."""
    if value is not None and not isfinite(value):
        raise click.BadParameter("must be a number", param=option)
    return value


def check_writable(option: str, file: str | None) -> None:
    """Raise an error if the file that an option names cannot be written. Commands call this before the work, so that no
    result is lost."""
    if file is None:
        return
    path = Path(file)
    if path.is_dir():
        raise UsageError(f"`{file}` is a folder", where=option, hint="name a file in it")
    if not path.parent.is_dir():
        raise UsageError(f"`{file}` cannot be written", where=option, hint=f"create the folder `{path.parent}` first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"`{file}` cannot be written", where=option, hint="name a file that you may write")
