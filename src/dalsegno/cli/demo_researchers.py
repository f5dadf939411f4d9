"""The scene of three researchers who share four GPUs: priorities, waiting, a refusal, accounting, fair share."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from dalsegno.cli import out

if TYPE_CHECKING:
    from dalsegno.demo.researchers import Lab, ScenarioOutcome
    from dalsegno.spec.facts import Cluster
    from dalsegno.targets.base import Plan, Target


def play(target: Target, plan: Plan) -> None:
    from dalsegno.demo import researchers

    out.heading("Three researchers, four GPUs")
    _show(researchers.play(_lab(target, plan), out.step))


def for_one_user(cluster: Cluster, user: str) -> Cluster:
    """Let one user play all three researchers, each with an account of its own, where there are no other users."""
    accounts = tuple(account.name for account in cluster.accounts)
    return replace(
        cluster, users=(replace(cluster.users[0], name=user, accounts=accounts, default_account=accounts[0]),)
    )


def _lab(target: Target, plan: Plan) -> Lab:
    from dalsegno.demo.researchers import Lab

    return Lab(target.slurm, (lambda who: target.slurm) if plan.only_user else target.slurm_as)


def _show(outcome: ScenarioOutcome) -> None:
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
