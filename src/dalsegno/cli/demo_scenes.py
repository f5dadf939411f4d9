"""The scenarios of `dalsegno demo`: their requirements, their steps, and the output that explains them."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dalsegno.cli import out
from dalsegno.cli.interrupts import Interrupted
from dalsegno.errors import NotThere, TargetError

if TYPE_CHECKING:
    from dalsegno.cluster import ClusterPlace
    from dalsegno.demo.docker import DockerStage, Ending, OnNode
    from dalsegno.demo.researchers import Lab, ScenarioOutcome
    from dalsegno.drill.impacts import Drill
    from dalsegno.runs.folder import RunFolder
    from dalsegno.spec.facts import Cluster
    from dalsegno.targets.base import Plan, Target

SURVIVAL_NODES, SURVIVAL_SPARES = 4, 1
PAGE = "dalsegno-demo.html"
SAY_EVERY_S = 2.0
RESEARCHER, DOCKER_NODE = "ada", "gpu-1"


def check_survival(report: str | None) -> None:
    """Check that PyTorch is installed and that the report can be written."""
    from dalsegno.cli.health.drill import check_page
    from dalsegno.runs.submit.program import find_python

    check_page(_page(report))
    if not find_python(os.environ, "torch"):
        raise NotThere(
            "the demo needs PyTorch for its training",
            hint="install it with `./dalsegno setup --torch`, or run `dalsegno demo --scene researchers` without it",
        )


def _page(report: str | None) -> Path:
    return Path(report or PAGE).absolute()


def play_survival(place: ClusterPlace, report: str | None, runs: list[RunFolder], keep: bool) -> None:
    """Train while a host loses power and a GPU falls off the bus.

    Add the training's runs to `runs`, so that the caller deletes their folders with the cluster. If the training does
    not survive, add none: the user needs the folders to find the cause.
    """
    from dalsegno.cli.health.drill import DrillView, write_page
    from dalsegno.cli.health.drill_stage import DrillCluster
    from dalsegno.demo.survival import FAULTS, SEED, compare, remove_paths
    from dalsegno.drill.report import render_page

    out.heading("A small GPT trains on four nodes; a fifth stands by")
    stage = DrillCluster.open(place.name, SURVIVAL_NODES, SURVIVAL_SPARES)
    try:
        with DrillView(SAY_EVERY_S) as view:
            drill = stage.perform(FAULTS, SEED, compare=True, say=view.say, tell=view.tell)
    except Interrupted:
        runs += stage.traces.runs
        raise
    _show_survival(drill)
    shown = drill if keep else remove_paths(drill, str(place.folder))
    write_page(_page(report), render_page(shown, "Dal Segno: the demo", compare(drill)))
    out.data(f"\nall of it as a page, with a picture: {_page(report)}")
    if not drill.survived:
        raise SystemExit(1)
    runs += stage.traces.runs


def _show_survival(drill: Drill) -> None:
    from dalsegno.demo.survival import compare
    from dalsegno.drill.report import COLUMNS, rows, sentences

    out.heading("What it cost")
    out.table(COLUMNS, rows(drill))
    out.data("")
    for line in sentences(drill):
        out.data(line)
    out.heading("Compared with other tools")
    compared = compare(drill)
    out.table(compared.head, compared.lines)
    for note in compared.notes:
        out.data(note)


def play_researchers(target: Target, plan: Plan) -> None:
    """Let three researchers share four GPUs: priorities, waiting, a refusal, accounting, fair share."""
    from dalsegno.demo import researchers

    out.heading("Three researchers, four GPUs")
    _show_researchers(researchers.play(_lab(target, plan), out.step))


def for_one_user(cluster: Cluster, user: str) -> Cluster:
    """Return the cluster for a machine on which `user` runs all jobs. `user` gets the accounts of all researchers."""
    accounts = tuple(account.name for account in cluster.accounts)
    return replace(
        cluster, users=(replace(cluster.users[0], name=user, accounts=accounts, default_account=accounts[0]),)
    )


def _lab(target: Target, plan: Plan) -> Lab:
    from dalsegno.demo.researchers import Lab

    return Lab(target.slurm, (lambda who: target.slurm) if plan.only_user else target.slurm_as)


def _show_researchers(outcome: ScenarioOutcome) -> None:
    from dalsegno.demo.researchers import HEAVY, LIGHT, JobBar, draw

    jobs = sorted(outcome.jobs.values(), key=lambda job: (job.started_at or 0, -job.priority))
    bars = [
        JobBar(
            job.name,
            f"{job.gpus} GPU{'s' * (job.gpus > 1)}, {job.qos}",
            job.submitted_at or 0,
            job.started_at or 0,
            job.ends_at or 0,
        )
        for job in jobs
    ]
    plain = "utf" not in (sys.stdout.encoding or "").lower()
    out.data("\n" + (draw(bars, solid="#", dotted=".") if plain else draw(bars)))
    out.data(f"dee was refused: {outcome.refusal}\n")
    out.data("accounting:")
    rows = [
        [str(job.id), job.name, job.user, job.qos, str(job.gpus), f"{job.elapsed_s} s", job.state.name] for job in jobs
    ]
    out.table(["JOB", "NAME", "USER", "QOS", "GPUS", "TIME", "STATE"], rows)
    out.data(
        f"\nfair share: the next job of {HEAVY} has priority {outcome.priorities[HEAVY]}, that of {LIGHT}, "
        f"who used less, {outcome.priorities[LIGHT]}"
    )


def check_docker(target: Target, cluster: Cluster) -> None:
    """Raise an error if Docker's programs are missing, or if the cluster will have no virtual hosts."""
    from dalsegno.demo.docker import find_programs

    find_programs()
    if target.plan(cluster).only_user:
        raise TargetError(
            "the scene `docker` needs root and virtual hosts, for Docker's daemon",
            hint="use sudo on a machine that permits namespaces; docs/containers.md shows the output of this scene",
        )


