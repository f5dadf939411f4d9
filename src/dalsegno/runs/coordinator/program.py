"""The program `run-coordinator [--kept] FOLDER`, which coordinates the run in this folder until it ends."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from dalsegno.log import set_level, start_logging
from dalsegno.programs import launcher
from dalsegno.runs.coordinator.agents.liveness import MAX_GONE_S, Timing, read_gone_s
from dalsegno.runs.coordinator.coordinator import Coordinator
from dalsegno.runs.coordinator.nodes.slurm_node_source import SlurmNodeSource
from dalsegno.runs.coordinator.tasks import TaskRun
from dalsegno.runs.folder import RunFolder
from dalsegno.runs.status import read_status
from dalsegno.runs.submit.plan import RunPlan
from dalsegno.runs.submit.prepare import first_status, read_environment, read_plan
from dalsegno.runs.submit.site import RunSite
from dalsegno.slurm.client import SlurmClient
from dalsegno.system.children import MARK, Child, send, start
from dalsegno.system.hanging_calls import slowness
from dalsegno.system.machine import user_name
from dalsegno.system.processes import LocalRunner

# Supervision in a batch step, where there is no controller to restart the coordinator


CRASHED = 70  # exit code of a coordinator that crashed and should be restarted
SHORT_LIFE_S = 10.0
MAX_SHORT_LIVES = 8  # limit on consecutive crashes within SHORT_LIFE_S after a start


def supervise(argv: Sequence[str]) -> int:
    """Run the coordinator, restart it if it crashes, and return the run's exit code.

    The coordinator is not restarted once Slurm ends the step, or after MAX_SHORT_LIVES crashes in a row soon after a
    start. Slurm's signals are forwarded to it, even if they arrive while it starts.
    """
    caught: list[int] = []
    living: list[Child] = []

    def pass_on(number: int, _: object) -> None:
        caught.append(number)
        _send(living, number)

    for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
        signal.signal(number, pass_on)
    short = 0
    while True:
        began, known = time.monotonic(), len(caught)
        living[:] = [start(argv, os.environ)]
        for late in caught[known:]:  # signals that arrived while the coordinator was being started
            _send(living, late)
        code = _wait(living[0])
        living.clear()
        short = short + 1 if time.monotonic() - began < SHORT_LIFE_S else 0
        if 0 <= code != CRASHED or signal.SIGTERM in caught or short >= MAX_SHORT_LIVES:
            return code if code >= 0 else 128 - code


def _wait(child: Child) -> int:
    assert child.popen is not None
    code = child.popen.wait()
    child.close()
    return code


def _send(living: Sequence[Child], number: int) -> None:
    for child in living:
        send(child.process, signal.Signals(number))


KEPT = "--kept"


def main(arguments: list[str]) -> int:
    """Run the coordinator. On the head node, the controller supervises it; in a batch step, a parent process does."""
    folder = RunFolder(Path(arguments[-1]))
    try:
        _write_to(folder.coordinator_log)
        in_batch = not read_plan(folder).on_head
        if in_batch and KEPT not in arguments:
            return supervise([*launcher(), "run-coordinator", KEPT, str(folder.root)])
        code = _serve(folder)
    except Exception:  # any crash is logged, and the coordinator is restarted
        logging.getLogger("coordinator").exception("the coordinator crashed")
        return CRASHED
    return code if in_batch else 0


def _serve(folder: RunFolder) -> int:
    start_logging("coordinator", folder.coordinator_log)
    status = read_status(folder.status)
    if status is not None and status.over:
        return status.exit_code or 0  # a previous coordinator finished the run
    site = open_site(folder)
    set_level(site.environment)  # the user's log level from `dalsegno run` replaces the cluster's level
    return asyncio.run(_coordinate(site))


async def _coordinate(site: RunSite) -> int:
    if site.plan.request.has_agents:
        return await Coordinator(site, lambda coordinator: SlurmNodeSource(site, coordinator)).serve()
    return await TaskRun(site, first_status(site.plan, user_name(), time.time())).serve()


def open_site(folder: RunFolder) -> RunSite:
    plan, environment = read_plan(folder), read_environment(folder)
    if MARK in os.environ:
        environment[MARK] = os.environ[MARK]  # marks all descendants, so that they can be found and killed
    own = int(os.environ.get("SLURM_JOB_ID") or 0) if not plan.on_head else 0
    client = SlurmClient(LocalRunner(), environment)
    return RunSite(folder, plan, environment, client, own or None, Timing(_node_timeout_s(plan, environment)))


def _node_timeout_s(plan: RunPlan, environment: Mapping[str, str]) -> float:
    """Return the timeout that the user requested. Otherwise return the cluster's value, scaled for a slow machine."""
    return plan.request.node_timeout_s or min(read_gone_s(environment) * slowness(), MAX_GONE_S)


def _write_to(log: Path) -> None:
    """Redirect standard output and standard error to this file in the run folder, where the owner can read errors."""
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
