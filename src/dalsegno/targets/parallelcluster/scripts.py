"""The bootstrap scripts of a cluster on ParallelCluster, and their keys in its bucket. Pure."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Mapping
from dataclasses import replace

from dalsegno.health.checks.cloud import cloud_text
from dalsegno.setup.bootstrap import BootstrapCode, CodeSource, render_bootstrap
from dalsegno.setup.node_plan import NodePlan, PlannedFile
from dalsegno.spec.facts import Cluster
from dalsegno.targets.cloud.monitoring import with_monitoring
from dalsegno.targets.cloud.node_plans import ManagedSlurm, compute_plan, head_plan, login_plan
from dalsegno.targets.cloud.refresh import REFRESH, refresh_script
from dalsegno.targets.cloud.shared_folders import shared_folders
from dalsegno.targets.folder import ClusterRole
from dalsegno.targets.parallelcluster.config import as_named_there, script_uri
from dalsegno.targets.parallelcluster.folder import PclusterStage, PclusterState, state_text
from dalsegno.targets.parallelcluster.head import is_dynamic
from dalsegno.targets.parallelcluster.prerequisites import scripts_prefix

PROLOG = "/opt/slurm/etc/scripts/prolog.d/50_dalsegno"
# ParallelCluster writes the head's address to cfnconfig on every machine.
_HEAD_ADDRESS = '. /etc/parallelcluster/cfnconfig && printf %s "${cfn_head_node_private_ip:-}"'
_OWN_ADDRESS = "hostname -I | cut -d ' ' -f 1"


def archive_key(cluster: str, code: str) -> str:
    """Return the S3 key of the archive with our code. The key contains a hash of the code."""
    return f"{scripts_prefix(cluster)}dalsegno-{code}.tar.gz"


def bootstrap_scripts(
    cluster: Cluster, state: PclusterState, code_key: str, ends: Mapping[str, float] | None = None
) -> dict[str, bytes]:
    """Return the scripts of all machines, by S3 key.

    `ends` has, for each queue with a capacity block, the time when EC2 starts to take back the machines.
    """
    code = BootstrapCode(CodeSource.S3, uri=f"s3://{state.bucket}/{archive_key(cluster.name, code_key)}")
    site = site_of(cluster, state, code_key, ends)
    secret = f"{site.shared}/{site.nodes[0]}" if site.nodes else ""
    plans = machine_plans(site, state.bucket)
    scripts = {
        "head": render_bootstrap(plans["head"], code, _OWN_ADDRESS),
        "compute": render_bootstrap(plans["compute"], code, _HEAD_ADDRESS, wait_for=secret),
        "login": render_bootstrap(plans["login"], code, _HEAD_ADDRESS),
    }
    return {f"{scripts_prefix(cluster.name)}{name}.sh": text.encode() for name, text in scripts.items()}


def machine_plans(site: ManagedSlurm, bucket: str) -> dict[str, NodePlan]:
    """Return the plans of the head, of compute nodes and of login nodes."""
    head = head_plan(site)
    head = replace(head, folders=(*head.folders, *shared_folders(site.cluster)))
    plans = {"head": head, "compute": compute_plan(site), "login": login_plan(site)}
    if site.cluster.monitoring.prometheus:
        # Dynamic nodes are left out. While they are off, Prometheus would report them as dead hosts.
        always = [node for node in site.nodes if not is_dynamic(node)]
        plans = {name: with_monitoring(plan, site, head=name == "head", nodes=always) for name, plan in plans.items()}
    return {name: _with_refresh(plan, script_uri(site.cluster.name, bucket, name)) for name, plan in plans.items()}


def _with_refresh(plan: NodePlan, uri: str) -> NodePlan:
    fetch = f'aws s3 cp --only-show-errors {shlex.quote(uri)} "$work/bootstrap.sh"'
    return replace(plan, files=(*plan.files, PlannedFile(REFRESH, refresh_script(fetch, "bootstrap.sh"), 0o755)))


def site_of(cluster: Cluster, state: PclusterState, code: str, ends: Mapping[str, float] | None = None) -> ManagedSlurm:
    """Return the values that the plans of the machines are made from."""
    there = as_named_there(cluster)
    scratch = next((each.mount for each in cluster.storage if each.type == "scratch"), "")
    ends = ends or {}
    taken_at = {node: ends[each.name] for each in there.partitions if each.name in ends for node in each.nodes}
    nothing_of_ours = replace(state, key="", scripts="", stack="", file_systems={}, kept={})
    on_head = replace(nothing_of_ours, phase=PclusterStage.UP, role=ClusterRole.HEAD)
    return ManagedSlurm(
        there,
        state.cluster_id,
        code,
        state_text(on_head),
        tuple(node.name for node in there.nodes),
        prolog=PROLOG if cluster.health.mode != "off" else "",
        scratch=scratch,
        pyxis=bool(cluster.containers.enabled),
        cloud=cloud_text(cluster.health, taken_at),
        shared_homes=True,
    )


def digest_of(scripts: Mapping[str, bytes]) -> str:
    """Return a digest of the scripts. It changes with our code too, because the scripts name the code that they
    install."""
    contents = hashlib.sha256()
    for key in sorted(scripts):
        contents.update(key.encode() + b"\0" + scripts[key] + b"\0")
    return contents.hexdigest()[:16]
