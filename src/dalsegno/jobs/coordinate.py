"""The program `run-coordinator FOLDER`: opens a run's folder and coordinates the run to its end."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import traceback
from pathlib import Path

from dalsegno.errors import DalsegnoError
from dalsegno.jobs.plan import RunPlan
from dalsegno.jobs.site import RunSite
from dalsegno.launch.coordinator import Coordinator
from dalsegno.launch.folder import RunFolder
from dalsegno.launch.liveness import DEFAULT_GONE_S, Timing
from dalsegno.launch.slurm_staff import SlurmStaff
from dalsegno.launch.status import read_status
from dalsegno.slurm.client import SlurmClient
from dalsegno.spec.facts_json import facts_from_json
from dalsegno.system.processes import LocalRunner
from dalsegno.system.procfs import MARK

CRASHED = 70  # the controller starts us again


def main(arguments: list[str]) -> int:
    """On the head the run's code is in its status and ours only says that we are done; in a batch step they are one."""
    folder = RunFolder(Path(arguments[0]))
    _write_to(folder.coordinator_log)
    try:
        status = read_status(folder.status)
        if status is not None and status.over:
            return 0  # our former self brought it to its end
        site = open_site(folder)
        code = asyncio.run(_coordinate(site))
    except Exception:  # the last line of defence: it is in the log, and we are started again
        traceback.print_exc()
        return CRASHED
    return 0 if site.own_job is None else code


async def _coordinate(site: RunSite) -> int:
    return await Coordinator(site, lambda boss: SlurmStaff(site, boss)).serve()


def open_site(folder: RunFolder) -> RunSite:
    try:
        plan = facts_from_json(RunPlan, json.loads(folder.plan.read_text()))
        environment = json.loads(folder.environment.read_text())
    except (OSError, ValueError) as error:
        raise DalsegnoError(f"the run in {folder.root} cannot be read: {error}") from error
    if MARK in os.environ:
        environment[MARK] = os.environ[MARK]  # all that we start is found, and swept, as we are
    gone_s = float(environment.get("DALSEGNO_NODE_TIMEOUT") or DEFAULT_GONE_S)
    own = int(os.environ.get("SLURM_JOB_ID") or 0) if not plan.on_head else 0
    client = SlurmClient(LocalRunner(), environment)
    return RunSite(folder, plan, environment, client, own or None, Timing(gone_s))


def _write_to(log: Path) -> None:
    """What goes wrong is in the run's folder, where its owner finds it."""
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
