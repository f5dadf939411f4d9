"""Overviews of clusters for tests: each function changes one thing of a healthy cluster."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dalsegno.health.result import Remedy
from dalsegno.overview.facts import NodeRecovery, ObservedRun, Overview, RecoveryView
from dalsegno.recovery.decisions.phase import HeldAction, NodePhase
from dalsegno.runs.status import RunPhase, RunStatus
from dalsegno.targets.base import ClusterPhase, ClusterStatus, DaemonStatus, NodeStatus

HEAD_DAEMONS = ("munged", "slurmdbd", "slurmctld", "controller")
FAULT = "dalsegno:replace:node-lost no answer"


def node(name: str, state: str = "idle", **fields: Any) -> NodeStatus:
    return NodeStatus(name, state, **{"partitions": ("train",), "gpus": 8, "gpu_type": "h100", **fields})


def healthy(count: int = 5) -> Overview:
    nodes = tuple(node(f"train-{number}") for number in range(1, count + 1))
    on_head = [DaemonStatus("head", name, True) for name in HEAD_DAEMONS]
    on_nodes = [DaemonStatus(each.name, name, True) for each in nodes for name in ("slurmd", "node-agent")]
    status = ClusterStatus("demo", "local", ClusterPhase.UP, nodes, (*on_head, *on_nodes))
    return Overview(status, RecoveryView({each.name: NodeRecovery(each.name) for each in nodes}))


def with_status(overview: Overview, **fields: Any) -> Overview:
    return replace(overview, status=replace(overview.status, **fields))


def with_node(overview: Overview, name: str, **fields: Any) -> Overview:
    nodes = tuple(replace(each, **fields) if each.name == name else each for each in overview.status.nodes)
    return with_status(overview, nodes=nodes)


def with_record(overview: Overview, name: str, phase: NodePhase, **fields: Any) -> Overview:
    assert overview.controller is not None
    record = NodeRecovery(name, phase, **{"reason": FAULT, **fields})
    return replace(overview, controller=replace(overview.controller, nodes={**overview.controller.nodes, name: record}))


def dead(overview: Overview, *names: str, host: str = "head") -> Overview:
    """Return the cluster with these daemons dead, and degraded, as targets report it."""
    daemons = tuple(
        replace(each, running=False) if each.host == host and each.name in names else each
        for each in overview.status.daemons
    )
    return with_status(overview, daemons=daemons, phase=ClusterPhase.DEGRADED, problems=("not running: …",))


def replacing(overview: Overview, name: str = "train-2") -> Overview:
    """Return the cluster with one node that is being replaced, its daemons dead."""
    out = with_node(dead(overview, "slurmd", "node-agent", host=name), name, state="down*", reason=FAULT)
    return with_record(out, name, NodePhase.REPAIRING, tried=(Remedy.REPLACE,))


def held_back(overview: Overview, name: str, why: HeldAction) -> Overview:
    return with_record(overview, name, NodePhase.SUSPECTED, held_back=why)


def run(name: str, phase: RunPhase = RunPhase.RUNNING, *, silent: bool = False, **fields: Any) -> ObservedRun:
    usual: dict[str, Any] = {"user": "ada", "created": 100.0, "updated": 120.0}
    usual |= {"started": 110.0, "generation": 1, "world_size": 4, "wanted_nodes": 4, "coordinator_pid": 7}
    status = RunStatus(name, name.partition("-")[0], phase=phase, **{**usual, **fields})
    return ObservedRun(status, silent=silent)


def with_runs(overview: Overview, *runs: ObservedRun, all_runs: bool = True) -> Overview:
    return replace(overview, runs=runs, all_runs=all_runs)
