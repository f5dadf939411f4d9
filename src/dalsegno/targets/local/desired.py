"""All that a local cluster should hold, as values: its files and its hosts. Writing them is someone else's job."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

from dalsegno.health.settings import FILE as HEALTH
from dalsegno.health.settings import settings_text
from dalsegno.health.telemetry import telemetry_text
from dalsegno.slurm.render import (
    render_cgroup_conf,
    render_gres_conf,
    render_plugstack_conf,
    render_slurm_conf,
    render_slurmdbd_conf,
    render_topology_conf,
)
from dalsegno.slurm.versions import Version
from dalsegno.spec.facts import Cluster
from dalsegno.system.hosts import HostPlan, revision
from dalsegno.system.machine import Machine
from dalsegno.targets.local.folder import Folder
from dalsegno.targets.local.hostplans import host_plans
from dalsegno.targets.local.layout import slurm_layout
from dalsegno.targets.local.own_command import RESUME, own_command, resume_command
from dalsegno.targets.local.people import People, group_file, passwd_file
from dalsegno.targets.local.placement import LOOPBACK, Placement, host_names, outside_hosts
from dalsegno.targets.local.services import Services
from dalsegno.targets.local.telemetry import healthy_node

DATABASE_SQL = "CREATE DATABASE IF NOT EXISTS slurm_acct_db;\n"
# What `scontrol reconfigure` takes up; any other change of slurm.conf restarts slurmctld and slurmd, not jobs.
RECONFIGURED = re.compile(
    r"^(#|$|PartitionName|(Priority|Scheduler|Preempt)(?!Type)|Slurm(d|ctld)Timeout|MinJobAge|KillWait|MaxJobCount)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class File:
    """A file's text and rights. With a `stamp`, others may change it, and it is written anew only when what the stamp
    stands for has changed. `mounted`: hosts have it mounted, and mount it again when there is another one."""

    text: str
    mode: int = 0o644
    stamp: str = ""
    mounted: bool = False


@dataclass(frozen=True)
class Desired:
    """Files by their path below the state folder, and a plan for each host."""

    files: Mapping[str, File]
    hosts: Mapping[str, HostPlan]


def desired(cluster: Cluster, folder: Folder, placement: Placement, machine: Machine, people: People) -> Desired:
    """`people` are the machine's own, to whom a virtual host adds the cluster's users."""
    files = _slurm_files(cluster, folder, placement, machine)
    files |= _host_files(cluster, folder, placement, people, machine)
    structure = revision(machine.slurm_version, *sorted(_structure(files)))
    services = Services(cluster, folder, placement, machine, structure)
    plans = host_plans(cluster, folder, placement, machine, services)
    return Desired(files, {plan.name: plan for plan in plans})


def _slurm_files(cluster: Cluster, folder: Folder, placement: Placement, machine: Machine) -> dict[str, File]:
    version = Version.parse(machine.slurm_version)
    layout = slurm_layout(cluster, folder, placement, machine)
    files = {
        "etc/slurm.conf": File(render_slurm_conf(cluster, layout, version)),
        "etc/gres.conf": File(render_gres_conf(cluster, layout, version)),
        "etc/cgroup.conf": File(render_cgroup_conf(cluster, layout, version)),
        # Without containers too: one that lies beside slurm.conf is read, whether slurm.conf names it or not.
        "etc/plugstack.conf": File(render_plugstack_conf(cluster, layout, version)),
        f"etc/{HEALTH}": File(settings_text(cluster.health)),
    }
    if cluster.slurm.topology:
        files["etc/topology.conf"] = File(render_topology_conf(cluster, layout, version))
    if cluster.slurm.accounting:
        files["etc/slurmdbd.conf"] = File(render_slurmdbd_conf(cluster, layout, version), 0o600)
        files["etc/database.sql"] = File(DATABASE_SQL)
    return files


def _structure(files: Mapping[str, File]) -> list[str]:
    """The lines on which running daemons depend for good."""
    conf = [line for line in files["etc/slurm.conf"].text.splitlines() if not RECONFIGURED.match(line)]
    return [
        *conf,
        *(files[name].text for name in ("etc/gres.conf", "etc/cgroup.conf", "etc/topology.conf") if name in files),
    ]


def _host_files(
    cluster: Cluster, folder: Folder, placement: Placement, people: People, machine: Machine
) -> dict[str, File]:
    files = {
        f"hosts/{node.name}/telemetry.json": File(telemetry_text(told), stamp=told.stamp)
        for node in cluster.nodes
        if (told := healthy_node(node, placement.gpus_simulated))
    }
    files["bin/dalsegno"] = File(own_command(), 0o755)
    if cluster.containers.enabled:
        files[f"bin/{RESUME}"] = File(resume_command(), 0o755)
    if placement.gpus_simulated and any(node.gpus for node in cluster.nodes):
        stand_in = resources.files("dalsegno.targets.local.assets").joinpath("nvidia_smi.py").read_text()
        files["bin/nvidia-smi"] = File(stand_in, 0o755)
    if placement.hosts != LOOPBACK:
        files["etc/hosts"] = File(hosts_file(cluster, placement, machine), mounted=True)
        files["etc/passwd"] = File(passwd_file(people, cluster.users, placement.uids, str(folder.homes)), mounted=True)
        files["etc/group"] = File(group_file(people, cluster.users, placement.uids), mounted=True)
    return files


def hosts_file(cluster: Cluster, placement: Placement, machine: Machine) -> str:
    """The second line of each host is for programs that listen on both protocols, as torch's store does: they ask for
    the names of their callers in that form. Its name is another, so that who asks for a host gets its plain address."""
    names = [("127.0.0.1", "localhost"), *((placement.addresses[name], name) for name in host_names(cluster))]
    names += [(address, name) for name, address in outside_hosts(cluster, placement, machine.hostname).items()]
    lines = [line for at, name in names for line in (f"{at} {name}", f"::ffff:{at} {name}.ipv4")]
    return "\n".join(lines) + "\n"
