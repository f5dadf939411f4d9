"""What Slurm starts on ssh hosts: the health check, prolog and epilog of jobs, and the container plugin. Pure.

slurm.conf always names the health check and the prolog, and `health:` in the cluster file decides what they do. So a
change to `health:` needs no restart of Slurm, and Slurm never starts a program that has been removed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from shlex import join

from dalsegno.containers.native import DATA, HOST_FOLDER, PLUGIN, UNPACKED, build_key
from dalsegno.containers.plugstack.facts import PluginKind
from dalsegno.errors import DalsegnoError, TargetError
from dalsegno.health.slurm_programs import HEALTH_CHECK, may_act, prolog_lines, render_health_check
from dalsegno.setup.inspect import HostFacts
from dalsegno.setup.node_plan import HostParts, PlannedCommand, PlannedFile, PlannedFolder
from dalsegno.slurm.layout import Programs, Spank
from dalsegno.spec.facts import Cluster
from dalsegno.storage.scratch import EPILOG, PROLOG, SETTINGS, TASK_PROLOG, job_scripts, scratch_of, without_programs
from dalsegno.targets.sides import COMMAND
from dalsegno.targets.ssh.services import AGENTS_PORT

OBSERVED = "# The node is not checked, because `health:` in the cluster file permits no action on it.\n"


def slurm_programs(cluster: Cluster, etc: str) -> Programs:
    """Return the programs that slurm.conf names. `etc` is the folder of Slurm's files."""
    scratch = scratch_of(cluster) is not None
    return Programs(
        prolog=f"{etc}/{PROLOG}",
        epilog=f"{etc}/{EPILOG}" if scratch else "",
        task_prolog=f"{etc}/{TASK_PROLOG}" if scratch else "",
        health_check=f"{etc}/{HEALTH_CHECK}",
        contain=cluster.ssh.logins_need_job,
    )


def program_parts(cluster: Cluster, node: str, etc: str, launcher: Sequence[str]) -> HostParts:
    """Return the programs of one node. `launcher` starts our helper programs there."""
    check = prolog_lines(COMMAND) if may_act(cluster, node) else OBSERVED
    texts = {
        **job_scripts(cluster, launcher, check=check),
        HEALTH_CHECK: render_health_check(cluster, node, COMMAND, AGENTS_PORT),
    }
    return HostParts(files=tuple(PlannedFile(f"{etc}/{name}", text, 0o755) for name, text in texts.items()))


def without_own_programs(cluster: Cluster) -> Cluster:
    """Return the cluster without those raw Slurm settings that name programs, such as `Prolog`.

    Slurm starts our programs instead, and our programs then start those that the settings named.
    """
    scripts = tuple(SETTINGS) if scratch_of(cluster) else (PROLOG,)
    return replace(cluster, slurm=replace(cluster.slurm, extra=without_programs(cluster.slurm.extra, scripts)))


# The container plugin. Each host compiles it for its own Slurm. It is installed only if the cluster file has
# `containers` and the head's Slurm does not load Pyxis. If the head's Slurm loads Pyxis, jobs use Pyxis.
PYXIS = PluginKind.PYXIS.value
RESUME = f"{HOST_FOLDER}/dalsegno-resume"
PACKAGES = {  # whether the host is of the Debian family -> packages that compile and run the plugin
    True: ("gcc", "libc6-dev", "libslurm-dev", "squashfs-tools"),
    False: ("gcc", "glibc-devel", "slurm-devel", "squashfs-tools"),
}


def uses_pyxis(cluster: Cluster, facts: Mapping[str, HostFacts]) -> bool:
    """Return whether container jobs use the Pyxis that is installed, as the head's plugstack.conf decides."""
    return bool(cluster.containers.enabled and cluster.head in facts and facts[cluster.head].pyxis)


def check_containers(cluster: Cluster, facts: Mapping[str, HostFacts]) -> dict[str, DalsegnoError]:
    """Return the hosts that do not fit the head's container plugin. Our plugin and Pyxis do not accept each other's
    options, and Slurm does not report a plugin that is missing on a node: the job would run without its container."""
    if not cluster.containers.enabled or cluster.head not in facts:
        return {}
    faults: dict[str, DalsegnoError] = {}
    wanted = uses_pyxis(cluster, facts)
    nodes = {node.name for node in cluster.nodes}
    for host, each in facts.items():
        if wanted and not each.pyxis:
            faults[host] = TargetError(f"{host}: its Slurm does not load Pyxis, and the head's does", hint=_SAME)
        elif each.pyxis and not wanted:
            faults[host] = TargetError(f"{host}: its Slurm loads Pyxis, and the head's does not", hint=_SAME)
        elif wanted and host in nodes and not each.enroot:
            faults[host] = TargetError(
                f"{host}: Enroot, which Pyxis needs, is not installed",
                hint="install Enroot there, as on the other nodes",
            )
    return faults


_SAME = (
    f"name {PYXIS} in /etc/slurm/plugstack.conf on all hosts, or on none: then Dal Segno's plugin is installed; "
    "or leave `containers` out of the cluster file"
)


def container_plugin(cluster: Cluster, slurm_version: str, etc: str) -> Spank:
    """Return the settings of the plugin. If the cluster file names a folder of images, all hosts must see that folder.
    Otherwise each user has their own folder."""
    scratch = scratch_of(cluster)
    shown = (f"show={scratch.mount}", f"show={etc}/{TASK_PROLOG}") if scratch else ()
    images = (f"images={cluster.containers.folder}",) if cluster.containers.folder else ()
    told = (f"data={DATA}", f"cache={UNPACKED}", "import=/usr/local/bin/dalsegno", f"resume={RESUME}")
    return Spank(
        f"{etc}/plugstack.conf", f"{HOST_FOLDER}/native/{build_key(slurm_version)}/{PLUGIN}", told + images + shown
    )


def container_parts(slurm_version: str, *, debian: bool, launcher: Sequence[str]) -> HostParts:
    """Return what a host needs for container jobs. Hosts without slurmd need the plugin for the options of srun."""
    plugin = f"{HOST_FOLDER}/native/{build_key(slurm_version)}/{PLUGIN}"
    resume = f'#!/bin/sh\nexec {join([*launcher, "step-again"])} "$@"\n'
    compile_plugin = (*launcher, "container-plugin", HOST_FOLDER, slurm_version)
    return HostParts(
        PACKAGES[debian],
        tuple(PlannedFolder(path) for path in (HOST_FOLDER, DATA, UNPACKED)),
        (PlannedFile(RESUME, resume, 0o755),),
        (PlannedCommand("compiling the container plugin", compile_plugin, creates=plugin),),
    )
