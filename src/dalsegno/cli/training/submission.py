"""Plan and prepare a run, and submit it to the controller or to Slurm."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dalsegno.cli import out
from dalsegno.cli.controller_requests import slurm_failure
from dalsegno.cli.interrupts import interruptible
from dalsegno.errors import CommandFailed, DalsegnoError
from dalsegno.runs.journal import RunEvent

if TYPE_CHECKING:
    from dalsegno.cluster import SlurmHere
    from dalsegno.runs.folder import RunFolder
    from dalsegno.runs.submit.plan import ClusterFacts, PartitionFacts, RunPlan
    from dalsegno.runs.submit.request import RunRequest


def hand_over(request: RunRequest, cluster: str | None, dry_run: bool) -> int:
    """Submit the requested run, follow it unless it is detached, and return the exit code. With `dry_run`, only print
    the Slurm commands."""
    from dalsegno.cluster import find_slurm, runs_home
    from dalsegno.log import check_level
    from dalsegno.runs.submit.program import check_program, check_torch

    check_level({**os.environ, **dict(request.env)})
    request = replace(request, chdir=os.path.abspath(request.chdir or "."))
    slurm = find_slurm(cluster)
    check_program(request, slurm.env)
    home = runs_home()
    plan = make_plan(request, slurm, home)
    if dry_run:
        _show(plan)
        return 0
    note = check_torch(request, plan.python, certain=bool(plan.cluster))
    with interruptible():
        run = start(plan, slurm, home)
    for each in (*plan.notes, *note):
        out.talk(f"note: {each}")
    return _leave(run) if request.detach else _stay(run, slurm)


def make_plan(request: RunRequest, slurm: SlurmHere, home: Path) -> RunPlan:
    from dalsegno.runs.submit.plan import plan_run
    from dalsegno.runs.submit.prepare import new_run_id

    places = (home, Path(request.chdir, request.output or home))
    run = new_run_id(request.label, lambda name: any(os.path.lexists(place / name) for place in places))
    return plan_run(request, cluster_facts(request, slurm, home), run)


def cluster_facts(request: RunRequest, slurm: SlurmHere, home: Path) -> ClusterFacts:
    """Return the facts about the cluster that the planner needs: partitions, controller, programs."""
    from dalsegno.cluster import cluster_id, has_fabric, silence
    from dalsegno.hardware.job_variables import INSTANCE
    from dalsegno.programs import launcher
    from dalsegno.runs.submit.plan import ClusterFacts, partitions_seen
    from dalsegno.runs.submit.program import find_python

    if (silent := silence(slurm)) is not None:
        raise silent
    try:
        partitions = _with_instances(partitions_seen(slurm.client.partitions(), slurm.client.nodes()), slurm)
    except CommandFailed as fault:
        raise slurm_failure(fault) from None
    return ClusterFacts(
        id=cluster_id(slurm.env),
        controller=slurm.controller is not None and _answers(slurm.controller),
        partitions=partitions,
        launcher=launcher(),
        python=find_python(slurm.env, "torch" if request.framework == "torch" else ""),
        runs_folder=str(home),
        mpi_types=_mpi_types(slurm) if request.framework == "mpi" else (),
        containers=not request.container_image or _takes_containers(slurm),
        instance=slurm.env.get(INSTANCE, ""),
        fabric=has_fabric(slurm),
        environ=tuple(slurm.env),
    )


def _with_instances(partitions: Sequence[PartitionFacts], slurm: SlurmHere) -> tuple[PartitionFacts, ...]:
    """Return the partitions with the instance types of the cluster file, which Slurm does not know."""
    from dalsegno.cluster import applied_cluster
    from dalsegno.runs.submit.plan import partitions_of

    applied = applied_cluster(slurm)
    known = {each.name: each.instance for each in partitions_of(applied)} if applied else {}
    return tuple(replace(each, instance=each.instance or known.get(each.name, "")) for each in partitions)


def _mpi_types(slurm: SlurmHere) -> tuple[str, ...]:
    from dalsegno.runs.submit.container import MPI_LIST_ARGV, parse_mpi_types
    from dalsegno.system.processes import LocalRunner

    done = LocalRunner().run(MPI_LIST_ARGV, env=slurm.env, timeout_s=30)
    return parse_mpi_types(done.stdout + done.stderr)


def _takes_containers(slurm: SlurmHere) -> bool:
    from dalsegno.runs.submit.container import OPTIONS_ARGV, takes_containers
    from dalsegno.system.processes import LocalRunner

    return takes_containers(LocalRunner().run(OPTIONS_ARGV, env=slurm.env, timeout_s=30).stdout)


def _answers(controller: Path) -> bool:
    from dalsegno.recovery.client import controller_answers

    return controller_answers(controller)


def _show(plan: RunPlan) -> None:
    from dalsegno.runs.submit.slurm_args import render_commands

    out.data(render_commands(plan).rstrip("\n"))
    for note in plan.notes:
        out.talk(f"note: {note}")


def start(plan: RunPlan, slurm: SlurmHere, home: Path) -> RunFolder:
    """Create the run's folder, then submit the run. In this order, the coordinator finds the folder complete."""
    from dalsegno.runs.submit.prepare import first_status, prepare_run
    from dalsegno.runs.submit.program import run_environment
    from dalsegno.system.machine import user_name

    fabric = {each.name: each.value for each in plan.variables}
    environment = {**fabric, **run_environment(plan.request, slurm.env)}
    run = prepare_run(plan, environment, first_status(plan, user_name(), time.time()), home)
    if plan.on_head and slurm.controller is not None:
        _submit_to_controller(run, slurm.controller)
    else:
        _submit_to_slurm(run, plan, slurm, home)
    return run


def _submit_to_controller(run: RunFolder, controller: Path) -> None:
    from dalsegno.recovery.client import start_run
    from dalsegno.runs.status import read_status, write_status
    from dalsegno.runs.submit.prepare import aborted_status

    try:
        start_run(controller, run.root)
    except (DalsegnoError, KeyboardInterrupt):
        run.cancel.touch()  # ends the coordinator if one was started and only the controller's answer was lost
        status = read_status(run.status)
        if status is not None and not status.over:
            write_status(run.status, aborted_status(status, time.time(), 1, "the controller did not accept the run"))
        raise


def _submit_to_slurm(run: RunFolder, plan: RunPlan, slurm: SlurmHere, home: Path) -> None:
    from dalsegno.runs import journal
    from dalsegno.runs.submit.prepare import discard_run
    from dalsegno.runs.submit.slurm_args import render_sbatch

    try:
        job = slurm.client.submit(render_sbatch(plan))
    except (DalsegnoError, KeyboardInterrupt):
        discard_run(run, home)
        raise
    # The submission is recorded in the append-only journal and not in the status, which only the coordinator writes
    # now.
    journal.append(run.journal, time.time(), RunEvent.SUBMITTED, job=job)


def _leave(run: RunFolder) -> int:
    out.data(run.run)
    out.talk(f"to follow it: `dalsegno logs -f {run.run}`; to cancel it: `dalsegno cancel {run.run}`")
    return 0


def _stay(run: RunFolder, slurm: SlurmHere) -> int:
    from dalsegno.cli.training.follow import follower_of

    return follower_of(run, slurm).follow()
