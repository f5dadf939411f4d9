"""`dalsegno bench launch`: measure how long each phase of a run's start takes, and compare that with srun."""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dalsegno.cli import out
from dalsegno.cli.interrupts import stoppable
from dalsegno.cli.measure.bench_job import history_file, node_options, read_place, record
from dalsegno.cli.out import finite, json_option
from dalsegno.errors import DalsegnoError, UsageError

if TYPE_CHECKING:
    from dalsegno.bench.launch import LaunchTimes
    from dalsegno.cluster import SlurmHere
    from dalsegno.runs.submit.plan import RunPlan

_POLL_S = 0.05


@click.command("launch")
@click.option("--repeat", type=click.IntRange(1, 100), default=3, show_default=True, help="Number of starts.")
@click.option("--framework", default="torch", show_default=True, help="Framework of the run, as in `dalsegno run`.")
@click.option(
    "--wait", "wait_s", type=click.FloatRange(1, 86400), default=600.0, show_default=True, callback=finite,
    help="Time limit of one start, in seconds.",
)  # fmt: skip
@node_options
@json_option
def command(repeat: int, framework: str, wait_s: float, json_: bool, **given: Any) -> None:
    """Measure how long a run takes from the request until its script runs on all nodes.

    The script does nothing. For comparison, `srun true` runs on the same number of nodes.

    \b
    dalsegno bench launch --nodes 4
    """
    from dalsegno.bench.job import BenchMeasurement
    from dalsegno.bench.launch import HEADERS, table_rows, to_dict
    from dalsegno.cluster import find_slurm

    place = read_place(given)
    if not place.in_slurm:
        raise UsageError("`bench launch` needs nodes of a cluster", hint="add `--nodes N`")
    slurm = find_slurm(place.cluster)
    times, srun_s = [], []
    with out.progress() as say, stoppable():
        for number in range(repeat):
            say(f"start {number + 1} of {repeat}")
            plan = _plan(slurm, {**place.fields, "framework": framework})
            if place.dry_run:
                from dalsegno.runs.submit.slurm_args import render_commands

                out.data(render_commands(plan).rstrip("\n"))
                return
            times.append(_start(plan, slurm, wait_s))
            srun_s.append(_srun(plan, slurm, wait_s))
    nodes = plan.shape.max_nodes
    for each in times:
        record(
            history_file(slurm), BenchMeasurement(time.time(), "launch", each.until_script, "s", (), {"nodes": nodes})
        )
    if json_:
        out.as_json(to_dict(times, srun_s))
    else:
        out.table(HEADERS, table_rows(times, srun_s))


def _plan(slurm: SlurmHere, fields: dict[str, object]) -> RunPlan:
    from dalsegno.bench.launch import SCRIPT
    from dalsegno.cli.training.submission import make_plan
    from dalsegno.cluster import runs_home
    from dalsegno.runs.submit.options import make_request
    from dalsegno.system.files import make_folder, write_atomic

    home = runs_home()
    folder = home / ".bench-launch"  # a folder on the storage of the runs, which all nodes mount
    make_folder(folder)
    script = folder / "launch.py"
    write_atomic(script, SCRIPT)
    marks = str(folder / secrets.token_hex(6))
    request = make_request(str(script), (marks,), {"chdir": os.getcwd(), "name": "bench-launch", **fields})
    return make_plan(request, slurm, home)


def _start(plan: RunPlan, slurm: SlurmHere, wait_s: float) -> LaunchTimes:
    """Start a run, wait for its end, and return the times of its phases."""
    from dalsegno.bench.launch import launch_times
    from dalsegno.cli.training.cancel import cancel_run
    from dalsegno.cli.training.submission import start
    from dalsegno.cluster import runs_home
    from dalsegno.runs import journal
    from dalsegno.runs.status import read_status

    marks = Path(plan.request.args[0])
    asked = time.time()
    run = start(plan, slurm, runs_home())
    until, over = time.monotonic() + wait_s, False
    try:
        while not over:
            status = read_status(run.status)
            over = status is not None and status.over
            if not over and time.monotonic() > until:
                what = f"run {run.run} did not end within {wait_s:g} s"
                raise DalsegnoError(what, hint=f"`dalsegno why {run.run}` shows what happened")
            if not over:
                time.sleep(_POLL_S)
    finally:
        if not over:
            cancel_run(run)
    scripts = [float(each.read_text()) for each in marks.parent.glob(f"{marks.name}.*")]
    for each in marks.parent.glob(f"{marks.name}.*"):
        each.unlink()
    found = launch_times(asked, list(journal.read(run.journal)), scripts, time.time())
    if found is None:
        raise DalsegnoError(f"run {run.run} did not start", hint=f"`dalsegno logs {run.run}` shows its output")
    return found


def _srun(plan: RunPlan, slurm: SlurmHere, wait_s: float) -> float:
    """Return how long srun takes, in seconds, to run `true` on the same number of nodes."""
    from dalsegno.runs.submit.plan import slurm_options
    from dalsegno.system.processes import LocalRunner

    skipped = ("--comment=", "--signal=", "--job-name=")
    options = [each for each in slurm_options(plan.job) if not each.startswith(skipped)]
    began = time.monotonic()
    LocalRunner().run(["srun", *options, "--mpi=none", "true"], env=slurm.env, timeout_s=wait_s).checked()
    return time.monotonic() - began
