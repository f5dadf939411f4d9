"""Compute the files and hosts that a local cluster should have. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path

from dalsegno.containers.native import PLUGIN, build_key
from dalsegno.health.checks.cloud import cloud_text
from dalsegno.health.settings import FILE as HEALTH
from dalsegno.health.settings import settings_text
from dalsegno.health.telemetry import telemetry_text
from dalsegno.slurm import versions
from dalsegno.slurm.layout import Cgroups, DaemonHost, DatabaseStorage, Dbd, Layout, NodePlace, Paths, Spank, Timeouts
from dalsegno.slurm.render import (
    render_cgroup_conf,
    render_gres_conf,
    render_plugstack_conf,
    render_slurm_conf,
    render_slurmdbd_conf,
    render_topology_conf,
    restart_lines,
)
from dalsegno.slurm.versions import Version
from dalsegno.spec.facts import Cluster
from dalsegno.spec.layout import UNSIZED_MIB
from dalsegno.system.cgroups import CgroupTree
from dalsegno.system.hosts import HostPlan, Service, revision
from dalsegno.system.machine import MachineFacts
from dalsegno.targets.accounting import DATABASE_SQL
from dalsegno.targets.local.daemons import Services
from dalsegno.targets.local.directory import directory_files
from dalsegno.targets.local.folder import Folder
from dalsegno.targets.local.people import group_file, passwd_file
from dalsegno.targets.local.placement import (
    BACKUP,
    LOOPBACK,
    REST,
    ROOM,
    SWITCH,
    Placement,
    head_hosts,
    healthy_node,
    host_names,
    outside_hosts,
    submit_hosts,
)
from dalsegno.targets.local.shell import RESUME, own_command, resume_command
from dalsegno.targets.local.storage import (
    homes_inside,
    node_binds,
    program_files,
    shared_binds,
    shown_in_containers,
    slurm_programs,
    without_own_programs,
)
from dalsegno.users.accounts import AccountSet, cluster_accounts
from dalsegno.users.checks import People
from dalsegno.wire.cloud_notice import CLOUD_FILE

CREDENTIAL_S = 30  # lifetime of job credentials; short, because Slurm delays a requeued job until the old one expires


def slurm_layout(cluster: Cluster, folder: Folder, placement: Placement, machine: MachineFacts) -> Layout:
    """Return the paths, addresses and settings of this machine that Slurm's files are rendered from.

    Daemons log to stderr, which their host writes to a file.
    """
    loopback = placement.hosts == LOOPBACK
    tracked = machine.cgroups.version > 0 and not loopback
    held = tuple(name for name, why_not in limits(cluster, placement, machine).items() if not why_not)
    heads = [machine.hostname] if loopback else head_hosts(cluster)
    user = versions.user_word(machine.user, Version.parse(machine.slurm_version))
    controllers = tuple(DaemonHost(name, placement.addresses.get(name, "127.0.0.1")) for name in heads)
    return Layout(
        paths=slurm_paths(folder),
        controllers=controllers,
        places={node.name: _node_place(node.name, placement, machine, loopback) for node in cluster.nodes},
        dbd=_dbd(controllers[0], folder, placement) if cluster.slurm.accounting else None,
        spec=f"{cluster.name}'s cluster file",
        slurm_user=user,
        slurmd_user=user,
        slurmctld_port=placement.ports.get("slurmctld", 6817),
        proctrack="cgroup" if tracked else "linuxproc",
        task_plugin="task/cgroup" if held else "task/none",
        cgroups=_cgroups(machine, tracked, held),
        overrides=True,
        programs=slurm_programs(cluster, folder, placement),
        spank=container_plugin(cluster, folder, placement, machine) if cluster.containers.enabled else None,
        timeouts=Timeouts(message_s=30, min_job_age_s=300, credential_s=CREDENTIAL_S),
        submit_hosts=submit_hosts(cluster, placement, machine.hostname),
    )


def limits(cluster: Cluster, placement: Placement, machine: MachineFacts) -> dict[str, str]:
    """Return, for each resource, the reason why Slurm does not limit jobs to their share; "" if it limits them.

    A size that the cluster file does not set is not enforced, because users did not ask to have jobs killed at that
    size. Every simulated GPU is the machine's /dev/null, and nobody can be denied access to that.
    """
    tree, nodes = machine.cgroups, cluster.nodes
    if placement.hosts == LOOPBACK or tree.version != 2:
        return dict.fromkeys(("cores", "memory", "devices"), "this needs virtual hosts and cgroup v2")
    named = all(node.memory_mib != UNSIZED_MIB for node in nodes)
    unnamed = "" if named else "the file does not name the nodes' `memory`"
    claimed = sum(node.cpus for node in nodes)
    too_few = f"the nodes have {claimed} CPUs together, this machine has {machine.cores}"
    several = "the nodes share this machine's cores" if len(nodes) > 1 else ""
    return {
        "cores": _lacking("cpuset", tree) or unnamed or (too_few if claimed > machine.cores else several),
        "memory": _lacking("memory", tree) or unnamed,
        "devices": "" if not placement.gpus_simulated else "there are no real GPUs",
    }


def _lacking(controller: str, tree: CgroupTree) -> str:
    return "" if controller in tree.controllers else f"cgroups on this machine have no controller `{controller}`"


def limits_sentence(cluster: Cluster, placement: Placement, machine: MachineFacts) -> str:
    """Return the sentence about limits on jobs that `dalsegno plan` shows."""
    reasons = limits(cluster, placement, machine)
    held = [name for name, why_not in reasons.items() if not why_not]
    not_held = [f"not to {name} ({why_not})" for name, why_not in reasons.items() if why_not]
    if not held and len(set(reasons.values())) == 1:
        return f"jobs are not limited to cores, memory or devices: {reasons['cores']}"
    return f"jobs are limited {', '.join([*(f'to their {name}' for name in held), *not_held])}"


def _cgroups(machine: MachineFacts, tracked: bool, held: tuple[str, ...]) -> Cgroups:
    """Return the settings of cgroup.conf.

    If processes are not tracked, Slurm's cgroup plugin is switched off, because its version for cgroup v2 needs folders
    that only root can create. On a machine with cgroup v1, Slurm chooses the plugin.
    """
    if not tracked:
        return Cgroups(plugin="none" if machine.cgroups.version != 1 else "")
    version = machine.cgroups.version
    return Cgroups(plugin=f"cgroup/v{version}", constrain=held, ignore_systemd=version == 2)


def container_plugin(cluster: Cluster, folder: Folder, placement: Placement, machine: MachineFacts) -> Spank:
    """Return the settings of the container plugin.

    Each node has its own folder for containers, and all nodes share unpacked images. Simulated GPUs are mounted into
    containers. Real GPUs need no mount, because every container has /dev.
    """
    built = folder.native / build_key(machine.slurm_version)
    settings = {
        "data": str(folder.host("%n") / "containers"),
        "cache": str(folder.unpacked),
        "import": str(folder.bin / "dalsegno"),
        "resume": str(folder.bin / RESUME),
        "images": jobs_images(cluster, folder),
        "show": str(folder.devices) if placement.gpus_simulated else "",
    }
    shown = tuple(f"show={path}" for path in shown_in_containers(cluster, folder, placement))
    arguments = (*(f"{name}={value}" for name, value in settings.items() if value), *shown)
    return Spank(str(folder.etc / "plugstack.conf"), str(built / PLUGIN), arguments)


def images_folder(cluster: Cluster, folder: Folder) -> Path:
    """Return the folder that `up` imports images to: the one in the cluster file, or else the folder of `dalsegno
    image`, which outlives the cluster."""
    return Path(cluster.containers.folder) if cluster.containers.folder else folder.root.parents[1] / "images"


def jobs_images(cluster: Cluster, folder: Folder) -> str:
    """Return the folder where jobs find images by name; "" if containers are off or each user has their own folder.

    Jobs also import images into this folder, if their user may write to it.
    """
    listed = cluster.containers.images or cluster.containers.folder
    return str(images_folder(cluster, folder)) if cluster.containers.enabled and listed else ""


def slurm_paths(folder: Folder) -> Paths:
    return Paths(
        state_save_dir=str(folder.slurmctld_state),
        slurmctld_log="",
        slurmctld_pid=str(folder.pids / "slurmctld.pid"),
        slurmd_spool_dir=str(folder.root / "hosts/%n/spool"),
        tmp_dir=str(folder.root / "hosts/%n/spool"),
        slurmd_log="",
        slurmd_pid=str(folder.root / "hosts/%n/slurmd.pid"),
        slurmdbd_log="",
        slurmdbd_pid=str(folder.pids / "slurmdbd.pid"),
        munge_socket=str(folder.munge_socket),
    )


def _node_place(name: str, placement: Placement, machine: MachineFacts, loopback: bool) -> NodePlace:
    return NodePlace(
        address=placement.addresses[name],
        hostname=machine.hostname if loopback else "",
        port=placement.ports.get(name, 0),
        gpu_files=tuple(placement.gpu_files.get(name, ())),
    )


def _dbd(head: DaemonHost, folder: Folder, placement: Placement) -> Dbd:
    storage = DatabaseStorage(user="root", socket=str(folder.database_socket))
    return Dbd(head, storage, placement.ports.get("slurmdbd", 6819))


DISK_MIB = 64  # size of a virtual host's disk, which stores only the scripts and credentials of jobs


def host_plans(
    cluster: Cluster, folder: Folder, placement: Placement, machine: MachineFacts, services: Services
) -> list[HostPlan]:
    """Return the plan of each host. On loopback ports, one host runs the daemons of the head and of all nodes.

    Otherwise there are the switch and a virtual host for each head, login node and compute node. In both cases,
    slurmrestd and the machine room run on hosts of their own, which are not virtual.
    """
    plans = _host_plans(cluster, folder, placement, machine, services)
    return [_with_cgroups(plan, folder, machine, {node.name for node in cluster.nodes}) for plan in plans]


def _with_cgroups(plan: HostPlan, folder: Folder, machine: MachineFacts, nodes: Collection[str]) -> HostPlan:
    """Return a host's plan with its cgroups.

    With cgroup v2 there is one hierarchy, and every host has a folder in it. With v1, compute hosts have a folder in
    the freezer hierarchy, because Slurm needs only that one to track processes. Without root there are no cgroups,
    because only root may create their folders and systemd's system scopes.
    """
    tree = machine.cgroups
    if not machine.is_root:
        return plan
    place = tree.place(folder.id)
    in_unit = replace(plan, unit=place.unit, unit_folders=place.unit_folders)
    if place.base and (tree.version == 2 or (plan.isolate and plan.name in nodes)):
        return replace(in_unit, cgroups={tree.root: f"{place.base}/{plan.name}"}, unified=tree.version == 2)
    return in_unit


def _host_plans(
    cluster: Cluster, folder: Folder, placement: Placement, machine: MachineFacts, services: Services
) -> list[HostPlan]:
    rest = [_plain(folder, REST, isolate=False, services=[services.slurmrestd(REST)])] if cluster.slurm.rest else []
    room = _plain(folder, ROOM, isolate=False, services=[services.machine_room()])
    if placement.hosts == LOOPBACK:
        own = [service for node in cluster.nodes for service in services.compute(node.name, cluster.head)]
        return [_plain(folder, cluster.head, isolate=False, services=[*services.head(), *own]), *rest, room]
    virtual = _Virtual(folder, placement, cluster)
    backup = [virtual.head(BACKUP, [services.slurmctld(BACKUP)])] if cluster.slurm.backup_controller else []
    return [
        _plain(folder, SWITCH, isolate=True),
        virtual.head(cluster.head, services.head()),
        *backup,
        *rest,
        room,
        *(virtual.host(name) for name in cluster.logins),
        *(virtual.compute(node.name, services.compute(node.name, node.name)) for node in cluster.nodes),
    ]


def _plain(folder: Folder, name: str, *, isolate: bool, services: Sequence[Service] = ()) -> HostPlan:
    path = folder.host(name)
    return HostPlan(name, str(path), str(path / "init.log"), isolate, services=tuple(services))


@dataclass(frozen=True)
class _Virtual:
    folder: Folder
    placement: Placement
    cluster: Cluster

    def host(self, name: str, services: Sequence[Service] = ()) -> HostPlan:
        bits = self.placement.subnet.partition("/")[2]
        binds = tuple((str(self.folder.etc / file), f"/etc/{file}") for file in ("hosts", "passwd", "group"))
        plain = _plain(self.folder, name, isolate=True, services=services)
        binds += shared_binds(self.cluster, self.folder)
        return replace(plain, address=f"{self.placement.addresses[name]}/{bits}", binds=binds)

    def head(self, name: str, services: Sequence[Service]) -> HostPlan:
        """Return the plan of a head host. Each head host mounts its own folder of pid files, because slurm.conf has one
        path for all of them."""
        host = self.host(name, services)
        return replace(host, binds=(*host.binds, (str(self.folder.host(name) / "pid"), str(self.folder.pids))))

    def compute(self, name: str, services: Sequence[Service]) -> HostPlan:
        host = self.host(name, services)
        binds = (*host.binds, *node_binds(self.cluster, self.folder, name))
        return replace(host, binds=binds, disks={str(self.folder.spool(name)): DISK_MIB})


@dataclass(frozen=True)
class File:
    """A file's text and mode. If `stamp` is set, other programs may change the file, and `up` rewrites it only when it
    no longer contains the stamp. If `mounted` is set, hosts mount the file, and mount it again after `up` has written
    it."""

    text: str
    mode: int = 0o644
    stamp: str = ""
    mounted: bool = False


@dataclass(frozen=True)
class Desired:
    """The desired state: files by their path in the state folder, a plan for each host, and the accounts."""

    files: Mapping[str, File]
    hosts: Mapping[str, HostPlan]
    accounts: AccountSet = field(default_factory=AccountSet)


def desired(
    cluster: Cluster,
    folder: Folder,
    placement: Placement,
    machine: MachineFacts,
    people: People,
    log_level: str = "",
) -> Desired:
    """Return the desired state of the cluster. `people` are the machine's users. Virtual hosts have these users and
    those of the cluster."""
    files = _slurm_files(cluster, folder, placement, machine)
    homes = homes_inside(cluster, folder, placement)
    accounts = cluster_accounts(cluster, people, placement.uids, placement.gids, homes)
    files |= _host_files(cluster, folder, placement, people, accounts, machine)
    structure = revision(machine.slurm_version, *sorted(_structure(files)))
    services = Services(cluster, folder, placement, machine, structure, log_level)
    if services.monitor:
        files |= {f"monitor/{name}": File(text, 0o600) for name, text in services.monitor.files.items()}
    if cluster.directory.ldap:
        files |= {f"ldap/{name}": File(text) for name, text in directory_files(cluster, folder).items()}
    plans = host_plans(cluster, folder, placement, machine, services)
    return Desired(files, {plan.name: plan for plan in plans}, accounts)


def _slurm_files(cluster: Cluster, folder: Folder, placement: Placement, machine: MachineFacts) -> dict[str, File]:
    version = Version.parse(machine.slurm_version)
    layout = slurm_layout(cluster, folder, placement, machine)
    files = {
        "etc/slurm.conf": File(render_slurm_conf(without_own_programs(cluster, placement), layout, version)),
        "etc/gres.conf": File(render_gres_conf(cluster, layout, version)),
        "etc/cgroup.conf": File(render_cgroup_conf(cluster, layout, version)),
        # Without containers, this file is empty. It replaces the one of an earlier `up` with containers, which Slurm
        # would still read.
        "etc/plugstack.conf": File(render_plugstack_conf(cluster, layout, version)),
        f"etc/{HEALTH}": File(settings_text(cluster.health)),
    }
    if cluster.local.cloud != "none":
        files[f"etc/{CLOUD_FILE}"] = File(cloud_text(cluster.health, cloud=cluster.local.cloud))
    if cluster.slurm.topology:
        files["etc/topology.conf"] = File(render_topology_conf(cluster, layout, version))
    if cluster.slurm.accounting:
        files["etc/slurmdbd.conf"] = File(render_slurmdbd_conf(cluster, layout, version), 0o600)
        files["etc/database.sql"] = File(DATABASE_SQL)
    return files


def _structure(files: Mapping[str, File]) -> list[str]:
    """Return the settings that need a restart of running daemons when they change."""
    return [
        *restart_lines(files["etc/slurm.conf"].text),
        *(files[name].text for name in ("etc/gres.conf", "etc/cgroup.conf", "etc/topology.conf") if name in files),
    ]


def _host_files(
    cluster: Cluster,
    folder: Folder,
    placement: Placement,
    people: People,
    accounts: AccountSet,
    machine: MachineFacts,
) -> dict[str, File]:
    files = {
        f"hosts/{node.name}/telemetry.json": File(telemetry_text(telemetry), stamp=telemetry.stamp)
        for node in cluster.nodes
        if (telemetry := healthy_node(node, placement.gpus_simulated))
    }
    files["bin/dalsegno"] = File(own_command(), 0o755)
    files |= {name: File(text, 0o755) for name, text in program_files(cluster, folder, placement).items()}
    if cluster.containers.enabled:
        files[f"bin/{RESUME}"] = File(resume_command(), 0o755)
    if placement.gpus_simulated and any(node.gpus for node in cluster.nodes):
        stand_in = resources.files("dalsegno.targets.local").joinpath("nvidia_smi.py").read_text()
        files["bin/nvidia-smi"] = File(stand_in, 0o755)
    if placement.hosts != LOOPBACK:
        files["etc/hosts"] = File(hosts_file(cluster, placement, machine), mounted=True)
        files["etc/passwd"] = File(passwd_file(people, accounts), mounted=True)
        files["etc/group"] = File(group_file(people, cluster.users, accounts), mounted=True)
    return files


def hosts_file(cluster: Cluster, placement: Placement, machine: MachineFacts) -> str:
    """Return /etc/hosts. Each host has a second line with the IPv6 form of its address. Programs that listen on both
    IPv4 and IPv6, such as torch's store, look up callers by this form. The second line has another name, so that the
    host's own name resolves only to its IPv4 address."""
    names = [("127.0.0.1", "localhost"), *((placement.addresses[name], name) for name in host_names(cluster))]
    names += [(address, name) for name, address in outside_hosts(cluster, placement, machine.hostname).items()]
    lines = [line for at, name in names for line in (f"{at} {name}", f"::ffff:{at} {name}.ipv4")]
    return "\n".join(lines) + "\n"
