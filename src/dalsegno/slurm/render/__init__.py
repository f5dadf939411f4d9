"""Pure renderers: facts and a layout in, the text of a file or the words of a command out."""

from dalsegno.slurm.render.accounting import accounting_commands
from dalsegno.slurm.render.cgroup_conf import render_cgroup_conf
from dalsegno.slurm.render.gres_conf import render_gres_conf
from dalsegno.slurm.render.node_lines import SPARE_REASON
from dalsegno.slurm.render.plugstack_conf import render_plugstack_conf
from dalsegno.slurm.render.reservations import reservation_commands
from dalsegno.slurm.render.slurm_conf import render_slurm_conf
from dalsegno.slurm.render.slurmdbd_conf import render_slurmdbd_conf
from dalsegno.slurm.render.topology_conf import render_topology_conf

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
]