def play_docker(target: Target, place: ClusterPlace) -> None:
    """Cancel a job in a Docker container and a job in a Dal Segno container, and show which processes remain."""
    from dalsegno.demo import docker as scene
    from dalsegno.demo.docker import daemon, give_to_docker, take_from_docker
    from dalsegno.targets.folder import ClusterFolder

    folder = place.folder / "docker"
    folder.mkdir(mode=0o755)
    out.heading("The same program in two jobs, and both are cancelled")
    stage = _docker_stage(target)
    cgroup = f"/dalsegno-{ClusterFolder(place.folder).id}/docker"
    with daemon(_on_node(target), folder, _as_researcher(target, ["id", "-g"]), cgroup) as docker:
        out.step(f"Docker's daemon runs on {DOCKER_NODE}, as a service of the node; {RESEARCHER} may use it")
        name, sqsh = give_to_docker(docker, folder), take_from_docker(docker, folder)
        command = f"srun {docker.client} run --rm --network=host -e CUDA_VISIBLE_DEVICES {name} {scene.PROGRAM}"
        theirs = scene.play(stage, command, out.step, f"DOCKER_HOST={docker.host}")
        ours = scene.play(stage, f"srun --container-image={sqsh} {scene.PROGRAM}", out.step)
        still = any(process.pid == theirs.program.pid for process in scene.find(stage))
    _show_docker(theirs, ours, still)
    if ours.lives_on or not theirs.lives_on:
        raise TargetError(
            "unexpected result: see the last row of the table",
            hint="`dalsegno demo --scene docker --keep` keeps the cluster for inspection",
        )


def _docker_stage(target: Target) -> DockerStage:
    from dalsegno.demo.docker import DockerStage
    from dalsegno.system.processes import LocalRunner

    def ask(words: Sequence[str]) -> str:
        entry = target.on_node(DOCKER_NODE, words, {"PATH": os.environ.get("PATH", os.defpath)}, "/")
        return LocalRunner().run(entry.argv, env=entry.env, timeout_s=60).stdout

    home = Path(_as_researcher(target, ["printenv", "HOME"]))
    return DockerStage(target.slurm, target.slurm_as(RESEARCHER), DOCKER_NODE, ask, home / "job.out")


def _on_node(target: Target) -> OnNode:
    def enter(words: Sequence[str], env: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
        entry = target.on_node(DOCKER_NODE, words, env, "/")
        return entry.argv, entry.env

    return enter


def _as_researcher(target: Target, words: Sequence[str]) -> str:
    from dalsegno.system.processes import LocalRunner

    entry = target.shell(words, dict(os.environ), "/", user=RESEARCHER)
    return LocalRunner().run(entry.argv, env=entry.env, timeout_s=60).checked().stdout.strip()


def _show_docker(theirs: Ending, ours: Ending, still: bool) -> None:
    out.data("")
    for title, each in (("Docker", theirs), ("--container-image", ours)):
        out.data(f"{title}, job {each.job}: {each.command}")
    out.data("")
    both = [theirs, ours]
    rows = [
        ["the program's user", *(each.program.user for each in both)],
        ["is a child of", *(" > ".join(each.program.ancestors) for each in both)],
        ["its cgroup", *(_short(each.program.cgroup) for each in both)],
        ["Slurm counts it as the job's", *("yes" if each.program.counted else "no" for each in both)],
        ["it was given GPU", *(each.program.gpu or "none" for each in both)],
        ["after scancel, node idle", *("STILL RUNS" if each.lives_on else "gone" for each in both)],
    ]
    out.table(["", "DOCKER", "--CONTAINER-IMAGE"], rows)
    if still:
        out.data(f"\njob {ours.job} was given the GPU that the program of job {theirs.job} still had.")


def _short(cgroup: str) -> str:
    """Return the end of a cgroup path, without the part that all processes of a virtual host share.

    Long ids are cut.
    """
    parts = [part[:12] if len(part) == 64 else part for part in cgroup.split("/")]
    return "/".join(parts[-4:])
