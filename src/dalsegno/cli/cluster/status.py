"""`dalsegno status`, `dalsegno ls`: the nodes, daemons and queue of a cluster; the clusters on this machine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from dalsegno.cli import out
from dalsegno.cli.cluster.cluster_sources import ClusterSources
from dalsegno.cli.out import cluster_option, json_option
from dalsegno.errors import DalsegnoError
from dalsegno.targets.base import CanForward, ClusterStatus, DaemonStatus, NodeStatus, counted

if TYPE_CHECKING:
    from dalsegno.overview.facts import NodeRecovery, ObservedRun, Overview, RecoveryView

# Daemons that run on many machines. All running daemons of one kind share a row, and the value says what the row
# counts. node-exporter also runs on the head node, so its row counts hosts.
NODE_DAEMONS = {"slurmd": "node", "metadata-service": "node", "node-agent": "node", "node-exporter": "host"}
NAME_COLUMNS = 40


@click.command()
@cluster_option
@json_option
def command(name: str | None, json_: bool) -> None:
    """Show the health, nodes, daemons and queue of the cluster, and any problems.

    The first line is the verdict: what is wrong, what is being done about it, and whether training is affected.
    """
    from dalsegno.overview.verdict import assess, describe, verdict_message
    from dalsegno.spec.facts import facts_to_json

    sources = _open_sources(name)
    target = sources.target
    if target is not None and isinstance(target, CanForward):  # only its head node can give the verdict
        _report(target.status(), _head_verdict(target), json_)
        return
    overview = _look(sources)
    verdict = assess(overview)
    if json_:
        out.as_json({**facts_to_json(overview.status), "verdict": verdict_message(verdict)})
        return
    out.data(describe(verdict))
    _show(overview.status)


def _open_sources(name: str | None) -> ClusterSources:
    """Open the named cluster or the only one that Dal Segno created. Without either, open the Slurm of this machine."""
    from dalsegno.cli.cluster.cluster_sources import open_sources
    from dalsegno.cluster import find_place, foreign_slurm, open_cluster, places

    if not (name or os.environ.get("DALSEGNO_CLUSTER") or places()) and foreign_slurm() is not None:
        return open_sources(None)
    place = find_place(name)
    target = open_cluster(place)
    return ClusterSources(place.name, target, None, target.controller_socket)


def _head_verdict(target: object) -> dict[str, Any] | None:
    """Return the verdict that the head node of a remote cluster reports; None if it reports no verdict."""
    from dalsegno.printable import one_line
    from dalsegno.targets.machines import AsksHead

    status = target.head_status() if isinstance(target, AsksHead) else None
    verdict = status.get("verdict") if status else None
    if not isinstance(verdict, dict):
        return None
    return {**verdict, "text": one_line(str(verdict.get("text", "")))}


def _report(status: ClusterStatus, verdict: Mapping[str, Any] | None, json_: bool) -> None:
    from dalsegno.spec.facts import facts_to_json

    if json_:
        out.as_json({**facts_to_json(status), **({"verdict": verdict} if verdict else {})})
        return
    if verdict:
        out.data(verdict["text"])
    _show(status)


def _look(sources: ClusterSources) -> Overview:
    """Return the present state. If the controller does not answer, the state says so."""
    from dalsegno.overview.facts import Overview

    status, view = sources.status(), None
    with contextlib.suppress(DalsegnoError):
        view = sources.recovery_view()
    runs = tuple(sources.runs())
    status = replace(status, problems=(*status.problems, *_problems(view), *_slow_ranks(runs, sources)))
    return Overview(
        status,
        view,
        runs=runs,
        all_runs=sources.sees_all_runs,
        failing_scrapes=sources.failing_scrapes(),
    )


def _slow_ranks(runs: Sequence[ObservedRun], sources: ClusterSources) -> list[str]:
    """Return a line for each run that waits for a slow rank, with the readings of that rank's node."""
    slow = [run.status for run in runs if run.status.slow_rank]
    if not slow:
        return []
    from dalsegno.runs.slow_ranks import describe_slow_rank

    readings = sources.readings()
    return [f"run {status.run}: {text}" for status in slow if (text := describe_slow_rank(status, readings))]


def _problems(view: RecoveryView | None) -> list[str]:
    """Return the problems that the controller reports; [] if it is silent, because the table of daemons shows that."""
    if view is None:
        return []
    paused = "automation is paused: nodes are not repaired; to resume: `dalsegno automation resume`"
    described = ((node, _describe_phase(node)) for node in view.nodes.values())
    return [
        *([paused] if view.paused else []),
        *(f"{node.node} {phase}: {node.note or node.reason}" for node, phase in described if phase),
    ]


