"""Compute the verdict on the cluster for the web page, from the parts of the snapshot. The verdict equals that of
`dalsegno status`."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import replace

from dalsegno.overview.facts import ObservedRun, Overview, RecoveryView
from dalsegno.overview.gather import is_silent, node_status
from dalsegno.overview.verdict import ClusterVerdict, assess
from dalsegno.slurm.facts import NodeInfo, NodeState
from dalsegno.targets.base import ClusterPhase, ClusterStatus, DaemonStatus, NodeStatus
from dalsegno.web.snapshot import ControllerPart, HostPart, RunPicture, SlurmPart
from dalsegno.wire.liveness import Presence

OBSERVER = DaemonStatus("", "observer", running=True)  # the observer runs this code, so at least one daemon runs
SLURM, CONTROLLER = "slurm", "controller"  # names of sources


class Assessor:
    """The object that computes the verdict. It does so only after a change of data that the verdict depends on.

    A computation takes 20 ms for 1,000 nodes. GPU readings change all the time, but the verdict does not depend on
    them.
    """

    def __init__(self) -> None:
        self._known: tuple[object, ClusterVerdict] | None = None

    def verdict(
        self,
        slurm: SlurmPart,
        controller: ControllerPart,
        hosts: HostPart,
        runs: Sequence[RunPicture],
        silent: Collection[str],
    ) -> ClusterVerdict:
        now = time.time()
        active = [(run.status, is_silent(run.status, now)) for run in runs if not run.status.over]
        gone = {name for name, agent in controller.agents.items() if agent.presence is Presence.GONE}
        rules = (controller.nodes, controller.automation.paused, controller.slurm_users)
        key = (slurm.nodes, rules, gone, hosts, active, frozenset(silent))
        if self._known is None or self._known[0] != key:
            self._known = key, assess_picture(slurm, controller, hosts, runs, silent, now)
        return self._known[1]


def assess_picture(
    slurm: SlurmPart,
    controller: ControllerPart,
    hosts: HostPart,
    runs: Sequence[RunPicture],
    silent: Collection[str],
    now: float,
) -> ClusterVerdict:
    """Return the verdict. `silent` names the sources that do not answer or cannot be read."""
    known = {info.name: info for info in slurm.nodes}
    unknown = [NodeInfo(name, NodeState.UNKNOWN) for name in controller.nodes if name not in known]
    status = ClusterStatus(
        "",
        "",
        ClusterPhase.UP,
        tuple(_node(info, controller) for info in (*slurm.nodes, *unknown)),
        (*hosts.dead, OBSERVER),
        jobs=None if SLURM in silent else (),
    )
    view = RecoveryView(controller.nodes, controller.automation.paused, controller.slurm_users)
    observed = tuple(ObservedRun(run.status, run.progress, is_silent(run.status, now)) for run in runs)
    scrapes = hosts.failing_scrapes
    return assess(Overview(status, None if CONTROLLER in silent else view, runs=observed, failing_scrapes=scrapes))


def _node(info: NodeInfo, controller: ControllerPart) -> NodeStatus:
    agent = controller.agents.get(info.name)
    gone = agent is not None and agent.presence is Presence.GONE
    return replace(node_status(info), off=True) if gone else node_status(info)
