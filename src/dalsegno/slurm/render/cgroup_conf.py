"""cgroup.conf: how Slurm tracks and holds processes."""

from __future__ import annotations

from dalsegno.slurm import versions
from dalsegno.slurm.layout import Layout
from dalsegno.slurm.render.lines import Settings, header, lines
from dalsegno.slurm.version import Version
from dalsegno.spec.facts import Cluster


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
