"""The program `run-coordinator [--kept] FOLDER`: opens a run's folder and coordinates the run to its end."""

from __future__ import annotations

import asyncio
import os
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path

from dalsegno.jobs.keeping import CRASHED, keep
from dalsegno.jobs.plan import RunPlan
from dalsegno.jobs.prepare import first_status, read_environment, read_plan
from dalsegno.jobs.site import RunSite
from dalsegno.launch.coordinator import Coordinator
from dalsegno.launch.folder import RunFolder
from dalsegno.launch.liveness import Timing, told_gone_s
from dalsegno.launch.slurm_staff import SlurmStaff
from dalsegno.launch.status import read_status
from dalsegno.launch.task_run import TaskRun
from dalsegno.programs import launcher
from dalsegno.slurm.client import SlurmClient
from dalsegno.system.children import MARK
from dalsegno.system.machine import user_name
from dalsegno.system.processes import LocalRunner

KEPT = "--kept"


def main(arguments: list[str]) -> int:
    """On the head the controller keeps us; in a batch step a parent of our own does."""
    folder = RunFolder(Path(arguments[-1]))
    try:
        _write_to(folder.coordinator_log)
        in_batch = not read_plan(folder).on_head
        if in_batch and KEPT not in arguments:
            return keep([*launcher(), "run-coordinator", KEPT, str(folder.root)])
        code = _serve(folder)
    except Exception:  # the last line of defence: it is in the log, and we are started again
        traceback.print_exc()
        return CRASHED
    return code if in_batch else 0


def _serve(folder: RunFolder) -> int:
    status = read_status(folder.status)
    if status is not None and status.over:
        return status.exit_code or 0  # a former self of ours brought it to its end
    return asyncio.run(_coordinate(open_site(folder)))


async def _coordinate(site: RunSite) -> int:
    if site.plan.request.has_agents:
        return await Coordinator(site, lambda boss: SlurmStaff(site, boss)).serve()
    return await TaskRun(site, first_status(site.plan, user_name(), time.time())).serve()


def open_site(folder: RunFolder) -> RunSite:
    plan, environment = read_plan(folder), read_environment(folder)
    if MARK in os.environ:
        environment[MARK] = os.environ[MARK]  # all that we start is found, and swept, as we are
    own = int(os.environ.get("SLURM_JOB_ID") or 0) if not plan.on_head else 0
    client = SlurmClient(LocalRunner(), environment)
    return RunSite(folder, plan, environment, client, own or None, Timing(_node_timeout_s(plan, environment)))


def _node_timeout_s(plan: RunPlan, environment: Mapping[str, str]) -> float:
    """As asked for, else as the cluster knows best: hosts on one machine are sooner known to be gone."""
    return plan.request.node_timeout_s or told_gone_s(environment)


def _write_to(log: Path) -> None:
    """What goes wrong is in the run's folder, where its owner finds it."""
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
