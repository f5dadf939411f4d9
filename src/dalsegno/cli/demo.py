"""`dalsegno demo`: create a cluster on this machine, run a scenario on it, and remove it."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import click

from dalsegno.cli import out
from dalsegno.cli.elevation import elevate_to_make
from dalsegno.cli.interrupts import stoppable, to_the_end
from dalsegno.errors import DalsegnoError

if TYPE_CHECKING:
    from dalsegno.cluster import ClusterPlace
    from dalsegno.runs.folder import RunFolder
    from dalsegno.spec.facts import Cluster
    from dalsegno.targets.base import Plan, Target

SCENES = ("survival", "researchers", "docker")


@click.command()
@click.option("--keep", is_flag=True, help="Leave the cluster up afterwards.")
@click.option("--scene", type=click.Choice(SCENES), default="survival", show_default=True, help="Scenario to run.")
@click.option("--report", type=click.Path(dir_okay=False), help="survival: report file. Default: dalsegno-demo.html.")
def command(keep: bool, scene: str, report: str | None) -> None:
    """Start a real Slurm cluster on this machine, run a scenario on it, and remove it again.

    \b
    survival     a small GPT trains on four nodes; one loses power, a GPU of another falls off the bus
    researchers  three people share four GPUs: priorities, accounting, fair share (needs no PyTorch)
    docker       a cancelled job's Docker container keeps running; our container ends (needs root and Docker)
    """
    from importlib import resources

    from dalsegno.cluster import may_change, open_target, place_named
    from dalsegno.spec.load import parse_spec
    from dalsegno.spec.resolve import resolve

    text = resources.files("dalsegno.demo").joinpath(f"{scene}.yaml").read_text()
    cluster = resolve(parse_spec(text, f"demo/{scene}.yaml"))
    place = place_named(cluster.name)
    target = open_target(cluster.target, place)
    elevate_to_make(place, cluster, target)
    may_change(place)
    _refuse_another(place)
    _check(scene, target, cluster, report)
    runs: list[RunFolder] = []
    with stoppable(), ExitStack() as afterwards:
        if not keep:
            afterwards.callback(_discard, runs)
        plan = _bring_up(target, cluster, place, None if keep else afterwards)
        _play(scene, target, plan, place, report, runs, keep)
    if keep:
        name = cluster.name
        out.talk(
            f"the cluster stays: try `dalsegno status -M {name}`, `dalsegno events -M {name}`, "
            f"`dalsegno shell -M {name}`, `dalsegno drill -M {name}`, `dalsegno down {name}`"
        )


def _refuse_another(place: ClusterPlace) -> None:
    """Raise an error if the cluster exists already: a demo creates its own cluster and removes it."""
    from dalsegno.cluster import places

    if place in places():
        raise DalsegnoError(
            f"cluster {place.name} already exists: kept, or left by a demo that is running or was killed",
            hint=f"remove it with `dalsegno down {place.name}`, or use it with `dalsegno drill -M {place.name}`",
        )


def _check(scene: str, target: Target, cluster: Cluster, report: str | None) -> None:
    """Check the requirements of a scenario before anything is created."""
    from dalsegno.cli.demo_scenes import check_docker, check_survival

    if scene == "docker":
        check_docker(target, cluster)
    elif scene == "survival":
        check_survival(report)


def _play(
    scene: str,
    target: Target,
    plan: Plan,
    place: ClusterPlace,
    report: str | None,
    runs: list[RunFolder],
    keep: bool,
) -> None:
    """Run the scenario. Add to `runs` the runs whose folders are to be deleted with the cluster."""
    from dalsegno.cli.demo_scenes import play_docker, play_researchers, play_survival

    if scene == "researchers":
        play_researchers(target, plan)
    elif scene == "docker":
        play_docker(target, place)
    else:
        play_survival(place, report, runs, keep)


def _bring_up(target: Target, cluster: Cluster, place: ClusterPlace, afterwards: ExitStack | None) -> Plan:
    from dalsegno.cli.demo_scenes import for_one_user
    from dalsegno.system.processes import LocalRunner

    out.heading("A cluster from one file")
    with place.lock():
        _refuse_another(place)  # check again under the lock: another demo may have created a cluster meanwhile
        if afterwards is not None:
            afterwards.callback(to_the_end, lambda: _take_down(target, place))
        plan = target.plan(cluster)
        if plan.only_user and cluster.users:
            plan = target.plan(for_one_user(cluster, plan.only_user))
        started = time.monotonic()
        for line in plan.sentences():
            out.step(line)
        with out.progress() as say:
            target.apply(plan, say)
    out.step(f"up after {time.monotonic() - started:.1f} s")
    out.data("$ sinfo")
    entry = target.shell(["sinfo"], dict(os.environ), "/")
    out.data(LocalRunner().run(entry.argv, env=entry.env, timeout_s=60).checked().stdout)
    return plan


def _take_down(target: Target, place: ClusterPlace) -> None:
    started = time.monotonic()
    with place.lock():
        target.destroy(lambda text: None)
    out.talk(f"\nthe cluster is down after {time.monotonic() - started:.1f} s; nothing of it is left")


def _discard(runs: list[RunFolder]) -> None:
    from dalsegno.cluster import runs_home
    from dalsegno.runs.submit.prepare import discard_run

    for run in runs:
        discard_run(run, runs_home())
