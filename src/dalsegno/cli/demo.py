"""`dalsegno demo`: the product on this machine, from nothing to nothing."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from dalsegno.cli import out
from dalsegno.cli.interrupts import interruptible

if TYPE_CHECKING:
    from dalsegno.demo.researchers import Lab, Outcome
    from dalsegno.spec.facts import Cluster
    from dalsegno.targets.local import LocalTarget


@click.command()
@click.option("--keep", is_flag=True, help="Leave the cluster up afterwards.")
def command(keep: bool) -> None:
    """Bring a real Slurm cluster up on this machine, let three researchers share its GPUs, and take it down again."""
    from importlib import resources

    from dalsegno.cluster import may_change, open_target, place_named
    from dalsegno.spec import parse_spec, resolve

    text = resources.files("dalsegno.demo").joinpath("cluster.yaml").read_text()
    cluster = resolve(parse_spec(text, "demo/cluster.yaml"))
    place = place_named(cluster.name)
    target = open_target(cluster.target, place)
    may_change(place)
    with place.lock(), interruptible():
        try:
            _play(target, cluster)
        finally:
            if not keep:
                _take_down(target)
    if keep:
        name = cluster.name
        out.talk(
            f"the cluster stays: try `dalsegno status -c {name}`, `dalsegno shell -c {name}`, `dalsegno down {name}`"
        )


def _play(target: LocalTarget, cluster: Cluster) -> None:
    from dalsegno.demo import researchers

    _bring_up(target, cluster)
    out.heading("Three researchers, four GPUs")
    outcome = researchers.play(_lab(target), out.step)
    _show(outcome)


def _bring_up(target: LocalTarget, cluster: Cluster) -> None:
    from dalsegno.targets.local.placement import LOOPBACK

    out.heading("A cluster from one file")
    plan = target.plan(cluster)
    if plan.placement.hosts == LOOPBACK:
        plan = target.plan(_for_one_user(cluster, target.machine.user))
    started = time.monotonic()
    for line in plan.sentences():
        out.step(line)
    with out.progress() as say:
        target.apply(plan, say)
    out.step(f"up after {time.monotonic() - started:.1f} s")
    out.data("$ sinfo")
    out.data(target.ask("sinfo"))


def _for_one_user(cluster: Cluster, user: str) -> Cluster:
    """Without virtual hosts there are no users but ours: it plays all three, each with an account of its own."""
    accounts = tuple(account.name for account in cluster.accounts)
    return replace(
        cluster, users=(replace(cluster.users[0], name=user, accounts=accounts, default_account=accounts[0]),)
    )


def _lab(target: LocalTarget) -> Lab:
    from dalsegno.demo.researchers import Lab

    virtual = target.status().facts["hosts"] == "virtual"
    return Lab(target.slurm, target.slurm_as if virtual else lambda who: target.slurm)


def _show(outcome: Outcome) -> None:
    from dalsegno.demo.researchers import HEAVY, LIGHT
    from dalsegno.demo.timeline import Bar, draw

    jobs = sorted(outcome.jobs.values(), key=lambda job: (job.started_at or 0, -job.priority))
    bars = [
        Bar(
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
    out.data("what accounting tells:")
    rows = [
        [str(job.id), job.name, job.user, job.qos, str(job.gpus), f"{job.elapsed_s} s", job.state.name] for job in jobs
    ]
    out.table(["JOB", "NAME", "USER", "QOS", "GPUS", "TIME", "STATE"], rows)
    out.data(
        f"\nfair share: the next job of {HEAVY} has priority {outcome.priorities[HEAVY]}, that of {LIGHT}, "
        f"who used less, {outcome.priorities[LIGHT]}"
    )


def _take_down(target: LocalTarget) -> None:
    started = time.monotonic()
    target.destroy(lambda text: None)
    out.talk(f"\nthe cluster is down after {time.monotonic() - started:.1f} s; nothing of it is left")
