"""The `NodePlan` of each role: what its bootstrap script adds to HyperPod's image. Pure."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import replace

from dalsegno.health.checks.cloud import cloud_text
from dalsegno.health.settings import FILE as HEALTH
from dalsegno.health.settings import settings_text
from dalsegno.setup.bootstrap import PYTHON
from dalsegno.setup.node_plan import NodePlan, PlannedFile, PlannedFolder, PlannedService
from dalsegno.spec.facts import Cluster, facts_to_json
from dalsegno.targets.cloud.agent_secrets import derive_command
from dalsegno.targets.cloud.monitoring import planned_service, with_monitoring
from dalsegno.targets.cloud.node_plans import HEAD_HOME, ManagedSlurm, compute_plan, head_plan, login_plan, prolog_text
from dalsegno.targets.cloud.refresh import REFRESH, refresh_script
from dalsegno.targets.cloud.shared_folders import shared_folders
from dalsegno.targets.folder import ClusterRole
from dalsegno.targets.hyperpod.answers import SlurmRole
from dalsegno.targets.hyperpod.folder import HyperPodStage, HyperPodState
from dalsegno.targets.hyperpod.partitions import PROLOG
from dalsegno.targets.hyperpod.requests import ENTRY, settings_of
from dalsegno.targets.hyperpod.training_plans import ends_command
from dalsegno.wire.cloud_notice import CLOUD_FILE, HYPERPOD


class HyperPodSlurm(ManagedSlurm):
    """A cluster on HyperPod, whose machines share no folder that only root can change.

    So the secret of a node's agent is derived from munge's key, which HyperPod puts on all machines. A node derives its
    secret when it is set up, and the controller derives it when the node appears in Slurm.

    `PartitionGuard` adds the prolog to slurm.conf. The setting is a glob that also matches `true`, a program of every
    system. On a new instance, slurmd can run before the lifecycle script has set up the instance. If the glob matched
    nothing then, slurmd would fail jobs and drain the node.
    """

    @property
    def shared(self) -> str:
        return f"{HEAD_HOME}/agents"


def site_of(cluster: Cluster, code: str, *, ending: bool = False) -> HyperPodSlurm:
    """Return the values that the plans of the machines are made from. Node names are known only when the nodes run.

    `ending` says that an instance group has a training plan whose end is known.
    """
    own = settings_of(cluster)
    state = HyperPodState(
        HyperPodStage.UP, own.region, own.bucket, own.prefix, controller_group=own.controller_group,
        login_group=own.login_group, role=ClusterRole.HEAD,
    )  # fmt: skip
    return HyperPodSlurm(
        cluster,
        f"hyperpod-{cluster.name}",
        code,
        json.dumps(facts_to_json(state), indent=1),
        nodes=(),
        cloud=cloud_text(cluster.health, cloud=HYPERPOD) if ending else "",
    )


def role_plan(
    cluster: Cluster,
    role: SlurmRole,
    code: str,
    public_key: str = "",
    monitored: bool = False,
    ends: Mapping[str, float] | None = None,
) -> NodePlan:
    """Return the plan of the instances of one role. `code` is the key of our code. The owner of `public_key` may log
    in. `ends` has the end of the training plan of each instance group."""
    if monitored:  # the controller reads in the cluster file whether its Prometheus runs
        cluster = replace(cluster, monitoring=replace(cluster.monitoring, prometheus=True))
    site = site_of(cluster, code, ending=bool(ends))
    plan = {SlurmRole.CONTROLLER: head_plan, SlurmRole.LOGIN: login_plan, SlurmRole.COMPUTE: compute_plan}[role](site)
    key = "/home/ubuntu/.ssh/authorized_keys"
    files = [PlannedFile(REFRESH, _refresh(cluster), 0o755)]
    if public_key:
        files.append(PlannedFile(key, f"{public_key}\n", 0o600, "ubuntu", "ubuntu", block=True))
    services, folders, commands = [], [], []
    if role is SlurmRole.COMPUTE:
        folders.append(PlannedFolder(site.shared, 0o700))
        commands.append(derive_command(cluster.name, site.shared))
        if ends:
            commands.append(ends_command(f"{site.etc}/{CLOUD_FILE}", cluster.health, ends))
        # The instances do not share /opt/slurm/etc, so each one gets a copy of the settings that the head has there.
        files.append(PlannedFile(f"{site.etc}/{HEALTH}", settings_text(cluster.health)))
        if cluster.health.mode != "off":
            files.append(PlannedFile(PROLOG, prolog_text(site), 0o755))
    if role is SlurmRole.CONTROLLER:
        services.append(_partition_guard(site))
        folders += shared_folders(cluster)
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
