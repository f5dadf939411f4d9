"""Render gres.conf, cgroup.conf, plugstack.conf, slurmdbd.conf and topology.conf."""

from __future__ import annotations

from dalsegno.errors import DalsegnoError
from dalsegno.hostlist import compress
from dalsegno.slurm import versions
from dalsegno.slurm.layout import DatabaseStorage, Dbd, Layout, Spank
from dalsegno.slurm.render.lines import Settings, header, line, lines
from dalsegno.slurm.versions import Version
from dalsegno.spec.facts import Cluster, Node, Switch

_DEVICES = {"gpu": "nvidia", "neuron": "neuron"}  # gres -> prefix of its device files


def render_gres_conf(cluster: Cluster, layout: Layout, slurm: Version) -> str:
    """Render gres.conf. Every GPU needs a device file, because Slurm ignores GPUs without one and drains the node."""
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
            hint="set `gpus:` of the partition to the GPUs of one node; `nvidia-smi -L` lists those of a machine",
        )
    for file in files:
        _refuse_unreadable(file)
    return files


def _refuse_unreadable(file: str) -> None:
    """Raise DalsegnoError if slurmd would misread a device path. slurmd parses it as a host list, even in quotes."""
    if any(letter.isspace() or letter in '[],"#' for letter in file):
        raise DalsegnoError(f"slurmd cannot read the GPU device file {file!r}", hint="use a path without blanks")


def _record(names: list[str], gres: str, kind: str, files: tuple[str, ...]) -> str:
    return line({"NodeName": compress(names), "Name": gres, "Type": kind, "File": _compressed_files(files)})


def _compressed_files(files: tuple[str, ...]) -> str:
    folder = files[0].rpartition("/")[0]
    if any(file.rpartition("/")[0] != folder for file in files):
        return ",".join(files)
    return f"{folder}/{compress(file.rpartition('/')[2] for file in files)}"


def render_cgroup_conf(cluster: Cluster, layout: Layout, slurm: Version) -> str:
    settings = {**_mounts(layout, slurm), **_systemd(layout, slurm), **_constraints(layout)}
    return header("cgroup.conf", cluster.name, layout.spec) + lines(settings)


def _mounts(layout: Layout, slurm: Version) -> Settings:
    return {
        "CgroupMountpoint": layout.cgroups.mountpoint,
        "CgroupPlugin": _plugin(layout.cgroups.plugin, slurm) if versions.CGROUP_PLUGIN.holds(slurm) else "",
        # Since 23.11, this key is an error. Mounting does not need the key, because the system mounts cgroups anyway.
        # But with cgroup v2 and IgnoreSystemd, 22.05 needs the key to enable controllers for child cgroups. Later
        # releases have EnableControllers.
        "CgroupAutomount": _automount(layout, slurm),
    }


def _plugin(plugin: str, slurm: Version) -> str:
    """Return the plugin's name. Releases before 24.05 do not know `disabled`; they get cgroup/v1, which does not touch
    cgroup v2."""
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


def render_plugstack_conf(cluster: Cluster, layout: Layout, slurm: Version) -> str:
    """Render plugstack.conf with Dal Segno's container plugin.

    The plugin is `required`, so that if it is missing or built for another Slurm, a job fails instead of running
    without its container.
    """
    line = f"{_words(layout.spank)}\n" if layout.spank else ""
    return header("plugstack.conf", cluster.name, layout.spec) + line


def _words(spank: Spank) -> str:
    words = ["required", spank.plugin, *spank.arguments]
    if bad := next((word for word in words if any(letter.isspace() for letter in word)), None):
        raise DalsegnoError(
            f"plugstack.conf does not allow blanks, as in {bad!r}",
            hint="set DALSEGNO_HOME to a folder without blanks, or leave `containers` out of the cluster file",
        )
    return " ".join(words)


def render_slurmdbd_conf(cluster: Cluster, layout: Layout, slurm: Version) -> str:
    """Render slurmdbd.conf. slurmdbd refuses the file unless it has mode 0600 and belongs to SlurmUser."""
    if layout.dbd is None:
        raise DalsegnoError(
            f"cluster {cluster.name} has no host for slurmdbd",
            hint="set `slurm: {accounting: false}` to run without; with accounting, the target must provide a host",
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
    """Return the storage settings.

    A socket has no setting of its own; `localhost` means the socket in MYSQL_UNIX_PORT.
    """
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


def render_topology_conf(cluster: Cluster, layout: Layout, slurm: Version) -> str:
    """Render topology.conf for topology/tree, which all releases read (25.05 adds topology.yaml)."""
    switches = "".join(f"{_switch(switch)}\n" for switch in cluster.slurm.topology)
    return header("topology.conf", cluster.name, layout.spec) + switches


def _switch(switch: Switch) -> str:
    nodes, below = compress(switch.nodes), compress(switch.switches)
    return line({"SwitchName": switch.name, "Nodes": nodes, "Switches": below})
