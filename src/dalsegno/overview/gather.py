"""Gather the facts of an overview: from the target, from Slurm, from the controller's socket and from run folders."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dalsegno.errors import CommandFailed, DalsegnoError
from dalsegno.health.messages import BadReport, GpuReading, parse_readings
from dalsegno.health.result import Verdict
from dalsegno.overview.facts import FailingScrape, ObservedRun, RecoveryView, read_controller
from dalsegno.recovery.client import ask
from dalsegno.recovery.journal.event import Event, read_event
from dalsegno.runs.folder import RunFolder
from dalsegno.runs.status import RunStatus, coordinator_is_dead, is_over, read_status, silent_s
from dalsegno.slurm.client import SlurmClient
from dalsegno.slurm.facts import NodeInfo
from dalsegno.slurm.parse.messages import SlurmTrouble, parse_troubles
from dalsegno.system.files import user_of
from dalsegno.targets.base import CanMonitor, ClusterPhase, ClusterStatus, NodeStatus, Target, job_status
from dalsegno.wire.liveness import Presence

if TYPE_CHECKING:
    from dalsegno.runs.slow_ranks import CheckRemark, NodeReading

CONTROLLER_S = 3.0
PROMETHEUS_S = 1.0


def ask_recovery_view(controller: Path) -> RecoveryView:
    """Ask the controller about its nodes and whether recovery is paused. Raise DalsegnoError if it does not answer."""
    automation = ask(controller, {"automation": "status"}, CONTROLLER_S)
    nodes = ask(controller, {"nodes": True}, CONTROLLER_S)
    if "nodes" not in nodes or "automation" not in automation:
        hint = "`dalsegno up` restarts a controller of another version"
        raise DalsegnoError(str(nodes.get("error") or "the controller's answer cannot be read"), hint=hint)
    return read_controller(nodes, automation)


def ask_gpus(controller: Path) -> dict[str, tuple[GpuReading, ...]]:
    """Return the last GPU readings of each node whose agent is connected. The controller gets them from the agents."""
    return read_agents(ask(controller, {"agents": True}, CONTROLLER_S))


def read_agents(answer: Mapping[str, Any]) -> dict[str, tuple[GpuReading, ...]]:
    """Return the readings of each node whose agent is connected. Those of other nodes may be old."""
    agents = [each for each in answer.get("agents", ()) if each.get("presence") == Presence.CONNECTED.value]
    found = {str(each["node"]): read_gpus(each) for each in agents}
    return {node: gpus for node, gpus in found.items() if gpus}


def ask_readings(controller: Path) -> dict[str, NodeReading]:
    """Return what the agents of the nodes report: readings of GPUs, and checks that did not pass."""
    return read_node_readings(ask(controller, {"agents": True}, CONTROLLER_S))


def read_node_readings(answer: Mapping[str, Any]) -> dict[str, NodeReading]:
    from dalsegno.runs.slow_ranks import NodeReading  # imported late: `status` must be fast

    agents = [each for each in answer.get("agents", ()) if each.get("presence") == Presence.CONNECTED.value]
    return {
        str(each["node"]): NodeReading(read_gpus(each), tuple(map(_remark_of, each.get("findings", ()))))
        for each in agents
    }


def _remark_of(row: Sequence[Any]) -> CheckRemark:
    from dalsegno.runs.slow_ranks import CheckRemark  # imported late: `status` must be fast

    check, word, text = row
    verdict = next((each for each in Verdict if each.value == word), Verdict.UNKNOWN)
    return CheckRemark(str(check), verdict, str(text))


def read_gpus(agent: Mapping[str, Any]) -> tuple[GpuReading, ...]:
    """Parse the readings in the controller's view of an agent; empty if another version omits or changes them."""
    rows = agent.get("readings")
    with contextlib.suppress(BadReport):
        return parse_readings(rows) if rows else ()
    return ()


def ask_events(controller: Path, since: int) -> list[Event]:
    """Return the events after this id; a negative number asks for that many of the last events."""
    answer = ask(controller, {"events": since}, CONTROLLER_S)
    return [read_event(message) for message in answer.get("events", ())]


