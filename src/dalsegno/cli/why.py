"""`dalsegno why`: what happened to a node, a run or a job, and what to do about it."""

from __future__ import annotations

import re
from dataclasses import asdict
from difflib import get_close_matches
from typing import TYPE_CHECKING

import click

from dalsegno.cli import out
from dalsegno.cli.asking import when
from dalsegno.cli.options import cluster_option, json_option
from dalsegno.errors import DalsegnoError, NotThere

if TYPE_CHECKING:
    from dalsegno.cluster import SlurmHere
    from dalsegno.launch.folder import RunFolder
    from dalsegno.slurm import SlurmClient
    from dalsegno.why import Answer, Moment

CONTROLLER_S = 3.0
_JOB = re.compile(r"\d+([_+]\d+)?")


@click.command()
@click.argument("subject", metavar="NODE|RUN|JOB")
@cluster_option
@json_option
def command(subject: str, name: str | None, json_: bool) -> None:
    """What happened to NODE, RUN or JOB, in order; what it comes to; and the next command.

    \b
    dalsegno why gpu-3
    dalsegno why train-x7k2a
    dalsegno why 1234
    """
    from dalsegno.cluster import find_slurm

    answer = _answer(subject, find_slurm(name))
    if json_:
        out.as_json(asdict(answer))
        return
    rows = [[when(moment.at), moment.who, moment.text] for moment in answer.moments]
    if rows:
        out.table(["WHEN", "WHO", "WHAT"], rows)
        out.data("")
    out.data(answer.verdict.sentence)
    if answer.verdict.next:
        out.talk(f"next: `{answer.verdict.next}`")


def _answer(subject: str, slurm: SlurmHere) -> Answer:
    from dalsegno.cluster import runs_home, silence
    from dalsegno.jobs import list_runs

    runs = {run.run: run for run in list_runs(runs_home())}
    if subject in runs:
        return _of_run(runs[subject])
    if (silent := silence(slurm)) is not None:
        raise silent
    if _JOB.fullmatch(subject):
        return _of_job(subject, slurm.client)
    nodes = [node.name for node in slurm.client.nodes()]
    if subject in nodes:
        return _of_node(subject, slurm)
    close = get_close_matches(subject, [*nodes, *runs], 1)
    hint = f"did you mean `{close[0]}`?" if close else "`dalsegno status` shows nodes and jobs, `dalsegno runs` runs"
    raise NotThere(f"there is no node, run or job `{subject}`", hint=hint)


def _of_run(run: RunFolder) -> Answer:
    from dalsegno.cli.run_facts import status_of
    from dalsegno.launch import journal
    from dalsegno.why import Answer, explain_run, moments_of_run

    status, entries = status_of(run), list(journal.read(run.journal))
    if status is None:
        raise NotThere(f"run {run.run} has told nothing yet", hint="`dalsegno runs` lists those that have")
    return Answer(f"run {run.run}", explain_run(status, entries), tuple(moments_of_run(entries)))


def _of_job(label: str, client: SlurmClient) -> Answer:
    from dalsegno.why import Answer, explain_job, moments_of_job

    try:
        job = client.job(label)
    except NotThere:
        found = client.history(jobs=[label])
        if not found:
            raise
        job = found[-1]
    return Answer(f"job {label}", explain_job(job), tuple(moments_of_job(job)))


def _of_node(name: str, slurm: SlurmHere) -> Answer:
    from dalsegno.why import Answer, Moment, explain_node
    from dalsegno.why.answer import in_order

    node = slurm.client.node(name)
    drained = [Moment(node.reason_at, "slurm", f"{node.reason} ({node.reason_user})")] if node.reason_at else []
    return Answer(f"node {name}", explain_node(node), in_order(drained, _told_by_controller(name, slurm)))


def _told_by_controller(node: str, slurm: SlurmHere) -> list[Moment]:
    """None where there is no controller, or it knows nothing of the node."""
    from dalsegno.recovery.client import ask
    from dalsegno.why import Moment

    if slurm.controller is None:
        return []
    try:
        events = ask(slurm.controller, {"node": node}, CONTROLLER_S).get("events", [])
    except DalsegnoError:
        return []
    return [Moment(float(event["at"]), "controller", str(event["text"])) for event in events]
