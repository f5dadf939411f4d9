"""Container jobs on ssh hosts: our plugin, which each host compiles for its own Slurm. Pure.

If `containers` is not set, nothing is written, so that an installed Pyxis stays in use.
"""

from __future__ import annotations

from collections.abc import Sequence
from shlex import join

from dalsegno.containers.native import PLUGIN, build_key
from dalsegno.setup.node_plan import HostParts, PlannedCommand, PlannedFile, PlannedFolder
from dalsegno.slurm.layout import Spank
from dalsegno.spec.facts import Cluster
from dalsegno.storage.scratch import TASK_PROLOG, scratch_of

FOLDER = "/usr/local/lib/dalsegno"
DATA, UNPACKED = "/var/lib/dalsegno/containers", "/var/lib/dalsegno/unpacked"
RESUME = f"{FOLDER}/dalsegno-resume"
PACKAGES = {  # whether the host is of the Debian family -> packages to compile and run the plugin
    True: ("gcc", "libc6-dev", "libslurm-dev", "squashfs-tools"),
    False: ("gcc", "glibc-devel", "slurm-devel", "squashfs-tools"),
}


def container_plugin(cluster: Cluster, slurm_version: str, etc: str) -> Spank:
    """Return the settings of the plugin. Images are found in the folder that the cluster file names, which all hosts
    must see; otherwise each user has a folder of their own."""
    scratch = scratch_of(cluster)
    shown = (f"show={scratch.mount}", f"show={etc}/{TASK_PROLOG}") if scratch else ()
    images = (f"images={cluster.containers.folder}",) if cluster.containers.folder else ()
    told = (f"data={DATA}", f"cache={UNPACKED}", "import=/usr/local/bin/dalsegno", f"resume={RESUME}")
    return Spank(f"{etc}/plugstack.conf", f"{FOLDER}/native/{build_key(slurm_version)}/{PLUGIN}", told + images + shown)


def container_parts(slurm_version: str, *, debian: bool, launcher: Sequence[str]) -> HostParts:
    """Return what a host needs for container jobs. Hosts without slurmd need it for the options of srun."""
    plugin = f"{FOLDER}/native/{build_key(slurm_version)}/{PLUGIN}"
    resume = f'#!/bin/sh\nexec {join([*launcher, "step-again"])} "$@"\n'
    compile_plugin = (*launcher, "container-plugin", FOLDER, slurm_version)
    return HostParts(
        PACKAGES[debian],
        tuple(PlannedFolder(path) for path in (FOLDER, DATA, UNPACKED)),
        (PlannedFile(RESUME, resume, 0o755),),
        (PlannedCommand("compiling the container plugin", compile_plugin, creates=plugin),),
    )
