"""Slurm's view of a local cluster: the layout from which its files are rendered."""

from __future__ import annotations

from pathlib import Path

from dalsegno.containers.native import PLUGIN, build_key
from dalsegno.slurm import versions
from dalsegno.slurm.layout import Cgroups, Dbd, Host, Layout, NodePlace, Paths, Spank, Storage, Timeouts
from dalsegno.slurm.versions import Version
from dalsegno.spec.facts import Cluster
from dalsegno.spec.layout import UNSIZED_MIB
from dalsegno.system.cgroups import CgroupTree
from dalsegno.system.machine import Machine
from dalsegno.targets.local.folder import Folder
from dalsegno.targets.local.own_command import RESUME
from dalsegno.targets.local.placement import LOOPBACK, Placement, head_hosts, submit_hosts

CREDENTIAL_S = 30  # Slurm holds a requeued job back for as long as its old credential could still be used


def slurm_layout(cluster: Cluster, folder: Folder, placement: Placement, machine: Machine) -> Layout:
    """Daemons log to the standard error that their host writes to a file, so no log file is named here."""
    loopback = placement.hosts == LOOPBACK
    tracked = machine.cgroups.version > 0 and not loopback
    held = tuple(name for name, why_not in limits(cluster, placement, machine).items() if not why_not)
    heads = [machine.hostname] if loopback else head_hosts(cluster)
    user = versions.user_word(machine.user, Version.parse(machine.slurm_version))
    controllers = tuple(Host(name, placement.addresses.get(name, "127.0.0.1")) for name in heads)
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
        spank=container_plugin(cluster, folder, placement, machine) if cluster.containers.enabled else None,
        timeouts=Timeouts(message_s=30, min_job_age_s=300, credential_s=CREDENTIAL_S),
        submit_hosts=submit_hosts(cluster, placement, machine.hostname),
    )


def limits(cluster: Cluster, placement: Placement, machine: Machine) -> dict[str, str]:
    """Return what jobs could be held to, and for each why they are not; "" if they are.

    A size that the file does not name is only Slurm's bookkeeping: nobody chose to have jobs killed at that line. Each
    simulated GPU is the machine's /dev/null, which cannot be taken from anybody.
    """
    tree, nodes = machine.cgroups, cluster.nodes
    if placement.hosts == LOOPBACK or tree.version != 2:
        return dict.fromkeys(("cores", "memory", "devices"), "that takes virtual hosts and cgroup v2")
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
    return "" if controller in tree.controllers else f"cgroups here can have no controller `{controller}`"


def limits_sentence(cluster: Cluster, placement: Placement, machine: Machine) -> str:
    """Say what jobs are held to and what they are not, for `plan`."""
    told = limits(cluster, placement, machine)
    held = [name for name, why_not in told.items() if not why_not]
    not_held = [f"not to {name} ({why_not})" for name, why_not in told.items() if why_not]
    if not held and len(set(told.values())) == 1:
        return f"jobs are not held to cores, memory or devices: {told['cores']}"
    return f"jobs are held {', '.join([*(f'to their {name}' for name in held), *not_held])}"


def _cgroups(machine: Machine, tracked: bool, held: tuple[str, ...]) -> Cgroups:
    """Slurm's plugin for cgroup v2 needs folders that only root can make, even where nothing is tracked by them."""
    if not tracked:
        return Cgroups(plugin="none" if machine.cgroups.version != 1 else "")
    version = machine.cgroups.version
    return Cgroups(plugin=f"cgroup/v{version}", constrain=held, ignore_systemd=version == 2)


def container_plugin(cluster: Cluster, folder: Folder, placement: Placement, machine: Machine) -> Spank:
    """What containers keep is each node's own, in its host's folder; what had to be unpacked, all nodes share. Real
    GPUs are in /dev, which every container has; the simulated ones are shown beside it."""
    built = folder.native / build_key(machine.slurm_version)
    told = {
        "data": str(folder.host("%n") / "containers"),
        "cache": str(folder.unpacked),
        "import": str(folder.bin / "dalsegno"),
        "resume": str(folder.bin / RESUME),
        "images": jobs_images(cluster, folder),
        "show": str(folder.devices) if placement.gpus_simulated else "",
    }
    arguments = tuple(f"{name}={value}" for name, value in told.items() if value)
    return Spank(str(folder.etc / "plugstack.conf"), str(built / PLUGIN), arguments)


def images_folder(cluster: Cluster, folder: Folder) -> Path:
    """Where `up` imports to; if the file names none, where `dalsegno image` keeps them: they outlive the cluster."""
    return Path(cluster.containers.folder) if cluster.containers.folder else folder.root.parents[1] / "images"


def jobs_images(cluster: Cluster, folder: Folder) -> str:
    """Where jobs look for what they name, and import it to if they may; "": each user's own place."""
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


def _node_place(name: str, placement: Placement, machine: Machine, loopback: bool) -> NodePlace:
    return NodePlace(
        address=placement.addresses[name],
        hostname=machine.hostname if loopback else "",
        port=placement.ports.get(name, 0),
        gpu_files=tuple(placement.gpu_files.get(name, ())),
    )


def _dbd(head: Host, folder: Folder, placement: Placement) -> Dbd:
    storage = Storage(user="root", socket=str(folder.database_socket))
    return Dbd(head, storage, placement.ports.get("slurmdbd", 6819))
