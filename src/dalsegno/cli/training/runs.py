"""`dalsegno runs`: list your runs; `runs show`: the progress of one run and how its time was spent."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import click

from dalsegno.cli import out
from dalsegno.cli.out import json_option
from dalsegno.cli.training.statusline import age, clock, elapsed_s, facts_of, live_text, members, state_of, status_of
from dalsegno.errors import NotThere
from dalsegno.printable import one_line

if TYPE_CHECKING:
    from dalsegno.runs.coordinator.reports.goodput import Goodput, TrainingProgress
    from dalsegno.runs.coordinator.reports.history import StepPoint
    from dalsegno.runs.folder import RunFolder
    from dalsegno.runs.status import RunStatus

SHOWN = 20
_HEADERS = ["RUN", "STATE", "NODES", "GEN", "RESTARTS", "AGE", "ELAPSED", "JOBIDS", "EXIT", "MESSAGE"]
_MAX_MESSAGE = 70
_OWN_FIGURES = ("step_s", "starting_s", "stepping_s", "saving_s", "stall_s", "snapshots", "skipped", "saves", "save_s")


@click.group(invoke_without_command=True)
@json_option
@click.option("--all", "-a", "everything", is_flag=True, help=f"All runs, not only the last {SHOWN}.")
@click.pass_context
def command(context: click.Context, json_: bool, everything: bool) -> None:
    """List your runs: active runs first, then the newest. `runs show RUN` shows one in detail.

    \b
    STATE  waiting, starting, running, restarting, ending; done, failed, cancelled, lost (with its cluster)
    NODES  nodes in training, of the number requested
    GEN    generation: how often the workers were started
    """
    if context.invoked_subcommand:
        return
    from dalsegno.cluster import runs_home
    from dalsegno.runs.submit.prepare import list_runs

    known = [(run, status) for run in list_runs(runs_home()) if (status := status_of(run))]
    ordered = sorted(known, key=lambda each: (each[1].over, -each[1].created))
    shown = ordered if everything else ordered[:SHOWN]
    if json_:
        out.as_json([facts_of(run, status) for run, status in shown])
        return
    if not known:
        out.talk("no runs yet; start one: `dalsegno run train.py`")
        return
    out.table(_HEADERS, [row(run, status, time.time()) for run, status in shown])
    if len(shown) < len(ordered):
        out.talk(f"{len(ordered) - len(shown)} older runs are not shown; list all: `dalsegno runs --all`")


def row(run: RunFolder, status: RunStatus, now: float) -> list[str]:
    """Return one row of the table."""
    from dalsegno.cli.training.watch import job_ids

    line = " ".join(status.message.split())
    return [
        run.run,
        state_of(status, now),
        f"{len(members(status))}/{status.wanted_nodes}" if not status.over else str(status.wanted_nodes),
        str(status.generation or "-"),
        str(status.restarts),
        age(now - status.created),
        clock(elapsed_s(status, now)) if status.started else "-",
        ",".join(map(str, job_ids(run, status))) or "-",
        "-" if status.exit_code is None else str(status.exit_code),
        line if len(line) <= _MAX_MESSAGE else f"{line[:_MAX_MESSAGE]}…",
    ]


@command.command()
@json_option
@click.option("--plot", is_flag=True, help="Plot loss and step time over the steps. `^`: a generation started there.")
@click.argument("run", required=False, default="")
def show(run: str, plot: bool, json_: bool) -> None:
    """Show the progress of RUN and how its time was spent. Default: the newest run.

    Steps are shown if the script reports them with the training library, `dalsegno.train`. With --json, --plot adds
    the points.
    """
    from dalsegno.cluster import runs_home
    from dalsegno.runs.coordinator.reports.goodput import read_progress
    from dalsegno.runs.submit.prepare import find_run
    from dalsegno.spec.facts import facts_to_json

    found = find_run(runs_home(), run)
    status, progress = status_of(found), read_progress(found.progress)
    if status is None:
        raise NotThere(f"run {found.run} has no status yet", hint="`dalsegno runs` lists the runs that have one")
    if json_:
        known = facts_of(found, status)
        points = {"history": [point._asdict() for point in _history(found)]} if plot else {}
        out.as_json({**known, "progress": facts_to_json(progress) if progress else None, **points})
        return
    now = time.time()
    out.data(f"{found.run}  {state_of(status, now)}" if status.over else live_text(status, now))
    if progress is None:
        out.talk("the script reports no steps; use `dalsegno.train.Checkpointer` to report them")
        return
    for line in lines_of(progress, status):
        out.data(line)
    if status.slow_rank and not status.over:
        out.data(f"{one_line(status.slow_rank.sentence())}; see `dalsegno why {found.run}`")
    if plot:
        _plot(found)


def _plot(run: RunFolder) -> None:
    lines = list(plot_history(_history(run)))
    for line in lines:
        out.data(line)
    if not lines:
        out.talk("there is nothing to plot yet: a plot needs two reported steps, at least a second apart")


def _history(run: RunFolder) -> tuple[StepPoint, ...]:
    from dalsegno.runs.coordinator.reports.history import parse_history
    from dalsegno.runs.files import read_value

    value = read_value(run.history)
    return parse_history(value if isinstance(value, dict) else None)


def lines_of(progress: TrainingProgress, status: RunStatus) -> Iterator[str]:
    """Yield the lines that show steps, time and snapshots. Rates are those of rank 0 times the number
    of ranks."""
    from dalsegno.runs.rates import RATES, rate_of_ranks

    figures, own = progress.figures, (*_OWN_FIGURES, *RATES)
    reported = [f"{name} {value:.4g}" for name, value in sorted(figures.items()) if name not in own]
    rates = [(label, rate_of_ranks(name, status, progress)) for name, label in RATES.items()]
    reported += [f"{rate:,.4g} {label}" for label, rate in rates if rate is not None]
    yield "  ".join([f"step {progress.step:,}", f"{figures.get('step_s', 0.0):.3g} s each", *reported])
    yield _times(progress.account)
    skipped = f", {figures['skipped']:.0f} skipped" if figures.get("skipped") else ""
    stall = f", {figures['stall_s']:.3g} s each" if figures.get("stall_s") is not None else ""
    save = f", {figures['save_s']:.3g} s each" if figures.get("save_s") else ""
    yield (
        f"snapshots  {figures.get('snapshots', 0):.0f} in memory in this generation{stall}{skipped};"
        f" {figures.get('saves', 0):.0f} saved to disk{save}"
    )
    suggestion = _suggestion(progress)
    if suggestion:
        yield suggestion


def _times(account: Goodput) -> str:
    from dalsegno.runs.coordinator.reports.goodput import TimeKind

    total = sum(account.spent.values()) or 1.0
    shares = [f"{100 * account.spent.get(kind, 0.0) / total:.1f} % {kind.value}" for kind in TimeKind]
    return f"time  {', '.join(shares)}  of {clock(total)}"


def _suggestion(progress: TrainingProgress) -> str:
    """Return a sentence with the best disk interval by Young and Daly's formula; "" if there is too little data."""
    from dalsegno.train.options import suggest_interval_s

    account, total = progress.account, sum(progress.account.spent.values())
    stall_s, save_s = (progress.figures.get(name) or 0.0 for name in ("stall_s", "save_s"))
    best_s = suggest_interval_s(stall_s, account.failures, total, save_s)
    if best_s is None:
        return ""
    times = f"{account.failures} failure{'s' if account.failures > 1 else ''} in {clock(total)}"
    return f'with {times}, disk_every="{max(1, round(best_s))}s" would lose the least time'


