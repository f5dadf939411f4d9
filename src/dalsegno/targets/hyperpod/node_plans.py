"""The `NodePlan` of each role: what its bootstrap script adds to HyperPod's image. Pure."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace

from dalsegno.setup.bootstrap import HOST, PYTHON
from dalsegno.setup.node_plan import NodePlan, PlannedCommand, PlannedFile, PlannedFolder, PlannedService
from dalsegno.spec.facts import Cluster, facts_to_json
from dalsegno.targets.cloud.monitoring import planned_service, with_monitoring
from dalsegno.targets.cloud.node_plans import HEAD_HOME, ManagedSlurm, compute_plan, head_plan, login_plan
from dalsegno.targets.cloud.refresh import REFRESH, refresh_script
from dalsegno.targets.folder import ClusterRole
from dalsegno.targets.hyperpod.answers import SlurmRole
from dalsegno.targets.hyperpod.folder import HyperPodStage, HyperPodState
from dalsegno.targets.hyperpod.partitions import DERIVE, MUNGE_KEY
from dalsegno.targets.hyperpod.requests import ENTRY, settings_of


class HyperPodSlurm(ManagedSlurm):
    """HyperPod's Slurm, whose machines share no folder that only root can change.

    So the secret of a node's agent is derived from munge's key, which HyperPod gives all machines: on the node when it
    is set up, and on the controller when the node appears.
    """

    @property
    def shared(self) -> str:
        return f"{HEAD_HOME}/agents"


def site_of(cluster: Cluster, code: str) -> HyperPodSlurm:
    """Return the site of a cluster. The names of its nodes are known only once they run."""
    own = settings_of(cluster)
    state = HyperPodState(
        HyperPodStage.UP, own.region, own.bucket, own.prefix, controller_group=own.controller_group,
        login_group=own.login_group, role=ClusterRole.HEAD,
    )  # fmt: skip
    return HyperPodSlurm(
        cluster, f"hyperpod-{cluster.name}", code, json.dumps(facts_to_json(state), indent=1), nodes=()
    )


def role_plan(cluster: Cluster, role: SlurmRole, code: str, public_key: str = "", monitored: bool = False) -> NodePlan:
    """Return the plan of the instances of one role. `code` is the key of our code, `public_key` may log in."""
    site = site_of(cluster, code)
    plan = {SlurmRole.CONTROLLER: head_plan, SlurmRole.LOGIN: login_plan, SlurmRole.COMPUTE: compute_plan}[role](site)
    key = "/home/ubuntu/.ssh/authorized_keys"
    files = [PlannedFile(REFRESH, _refresh(cluster), 0o755)]
    if public_key:
        files.append(PlannedFile(key, f"{public_key}\n", 0o600, "ubuntu", "ubuntu", block=True))
    services, folders, commands = [], [], []
    if role is SlurmRole.COMPUTE:
        folders.append(PlannedFolder(site.shared, 0o700))
        argv = (PYTHON, "-I", "-c", DERIVE, MUNGE_KEY, cluster.name, HOST, f"{site.shared}/{HOST}")
        commands.append(PlannedCommand("deriving the secret of the node agent", argv, creates=f"{site.shared}/{HOST}"))
    if role is SlurmRole.CONTROLLER:
        services.append(_partition_guard(site))
    plan = replace(
        plan,
        folders=(*folders, *plan.folders),
        files=(*plan.files, *files),
        commands=(*plan.commands, *commands),
        services=(*plan.services, *services),
    )
    return with_monitoring(plan, site, head=role is SlurmRole.CONTROLLER) if monitored else plan


def _refresh(cluster: Cluster) -> str:
    uri = shlex.quote(settings_of(cluster).source_uri)
    return refresh_script(f'aws s3 cp --recursive --only-show-errors {uri} "$work"', ENTRY)


def _partition_guard(site: HyperPodSlurm) -> PlannedService:
    program = f"/opt/dalsegno/{site.code}/dalsegno/programs.py"
    argv = (PYTHON, "-I", program, "hyperpod-partitions", str(site.folder.root), "--secrets", site.shared)
    return planned_service("hyperpod-partitions", argv)