def ask_run_folders(controller: Path) -> list[RunFolder]:
    """Return the folders of the runs that the controller supervises. Root gets those of all users, any other user only
    their own."""
    answer = ask(controller, {"runs": True}, CONTROLLER_S)
    folders = [each.get("folder") for each in answer.get("runs", ()) if isinstance(each, dict)]
    return [RunFolder(Path(folder)) for folder in folders if isinstance(folder, str) and folder.startswith("/")]


def ask_failing_scrapes(target: Target) -> tuple[FailingScrape, ...]:
    """Return the exporters that Prometheus cannot read; empty if Prometheus does not run, or if this user has no access
    to it."""
    from dalsegno.observe.prometheus_client import (  # imported late, because few clusters need it
        PrometheusClient,
        ScrapeState,
    )

    if not isinstance(target, CanMonitor) or not target.has_monitor():
        return ()
    layout = target.monitor_layout()
    with contextlib.suppress(DalsegnoError, OSError):  # a dead Prometheus is reported as a dead daemon
        password = Path(layout.password_file).read_text().strip() if layout.password_file else ""
        client = PrometheusClient(layout.prometheus, password, PROMETHEUS_S)
        down = [each for each in client.targets() if each.state is ScrapeState.DOWN]
        return tuple(FailingScrape(each.job, each.host) for each in down)
    return ()


def read_runs(
    folders: Iterable[RunFolder], *, progress: bool = False, name_of: Callable[[int], str] = user_of
) -> list[ObservedRun]:
    """Read the runs in these folders, newest first. Runs that cannot be read are left out: the user may have
    removed the folder, or root may lack permission to read it from this host."""
    found = {}
    for folder in folders:
        with contextlib.suppress(DalsegnoError, OSError):
            status = read_status(folder.status)
            if status is not None and status.run == folder.run:  # ignore a status file copied from another run
                status = replace(status, user=name_of(folder.root.stat().st_uid))
                found[status.run] = _view(folder, status, progress)
    return sorted(found.values(), key=lambda run: -run.status.created)


def _view(folder: RunFolder, status: RunStatus, progress: bool) -> ObservedRun:
    steps = None
    if progress:
        from dalsegno.runs.coordinator.reports.goodput import read_progress  # imported late: `status` must be fast

        with contextlib.suppress(DalsegnoError, OSError):  # if the file is damaged, the run itself is still shown
            steps = read_progress(folder.progress)
    return ObservedRun(status, steps, is_silent(status, time.time()))


def is_silent(status: RunStatus, now: float) -> bool:
    """Return whether the coordinator of a run is dead, or has been silent for too long."""
    return not is_over(status) and (silent_s(status, now) is not None or coordinator_is_dead(status))


def status_from_slurm(name: str, slurm: SlurmClient) -> ClusterStatus:
    """Return a cluster's status from Slurm alone: on a login node, or for a cluster that Dal Segno did not create.

    Raise CommandFailed if Slurm's commands find no slurm.conf.
    """
    try:
        nodes, queue = slurm.nodes(), slurm.queue()
    except DalsegnoError as error:
        if isinstance(error, CommandFailed) and SlurmTrouble.NO_SETTINGS in parse_troubles(error.stderr):
            raise
        problem = f"slurmctld does not answer: {error.what.splitlines()[-1].strip()}"
        return ClusterStatus(name, "slurm", ClusterPhase.DEGRADED, jobs=None, problems=(problem,))
    return ClusterStatus(
        name,
        "slurm",
        ClusterPhase.UP,
        nodes=tuple(node_status(node) for node in nodes),
        jobs=tuple(job_status(job) for job in queue.jobs),
    )


def node_status(node: NodeInfo) -> NodeStatus:
    """Return a node as Slurm reports it."""
    return NodeStatus(
        node.name, node.word, reason=node.reason, partitions=node.partitions, gpus=node.gpus, gpus_used=node.gpus_used,
        gpu_type=node.gpu_type, address=node.address, reason_user=node.reason_user,
    )  # fmt: skip


def merge_runs(kept: Sequence[RunFolder], own: Sequence[RunFolder]) -> list[RunFolder]:
    """Return the runs that the controller lists, then this user's own runs that it does not list."""
    known = {folder.run for folder in kept}
    return [*kept, *(folder for folder in own if folder.run not in known)]