def _describe_phase(node: NodeRecovery) -> str:
    """Return the text for a phase that Slurm's states do not show or that needs an administrator; "" for any other
    phase."""
    from dalsegno.recovery.decisions.phase import NodePhase

    texts = {NodePhase.SUSPECTED: "is suspected", NodePhase.NEEDS_ADMIN: "needs an administrator"}
    return texts.get(node.phase, "")


def _show(status: ClusterStatus) -> None:
    facts = ", ".join(f"{key} {value}" for key, value in status.facts.items())
    out.data(f"{status.name} ({status.target}) is {status.phase.value}" + (f": {facts}" if facts else ""))
    for problem in status.problems:
        out.warn(problem)
    _section(["NODE", "STATE", "PARTITION", "GPUS", "ADDRESS", "REASON"], [_node_row(node) for node in status.nodes])
    _section(["DAEMON", "HOST", "STATE"], daemon_rows(status))
    out.data("")
    _show_queue(status)


def _section(headers: list[str], rows: list[list[str]]) -> None:
    if rows:
        out.data("")
        out.table(headers, rows)


def _node_row(node: NodeStatus) -> list[str]:
    kind = f" {node.gpu_type}" if node.gpu_type else ""
    used = "?" if node.gpus_used is None else node.gpus_used
    gpus = f"{used}/{node.gpus}{kind}" if node.gpus else "-"
    state = f"{node.state} (spare)" if node.spare else node.state
    return [node.name, state, ",".join(node.partitions), gpus, node.address, node.reason]


def daemon_rows(status: ClusterStatus) -> list[list[str]]:
    """Return one row per daemon. The running daemons of one kind in NODE_DAEMONS share a row."""
    many = {name: [one for one in status.daemons if one.name == name and one.running] for name in NODE_DAEMONS}
    rows = [_daemon_row(one) for one in status.daemons if one not in many.get(one.name, [])]
    together = [[name, counted(len(fine), NODE_DAEMONS[name]), "running"] for name, fine in many.items() if fine]
    return [*rows, *together]


def _daemon_row(daemon: DaemonStatus) -> list[str]:
    return [daemon.name, daemon.host, "running" if daemon.running else f"not running {daemon.detail}".rstrip()]


def _show_queue(status: ClusterStatus) -> None:
    if status.jobs is None:
        out.data("jobs: unknown, slurmctld does not answer")
        return
    if not status.jobs:
        out.data("no jobs")
        return
    headers = ["JOB", "NAME", "USER", "PARTITION", "STATE", "NODES", "GPUS", "TIME", "REASON"]
    rows = [
        [
            job.id,
            _cut(job.name),
            job.user,
            job.partition,
            job.state.value,
            job.nodes or "-",
            str(job.gpus or "-"),
            _clock(job.elapsed_s),
            job.reason,
        ]
        for job in status.jobs
    ]
    out.table(headers, rows)


def _cut(name: str) -> str:
    """Shorten a job name, which may be very long. `--json` prints the full name."""
    return name if len(name) <= NAME_COLUMNS else name[: NAME_COLUMNS - 1] + "…"


def _clock(seconds: int) -> str:
    """Format a time as squeue does: 1-02:03:04, 2:03:04, 0:05."""
    days, rest = divmod(seconds, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, secs = divmod(rest, 60)
    if days:
        return f"{days}-{hours:02}:{minutes:02}:{secs:02}"
    return f"{hours}:{minutes:02}:{secs:02}" if hours else f"{minutes}:{secs:02}"


@click.command()
@json_option
def ls(json_: bool) -> None:
    """List the clusters on this machine, including partly created ones."""
    from dalsegno.cluster import open_cluster, places

    found = [(place, open_cluster(place).summary()) for place in places()]
    if json_:
        facts = [{"target": s.target, "phase": s.phase.value, "nodes": s.nodes} for _, s in found]
        named = [{"name": place.name, "folder": str(place.folder)} for place, _ in found]
        out.as_json([{**name, **fact} for name, fact in zip(named, facts, strict=True)])
        return
    if not found:
        out.talk("no clusters yet; write a cluster file with `dalsegno init`, then run `dalsegno up`")
        return
    rows = [[place.name, s.target, s.phase.value, str(s.nodes), str(place.folder)] for place, s in found]
    out.table(["NAME", "TARGET", "STATE", "NODES", "FOLDER"], rows)
