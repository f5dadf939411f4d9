"""`dalsegno runs show`: show the progress of one run and how its time was spent."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from dalsegno.cli import out
from dalsegno.cli.out import json_option
from dalsegno.cli.statusline import facts_of, state_of, status_of

if TYPE_CHECKING:
    from dalsegno.runs.coordinator.goodput import Goodput, TrainingProgress

_OWN = ("step_s", "starting_s", "stepping_s", "saving_s", "stall_s", "snapshots", "skipped", "saves", "save_s")


@click.command("show")
@json_option
@click.argument("run", required=False, default="")
def command(run: str, json_: bool) -> None:
    """Show the progress of RUN and how its time was spent. Default: the newest run.

    Steps are shown if the script reports them with the training library, `dalsegno.train`.
    """
    from dalsegno.cli.statusline import live_text
    from dalsegno.cluster import runs_home
    from dalsegno.errors import NotThere
    from dalsegno.runs.coordinator.goodput import read_progress
    from dalsegno.runs.submit.prepare import find_run
    from dalsegno.spec.facts import facts_to_json

    found = find_run(runs_home(), run)
    status, progress = status_of(found), read_progress(found.progress)
    if status is None:
        raise NotThere(f"run {found.run} has no status yet", hint="`dalsegno runs` lists the runs that have one")
    if json_:
        known = facts_of(found, status)
        out.as_json({**known, "progress": facts_to_json(progress) if progress else None})
        return
    now = time.time()
    out.data(f"{found.run}  {state_of(status, now)}" if status.over else live_text(status, now))
    if progress is None:
        out.talk("the script reports no steps; use `dalsegno.train.Checkpointer` to report them")
        return
    for line in lines_of(progress):
        out.data(line)


def lines_of(progress: TrainingProgress) -> Iterator[str]:
    """Return what is known about steps, time and snapshots, line by line."""
    figures = progress.figures
    reported = [f"{name} {value:.4g}" for name, value in sorted(figures.items()) if name not in _OWN]
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
    from dalsegno.cli.statusline import clock
    from dalsegno.runs.coordinator.goodput import TimeKind

    total = sum(account.spent.values()) or 1.0
    shares = [f"{100 * account.spent.get(kind, 0.0) / total:.1f} % {kind.value}" for kind in TimeKind]
    return f"time  {', '.join(shares)}  of {clock(total)}"


def _suggestion(progress: TrainingProgress) -> str:
    """Return the disk interval that Young and Daly's formula suggests, once there is enough data."""
    from dalsegno.cli.statusline import clock
    from dalsegno.train.options import suggest_interval_s

    account, total = progress.account, sum(progress.account.spent.values())
    stall_s, save_s = (progress.figures.get(name) or 0.0 for name in ("stall_s", "save_s"))
    best_s = suggest_interval_s(stall_s, account.failures, total, save_s)
    if best_s is None:
        return ""
    times = f"{account.failures} failure{'s' if account.failures > 1 else ''} in {clock(total)}"
    return f'with {times}, disk_every="{max(1, round(best_s))}s" would lose the least time'
