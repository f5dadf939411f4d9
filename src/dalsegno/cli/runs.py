"""`dalsegno runs`: what runs, and what ran."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from dalsegno.cli import out
from dalsegno.cli.options import json_option

if TYPE_CHECKING:
    from dalsegno.launch.folder import RunFolder
    from dalsegno.launch.status import Status

SHOWN = 20
_HEADERS = ["RUN", "STATE", "NODES", "GEN", "RESTARTS", "AGE", "ELAPSED", "JOBIDS", "EXIT", "MESSAGE"]
_LONGEST_MESSAGE = 70


@click.command()
@json_option
@click.option("--all", "-a", "everything", is_flag=True, help=f"All runs, not only the last {SHOWN}.")
def command(json_: bool, everything: bool) -> None:
    """List your runs: those under way first, then the newest.

    \b
    STATE  waiting, starting, running, restarting, ending; done, failed, cancelled, lost (with its cluster)
    NODES  those that take part, of those asked for
    GEN    how often its workers were started
    """
    from dalsegno.cluster import runs_home
    from dalsegno.jobs import list_runs

    known = [(run, status) for run in list_runs(runs_home()) if (status := _status(run))]
    ordered = sorted(known, key=lambda each: (each[1].over, -each[1].created))
    shown = ordered if everything else ordered[:SHOWN]
    if json_:
        out.as_json([_facts(run, status) for run, status in shown])
        return
    if not known:
        out.talk("no runs yet; `dalsegno run train.py` starts one")
        return
    out.table(_HEADERS, [row(run, status, time.time()) for run, status in shown])
    if len(shown) < len(ordered):
        out.talk(f"{len(ordered) - len(shown)} older runs are not shown; `dalsegno runs --all` does")


def row(run: RunFolder, status: Status, now: float) -> list[str]:
    """One line of the table."""
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


def state_of(status: Status, now: float) -> str:
    """Its phase; of one that is over, how it ended; and whether its coordinator has died meanwhile."""
    from dalsegno.cli.watch import CANCELLED, LOST, coordinator_is_dead, is_over, silent_s

    if is_over(status):
        if status.exit_code == 0:
            return "done"
        known = {CANCELLED: CANCELLED, LOST: "lost"}
        return next((word for start, word in known.items() if status.message.startswith(start)), "failed")
    phase = "ending" if status.over else status.phase
    if coordinator_is_dead(status):
        return f"{status.phase}, no coordinator"
    silent = silent_s(status, now)
    return phase if silent is None else f"{phase}, silent for {age(silent)}"


def age(seconds: float) -> str:
    """Roughly: 40s, 12m, 5h, 3d."""
    for unit, size in (("d", 86_400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{int(seconds // size)}{unit}"
    return f"{max(0, int(seconds))}s"


def _facts(run: RunFolder, status: Status) -> dict[str, Any]:
    from dalsegno.cli.watch import job_ids
    from dalsegno.spec.facts_json import facts_to_json

    known = {"state": state_of(status, time.time()), "folder": str(run.root.resolve()), "jobs": job_ids(run, status)}
    return {**facts_to_json(status), **known}


def _status(run: RunFolder) -> Status | None:
    """One that cannot be read must not hide the others; one whose cluster is gone does not go on."""
    from dalsegno.cli.watch import cluster_is_gone, lost
    from dalsegno.errors import DalsegnoError
    from dalsegno.launch.status import read_status

    try:
        status = read_status(run.status)
        return lost(status) if status and not status.over and cluster_is_gone(run) else status
    except (DalsegnoError, OSError) as error:
        out.warn(f"run {run.run} cannot be read: {error}")
        return None
