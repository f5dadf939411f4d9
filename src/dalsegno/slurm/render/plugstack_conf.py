"""plugstack.conf: the plugin through which srun, sbatch and salloc know --container-image and the like."""

from __future__ import annotations

from dalsegno.errors import DalsegnoError
from dalsegno.slurm.layout import Layout, Spank
from dalsegno.slurm.render.lines import header
from dalsegno.slurm.version import Version
from dalsegno.spec.facts import Cluster


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
