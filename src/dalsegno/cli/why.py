"""`dalsegno why`: what happened to a node, a run or a job, and what to do about it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import click

from dalsegno.cli import out
from dalsegno.cli.asking import as_typed, meaning_of, way_in, when
from dalsegno.cli.out import cluster_option, json_option
from dalsegno.errors import CommandFailed, DalsegnoError, NotThere
from dalsegno.hostlist import closest

if TYPE_CHECKING:
    from dalsegno.cluster import SlurmHere
    from dalsegno.runs.folder import RunFolder
    from dalsegno.slurm.facts import JobInfo
    from dalsegno.slurm.parse.nodes import NodeEvent
    from dalsegno.why import Care, Explanation, Moment

CONTROLLER_S = DATABASE_S = 3.0
LAST = 500  # events of the controller that are looked through
MOST_NODES = 16  # of a run or a job whose own stories are told with it
_JOB = re.compile(r"\d+([_+]\d+)?")


@click.command()
@click.argument("subject", metavar="NODE|RUN|JOB")
@cluster_option
@json_option
def command(subject: str, name: str | None, json_: bool) -> None:
    """Show what happened to NODE, RUN or JOB, in order, with a conclusion and the next command.

    \b
    dalsegno why gpu-3
    dalsegno why train-x7k2a
    dalsegno why 1234
    """
    from dalsegno.cluster import find_slurm

    answer = _to_type(_answer(subject, find_slurm(name)), way_in(name))
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


def _to_type(answer: Explanation, before: str) -> Explanation:
    """With a next command that works in this shell."""
    return replace(answer, verdict=replace(answer.verdict, next=as_typed(answer.verdict.next, before)))


def _answer(subject: str, slurm: SlurmHere) -> Explanation:
    from dalsegno.cluster import runs_home, silence
    from dalsegno.runs.submit.prepare import find_run, list_runs

    runs = {run.run: run for run in list_runs(runs_home())}
    if subject in runs:
        return _of_run(runs[subject], slurm)
    if (silent := silence(slurm)) is not None:
        raise silent
    if _JOB.fullmatch(subject):
        return _of_job(subject, slurm, runs)
    nodes = _names(slurm)
    if subject in nodes:
        return _of_node(subject, slurm)
    if any(run.startswith(subject) for run in runs):
        return _of_run(find_run(runs_home(), subject), slurm)
    close = closest(subject, [*nodes, *runs])
    hint = f"did you mean `{close}`?" if close else "`dalsegno status` shows nodes and jobs, `dalsegno runs` runs"
    raise NotThere(f"there is no node, run or job `{subject}`", hint=hint)


def _names(slurm: SlurmHere) -> list[str]:
    """Of its nodes."""
    try:
        return [node.name for node in slurm.client.nodes()]
    except CommandFailed as fault:
        raise meaning_of(fault) from None


def _of_run(run: RunFolder, slurm: SlurmHere) -> Explanation:
    from dalsegno.cli.statusline import status_of
    from dalsegno.runs import journal
    from dalsegno.why import Explanation, explain_run, in_order, moments_of_run, nodes_of_run
    from dalsegno.why.run import aftermath_s

    status, entries = status_of(run), list(journal.read(run.journal))
    if status is None:
        raise NotThere(f"run {run.run} has told nothing yet", hint="`dalsegno runs` lists those that have")
    own = tuple(moments_of_run(entries))
    until = own[-1].at + aftermath_s(status) if own and status.over else None
    around = _told_of(nodes_of_run(entries), slurm, own[0].at if own else 0.0, until)
    return Explanation(f"run {run.run}", explain_run(status, entries), in_order(own, around))


def _of_job(label: str, slurm: SlurmHere, runs: Mapping[str, RunFolder]) -> Explanation:
    from dalsegno.runs import journal
    from dalsegno.runs.comment import read_comment
    from dalsegno.why import Explanation, explain_job, in_order, moments_of_job, moments_of_run, nodes_given, within
    from dalsegno.why.job import aftermath_s

    job = _find_job(label, slurm)
    somebodys = job.comment and read_comment(job.comment) is None
    run = None if somebodys else runs.get(job.name)  # jobs of a run have its name, and its owner
    run = run if run and job.uid in (None, run.root.stat().st_uid) else None
    entries = list(journal.read(run.journal)) if run else []
    until = job.ends_at + aftermath_s(job) if job.ends_at and job.state.ended else None
    nodes = dict.fromkeys([*job.nodes, *nodes_given(entries, job.id)])
    around = _told_of(nodes, slurm, job.started_at, until) if job.started_at else []
    own = within(moments_of_run(entries), job.submitted_at or 0.0, until)
    verdict = explain_job(job, run.run if run else "")
    return Explanation(f"job {label}", verdict, in_order(moments_of_job(job), own, around, _that_name(job, slurm)))


def _find_job(label: str, slurm: SlurmHere) -> JobInfo:
    try:
        job = slurm.client.job(label)
        return replace(job, excluded=slurm.client.excluded_nodes(job.id))
    except CommandFailed as fault:
        raise meaning_of(fault) from None
    except NotThere:
        found = slurm.client.history(jobs=[label])
        if not found:
            raise
        return found[-1]


def _that_name(job: JobInfo, slurm: SlurmHere) -> list[Moment]:
    """What the controller did for this job, on whatever node: a spare that was released, say."""
    from dalsegno.recovery.event import read_event
    from dalsegno.why import Moment

    told = map(read_event, (_ask(slurm, {"events": -LAST}) or {}).get("events", []))
    return [
        Moment(each.at, "controller", f"{each.node}: {each.text}")
        for each in told
        if job.id in each.jobs and each.at >= (job.submitted_at or 0)
    ]


def _of_node(name: str, slurm: SlurmHere) -> Explanation:
    from dalsegno.why import Care, Explanation, explain_node, in_order, moments_of_node

    node, care = slurm.client.node(name), _care(name, slurm) or Care()
    slurms = moments_of_node(node, _events(name, slurm))
    return Explanation(f"node {name}", explain_node(node, care), in_order(_injected(name, slurm), slurms, care.moments))


def _events(node: str, slurm: SlurmHere) -> list[NodeEvent]:
    """Nothing where there is no accounting database, or it does not answer."""
    try:
        return slurm.client_within(DATABASE_S).node_events(node)
    except CommandFailed:
        return []


def _injected(node: str, slurm: SlurmHere) -> list[Moment]:
    """What was done to it on purpose; nobody should look for the cause of that."""
    from dalsegno.cluster import target_of
    from dalsegno.why import Moment

    target = target_of(slurm)
    return [Moment(at, "inject", what) for at, what in target.injected_ever(node)] if target else []


def _told_of(nodes: Iterable[str], slurm: SlurmHere, since: float, until: float | None) -> list[Moment]:
    """What checks and controller noted of these nodes in that time."""
    from dalsegno.why import Moment, within

    told = list[Moment]()
    for node in list(nodes)[:MOST_NODES]:
        care = _care(node, slurm)
        if care is None:
            break  # each further question would be waited for as long
        told += [Moment(moment.at, moment.who, f"{node}: {moment.text}") for moment in care.moments]
    return within(told, since, until)


def _care(node: str, slurm: SlurmHere) -> Care | None:
    """None where the controller does not answer."""
    from dalsegno.why import read_care

    told = _ask(slurm, {"node": node})
    if told is None:
        out.talk("the controller does not answer, so what it knows is missing here; `dalsegno status` says more")
        return None
    return read_care(told)


def _ask(slurm: SlurmHere, request: dict[str, Any]) -> dict[str, Any] | None:
    """Nothing where there is no controller; None where it does not answer."""
    from dalsegno.recovery.client import ask

    if slurm.controller is None:
        return {}
    try:
        return ask(slurm.controller, request, CONTROLLER_S)
    except DalsegnoError:
        return None
