"""Render the text of Slurm's files and the arguments of its commands from a cluster and its layout."""

from dalsegno.slurm.render.commands import accounting_commands, reservation_commands
from dalsegno.slurm.render.conf_files import (
    render_cgroup_conf,
    render_gres_conf,
    render_plugstack_conf,
    render_slurmdbd_conf,
    render_topology_conf,
)
from dalsegno.slurm.render.slurm_conf import SPARE_REASON, render_slurm_conf, restart_lines

__all__ = [
    "SPARE_REASON",
    "accounting_commands",
    "render_cgroup_conf",
    "render_gres_conf",
    "render_plugstack_conf",
    "render_slurm_conf",
    "render_slurmdbd_conf",
    "render_topology_conf",
    "reservation_commands",
    "restart_lines",
]
