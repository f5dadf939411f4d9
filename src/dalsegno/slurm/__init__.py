"""Slurm's files, answers and commands: render, parse, ask."""

from dalsegno.slurm.hostlist import HostlistError, compress, expand
from dalsegno.slurm.layout import Cgroups, Dbd, Host, Layout, NodePlace, Paths, Programs, Storage, Timeouts
from dalsegno.slurm.render import (
    SPARE_REASON,
    render_cgroup_conf,
    render_gres_conf,
    render_slurm_conf,
    render_slurmdbd_conf,
    render_topology_conf,
)
from dalsegno.slurm.version import Version

__all__ = [
    "SPARE_REASON",
    "Cgroups",
    "Dbd",
    "Host",
    "HostlistError",
    "Layout",
    "NodePlace",
    "Paths",
    "Programs",
    "Storage",
    "Timeouts",
    "Version",
    "compress",
    "expand",
    "render_cgroup_conf",
    "render_gres_conf",
    "render_slurm_conf",
    "render_slurmdbd_conf",
    "render_topology_conf",
]
