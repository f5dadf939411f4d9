"""`dalsegno runs`: list your runs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from dalsegno.cli import out
from dalsegno.cli.out import json_option
from dalsegno.cli.runs_show import command as show
from dalsegno.cli.statusline import age, facts_of, state_of, status_of

if TYPE_CHECKING:
    from dalsegno.runs.folder import RunFolder
    from dalsegno.runs.status import RunStatus

SHOWN = 20
_HEADERS = ["RUN", "STATE", "NODES", "GEN", "RESTARTS", "AGE", "ELAPSED", "JOBIDS", "EXIT", "MESSAGE"]
_LONGEST_MESSAGE = 70


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


command.add_command(show)


def row(run: RunFolder, status: RunStatus, now: float) -> list[str]:
    """Return one row of the table."""
    from dalsegno.cli.statusline import clock, elapsed_s, members
    from dalsegno.cli.watch import job_ids

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
        line if len(line) <= _LONGEST_MESSAGE else f"{line[:_LONGEST_MESSAGE]}…",
    ]
