"""gres.conf: which device files are a node's GPUs."""

from __future__ import annotations

from dalsegno.errors import DalsegnoError
from dalsegno.hostlist import compress
from dalsegno.slurm import versions
from dalsegno.slurm.layout import DatabaseStorage, Dbd, Layout, Spank
from dalsegno.slurm.render.lines import Settings, header, line, lines
from dalsegno.slurm.versions import Version
from dalsegno.spec.facts import Cluster, Node, Switch

_DEVICES = {"gpu": "nvidia", "neuron": "neuron"}  # what the kernel calls the devices of each kind


def render_gres_conf(cluster: Cluster, layout: Layout, slurm: Version) -> str:
    """gres.conf. Every GPU needs its file: Slurm drops GPUs that are only counted, and drains the node."""
    groups: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
    for node in cluster.nodes:
        if node.gpus:
            groups.setdefault((node.gres, node.gpu_type, _files(node, layout)), []).append(node.name)
    records = [_record(names, *shape) for shape, names in groups.items()]
    return header("gres.conf", cluster.name, layout.spec) + "".join(f"{record}\n" for record in records)


def _files(node: Node, layout: Layout) -> tuple[str, ...]:
    files = layout.place(node.name).gpu_files or tuple(
        f"/dev/{_DEVICES[node.gres]}{index}" for index in range(node.gpus)
    )
    if len(files) != node.gpus:
        raise DalsegnoError(
            f"node {node.name} has {node.gpus} GPUs but {len(files)} device files",
            hint="`gpus:` of its partition is what one node has; `nvidia-smi -L` shows those of a machine",
        )
    for file in files:
        _refuse_unreadable(file)
    return files


def _refuse_unreadable(file: str) -> None:
    """Of all of Slurm's paths only this one cannot hold blanks, even in quotes: slurmd reads it as a host list."""
    if any(letter.isspace() or letter in '[],"#' for letter in file):
        raise DalsegnoError(f"slurmd cannot read a GPU's device file called {file!r}", hint="use a path without blanks")


def _record(names: list[str], gres: str, kind: str, files: tuple[str, ...]) -> str:
    return line({"NodeName": compress(names), "Name": gres, "Type": kind, "File": _compressed_files(files)})


def _compressed_files(files: tuple[str, ...]) -> str:
    folder = files[0].rpartition("/")[0]
    if any(file.rpartition("/")[0] != folder for file in files):
        return ",".join(files)
    return f"{folder}/{compress(file.rpartition('/')[2] for file in files)}"


# ---- cgroup.conf: how Slurm tracks and holds processes.


def render_cgroup_conf(cluster: Cluster, layout: Layout, slurm: Version) -> str:
    settings = {**_mounts(layout, slurm), **_systemd(layout, slurm), **_constraints(layout)}
    return header("cgroup.conf", cluster.name, layout.spec) + lines(settings)


def _mounts(layout: Layout, slurm: Version) -> Settings:
    return {
        "CgroupMountpoint": layout.cgroups.mountpoint,
        "CgroupPlugin": _plugin(layout.cgroups.plugin, slurm) if versions.CGROUP_PLUGIN.holds(slurm) else "",
        # Gone in 23.11, where the setting is an error; the mounts are the system's business anyway. With cgroup v2 and
        # IgnoreSystemd, 22.05 passes controllers on only if it is set; later versions have EnableControllers.
        "CgroupAutomount": _automount(layout, slurm),
    }


def _plugin(plugin: str, slurm: Version) -> str:
    """Return the plugin's name. Before 24.05 Slurm cannot do without any; that for v1 leaves v2 alone until used."""
    if plugin != "none":
        return plugin
    return "disabled" if versions.CGROUP_DISABLED.holds(slurm) else "cgroup/v1"


def _automount(layout: Layout, slurm: Version) -> str:
    if not versions.CGROUP_AUTOMOUNT.holds(slurm):
        return ""
    v2 = layout.cgroups.plugin == "cgroup/v2" and layout.cgroups.ignore_systemd
    return "yes" if v2 and not versions.ENABLE_CONTROLLERS.holds(slurm) else "no"