# Plots of loss and step time as text for a terminal

MAX_WIDTH, HEIGHT = 100, 10
_LABEL = 10  # width in columns of the scale on the left
_CLIPPED = 0.995  # share of the values that are drawn to scale, so that one slow first step does not flatten the curve

Series = Sequence[tuple[int, float]]  # step and value


def plot_history(points: Sequence[StepPoint], width: int = 0) -> Iterator[str]:
    """Yield the lines of the plots. For a step that was repeated after a restart, the last value is used."""
    width = width or min(MAX_WIDTH, shutil.get_terminal_size().columns) - _LABEL - 2
    starts = [after.step for before, after in pairwise(points) if after.generation > before.generation]
    loss = {point.step: point.loss for point in points if point.loss is not None}
    step_s = {point.step: point.step_s for point in points if point.step_s is not None}
    for name, values in (("loss", loss), ("step time (s)", step_s)):
        if len(values) > 1:
            yield from plot_series(name, sorted(values.items()), starts, max(width, 20))


def plot_series(name: str, series: Series, starts: Sequence[int], width: int, height: int = HEIGHT) -> Iterator[str]:
    """Yield the lines of one plot. Each column with values has a mark.

    `^` below a column means that a generation started there.
    """
    from statistics import median  # a slow import

    first, last = series[0][0], series[-1][0]
    columns: dict[int, list[float]] = {}
    for step, value in series:
        columns.setdefault(_column(step, first, last, width), []).append(value)
    middles = {column: median(values) for column, values in columns.items()}
    ordered = sorted(middles.values())
    low, high = ordered[0], ordered[min(len(ordered) - 1, int(len(ordered) * _CLIPPED))]
    span = (high - low) or abs(high) or 1.0
    cells = [[" "] * width for _ in range(height)]
    for column, value in middles.items():
        cells[height - 1 - min(height - 1, round((value - low) / span * (height - 1)))][column] = "*"
    yield name
    for number, line in enumerate(cells):
        value = low + span * (height - 1 - number) / (height - 1)
        scale = f"{value:.4g}" if number % 3 == 0 else ""
        yield f"{scale:>{_LABEL}} |{''.join(line)}".rstrip()
    axis = ["-"] * width
    for start in starts:
        if first <= start <= last:
            axis[_column(start, first, last, width)] = "^"
    yield " " * (_LABEL + 1) + "+" + "".join(axis)
    left, right = f"step {first:,}", f"{last:,}"
    yield " " * (_LABEL + 2) + left + right.rjust(max(0, width - len(left)))


def _column(step: int, first: int, last: int, width: int) -> int:
    return round((step - first) / max(1, last - first) * (width - 1))
