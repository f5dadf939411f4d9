"""The scene of a job that is cancelled: what Docker leaves behind, and what our containers do."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dalsegno.cli import out
from dalsegno.errors import TargetError

if TYPE_CHECKING:
    from dalsegno.cluster import ClusterPlace
    from dalsegno.demo.docker import DockerStage, Ending, OnNode
    from dalsegno.spec.facts import Cluster
    from dalsegno.targets.base import Target

WHO, NODE = "ada", "gpu-1"


def check(target: Target, cluster: Cluster) -> None:
    """Check what the scene needs before anything is made."""
    from dalsegno.demo.docker import find_programs

    find_programs()
    if target.plan(cluster).only_user:
        raise TargetError(
            "Docker's daemon runs as root alone, and this scene gives it a virtual host of its own",
            hint="use sudo, where namespaces are permitted; docs/containers.md shows its output",
        )


def play(target: Target, place: ClusterPlace) -> None:
    from dalsegno.demo import docker as scene
    from dalsegno.demo.docker import daemon, give_to_docker, take_from_docker
    from dalsegno.targets.folder import ClusterFolder

    folder = place.folder / "docker"
    folder.mkdir(mode=0o755)
    out.heading("The same program in two jobs, and both are cancelled")
    stage = _stage(target)
    cgroup = f"/dalsegno-{ClusterFolder(place.folder).id}/docker"
    with daemon(_on_node(target), folder, _as_researcher(target, ["id", "-g"]), cgroup) as docker:
        out.step(f"Docker's daemon runs on {NODE}, as a service of the node; {WHO} may use it")
        name, sqsh = give_to_docker(docker, folder), take_from_docker(docker, folder)
        command = f"srun {docker.client} run --rm --network=host -e CUDA_VISIBLE_DEVICES {name} {scene.PROGRAM}"
        theirs = scene.play(stage, command, out.step, f"DOCKER_HOST={docker.host}")
        ours = scene.play(stage, f"srun --container-image={sqsh} {scene.PROGRAM}", out.step)
        still = any(process.pid == theirs.sight.pid for process in scene.find(stage))
    _show(theirs, ours, still)
    if ours.lives_on or not theirs.lives_on:
        raise TargetError(
            "this is not what was to be shown: see the last line of the table",
            hint="`dalsegno demo --scene docker --keep` leaves the cluster up to look at",
        )


def _stage(target: Target) -> DockerStage:
    from dalsegno.demo.docker import DockerStage
    from dalsegno.system.processes import LocalRunner

    def ask(words: Sequence[str]) -> str:
        entry = target.on_node(NODE, words, {"PATH": os.environ.get("PATH", os.defpath)}, "/")
        return LocalRunner().run(entry.argv, env=entry.env, timeout_s=60).stdout

    home = Path(_as_researcher(target, ["printenv", "HOME"]))
    return DockerStage(target.slurm, target.slurm_as(WHO), NODE, ask, home / "job.out")


def _on_node(target: Target) -> OnNode:
    def enter(words: Sequence[str], env: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
        entry = target.on_node(NODE, words, env, "/")
        return entry.argv, entry.env

    return enter


def _as_researcher(target: Target, words: Sequence[str]) -> str:
    from dalsegno.system.processes import LocalRunner

    entry = target.shell(words, dict(os.environ), "/", user=WHO)
    return LocalRunner().run(entry.argv, env=entry.env, timeout_s=60).checked().stdout.strip()


def _show(theirs: Ending, ours: Ending, still: bool) -> None:
    out.data("")
    for title, each in (("Docker", theirs), ("--container-image", ours)):
        out.data(f"{title}, job {each.job}: {each.command}")
    out.data("")
    both = [theirs, ours]
    rows = [
        ["the program's user", *(each.sight.user for each in both)],
        ["is a child of", *(" > ".join(each.sight.ancestors) for each in both)],
        ["its cgroup", *(_short(each.sight.cgroup) for each in both)],
        ["Slurm counts it as the job's", *("yes" if each.sight.counted else "no" for each in both)],
        ["it was given GPU", *(each.sight.gpu or "none" for each in both)],
        ["after scancel, node idle", *("STILL RUNS" if each.lives_on else "gone" for each in both)],
    ]
    out.table(["", "DOCKER", "--CONTAINER-IMAGE"], rows)
    if still:
        out.data(f"\njob {ours.job} was given the GPU that the program of job {theirs.job} still had.")


def _short(cgroup: str) -> str:
    """Return the end of a cgroup path, without the part that all of a virtual host share; long ids are cut."""
    parts = [part[:12] if len(part) == 64 else part for part in cgroup.split("/")]
    return "/".join(parts[-4:])