def _systemd(layout: Layout, slurm: Version) -> Settings:
    ignore = layout.cgroups.ignore_systemd and versions.IGNORE_SYSTEMD.holds(slurm)
    enable = ignore and versions.ENABLE_CONTROLLERS.holds(slurm)
    return {"IgnoreSystemd": "yes" if ignore else "", "EnableControllers": "yes" if enable else ""}


def _constraints(layout: Layout) -> Settings:
    keys = {"cores": "ConstrainCores", "memory": "ConstrainRAMSpace", "devices": "ConstrainDevices"}
    return {key: "yes" if name in layout.cgroups.constrain else "no" for name, key in keys.items()}


# ---- plugstack.conf: the plugin through which srun, sbatch and salloc know --container-image and the like.


def render_plugstack_conf(cluster: Cluster, layout: Layout, slurm: Version) -> str:
    """`required`: a plugin that is missing or of another Slurm ends the job, instead of running it on the bare node."""
    line = f"{_words(layout.spank)}\n" if layout.spank else ""
    return header("plugstack.conf", cluster.name, layout.spec) + line


def _words(spank: Spank) -> str:
    words = ["required", spank.plugin, *spank.arguments]
    if bad := next((word for word in words if any(letter.isspace() for letter in word)), None):
        raise DalsegnoError(
            f"plugstack.conf cannot hold a blank, and this has one: {bad!r}",
            hint="set DALSEGNO_HOME to a folder without blanks, or leave `containers` out of the cluster file",
        )
    return " ".join(words)


# ---- slurmdbd.conf: the accounting daemon. Write it 0600 and owned by SlurmUser, or slurmdbd refuses it.


def render_slurmdbd_conf(cluster: Cluster, layout: Layout, slurm: Version) -> str:
    if layout.dbd is None:
        raise DalsegnoError(
            f"cluster {cluster.name} has no place for slurmdbd",
            hint="`slurm: {accounting: false}` does without; with accounting the target must say where it runs",
        )
    settings = {**_daemon(layout, layout.dbd), **_storage(layout.dbd.storage)}
    return header("slurmdbd.conf", cluster.name, layout.spec) + lines(settings)


def _daemon(layout: Layout, dbd: Dbd) -> Settings:
    socket = layout.paths.munge_socket
    return {
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={socket}" if socket else "",
        "DbdHost": dbd.host.name,
        "DbdAddr": dbd.host.address,
        "DbdPort": str(dbd.port),
        "SlurmUser": layout.slurm_user,
        "LogFile": layout.paths.slurmdbd_log,
        "PidFile": layout.paths.slurmdbd_pid,
    }


def _storage(storage: DatabaseStorage) -> Settings:
    """slurmdbd.conf has no setting for a socket: `localhost` means "through a socket", MYSQL_UNIX_PORT says which."""
    where = {"StorageHost": "localhost"} if storage.socket else _over_tcp(storage)
    return {
        "StorageType": "accounting_storage/mysql",
        **where,
        "StorageUser": storage.user,
        "StoragePass": storage.password,
        "StorageLoc": storage.database,
    }


def _over_tcp(storage: DatabaseStorage) -> Settings:
    return {"StorageHost": storage.host, "StoragePort": str(storage.port)}


# ---- topology.conf: which nodes hang under which switch.


def render_topology_conf(cluster: Cluster, layout: Layout, slurm: Version) -> str:
    """topology.conf for topology/tree, which every Slurm up to now reads (topology.yaml of 25.05 is another way)."""
    switches = "".join(f"{_switch(switch)}\n" for switch in cluster.slurm.topology)
    return header("topology.conf", cluster.name, layout.spec) + switches


def _switch(switch: Switch) -> str:
    nodes, below = compress(switch.nodes), compress(switch.switches)
    return line({"SwitchName": switch.name, "Nodes": nodes, "Switches": below})
