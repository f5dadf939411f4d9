"""`dalsegno why`: explain what happened to a node, a run or a job, and what to do."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import click

from dalsegno.cli import out
from dalsegno.cli.controller_requests import format_time, meaning_of, prefix_command, shell_prefix
from dalsegno.cli.out import cluster_option, json_option
from dalsegno.errors import CommandFailed, DalsegnoError, NotThere
from dalsegno.hostlist import closest
from dalsegno.printable import one_line

if TYPE_CHECKING:
    from dalsegno.cluster import SlurmHere
    from dalsegno.hardware.job_variables import JobVariable
    from dalsegno.runs.folder import RunFolder
    from dalsegno.runs.status import RunStatus
    from dalsegno.slurm.facts import JobInfo
    from dalsegno.slurm.parse.nodes import NodeEvent
    from dalsegno.why import ControllerView, Explanation, Moment

CONTROLLER_S = DATABASE_S = 3.0
LAST = 500  # maximum number of controller events to search
MAX_NODES = 16  # maximum number of nodes of a run or job whose events are included
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

    answer = _prefix_next(_answer(subject, find_slurm(name)), shell_prefix(name))
    if json_:
        out.as_json({**asdict(answer), "variables": [_variable_json(each) for each in answer.variables]})
        return
    rows = [[format_time(moment.at), moment.who, moment.text] for moment in answer.moments]
    if rows:
        out.table(["WHEN", "WHO", "WHAT"], rows)
        out.data("")
    if answer.variables:
        settings = [
            [f"{each.name}={each.value}", each.required_by, each.reason, each.source] for each in answer.variables
        ]
        out.table(["ADDED VARIABLE", "FOR", "REASON", "SOURCE"], settings)
        out.data("")
    out.data(one_line(answer.verdict.sentence))  # other users' text must not be able to add a line
    if answer.verdict.next:
        out.talk(one_line(f"next: `{answer.verdict.next}`"))


def _variable_json(variable: JobVariable) -> dict[str, str]:
    """Return a variable as JSON. `of` is the fabric or instance type that needs the variable."""
    facts: dict[str, str] = asdict(variable)
    return {("of" if key == "required_by" else key): value for key, value in facts.items()}


def _prefix_next(answer: Explanation, prefix: str) -> Explanation:
    """Return the explanation with the suggested command written so that it works in this shell."""
    return replace(answer, verdict=replace(answer.verdict, next=prefix_command(answer.verdict.next, prefix)))


def _answer(subject: str, slurm: SlurmHere) -> Explanation:
    from dalsegno.cluster import runs_home, silence
    from dalsegno.runs.submit.prepare import find_run, list_runs

    runs = {run.run: run for run in list_runs(runs_home())}
    if subject in runs:
        return _explain_run(runs[subject], slurm)
    if (silent := silence(slurm)) is not None:
        raise silent
    if _JOB.fullmatch(subject):
        return _explain_job(subject, slurm, runs)
    nodes = _node_names(slurm)
    if subject in nodes:
        return _explain_node(subject, slurm)
    if any(run.startswith(subject) for run in runs):
        return _explain_run(find_run(runs_home(), subject), slurm)
    close = closest(subject, [*nodes, *runs])
    hint = f"did you mean `{close}`?" if close else "`dalsegno status` lists nodes and jobs, `dalsegno runs` lists runs"
    raise NotThere(f"there is no node, run or job `{subject}`", hint=hint)


def _node_names(slurm: SlurmHere) -> list[str]:
    """Return the names of the cluster's nodes."""
    try:
        return [node.name for node in slurm.client.nodes()]
    except CommandFailed as fault:
        raise meaning_of(fault) from None


def _explain_run(run: RunFolder, slurm: SlurmHere) -> Explanation:
    from dalsegno.cli.training.statusline import status_of
    from dalsegno.runs import journal
    from dalsegno.runs.hang import read_hang
    from dalsegno.why import Explanation, explain_run, merge_timelines, moments_of_run, nodes_of_run
    from dalsegno.why.run import aftermath_s, generation_to_explain

    status, entries = status_of(run), list(journal.read(run.journal))
    if status is None:
        raise NotThere(f"run {run.run} has no status yet", hint="`dalsegno runs` lists the runs that have one")
    own = tuple(moments_of_run(entries))
    until = own[-1].at + aftermath_s(status) if own and status.over else None
    nodes = _controller_views(nodes_of_run(entries), slurm)
    around = _node_moments(nodes, own[0].at if own else 0.0, until)
    failing = [name for name, view in nodes.items() if view.failing]
    hang = read_hang(run, generation_to_explain(status, entries), entries, failing)
    timeline = merge_timelines(own, around)
    verdict = explain_run(status, entries, hang, _slow_rank(status, slurm))
    return Explanation(f"run {run.run}", verdict, timeline, _variables(run))


def _slow_rank(status: RunStatus, slurm: SlurmHere) -> str:
    """Return a description of the rank that the run waits for and of its node's readings; "" if no rank is slow."""
    from dalsegno.overview.gather import read_node_readings
    from dalsegno.runs.slow_ranks import describe_slow_rank

    if status.slow_rank is None:
        return ""
    return describe_slow_rank(status, read_node_readings(_ask(slurm, {"agents": True}) or {}))


def _variables(run: RunFolder) -> tuple[JobVariable, ...]:
    """Return the variables that were added to the run's environment; none if its plan cannot be read."""
    from dalsegno.runs.submit.prepare import read_plan

    try:
        return read_plan(run).variables
    except (DalsegnoError, OSError):
        return ()


def _explain_job(label: str, slurm: SlurmHere, runs: Mapping[str, RunFolder]) -> Explanation:
    from dalsegno.runs import journal
    from dalsegno.runs.comment import read_comment
    from dalsegno.why import (
        Explanation,
        explain_job,
        merge_timelines,
        moments_of_job,
        moments_of_run,
        nodes_given,
        within,
    )
    from dalsegno.why.job import aftermath_s

    job = _find_job(label, slurm)
    foreign = job.comment and read_comment(job.comment) is None
    run = None if foreign else runs.get(job.name)  # the jobs of a run have its name and its owner
    run = run if run and job.uid in (None, run.root.stat().st_uid) else None
    entries = list(journal.read(run.journal)) if run else []
    until = job.ends_at + aftermath_s(job) if job.ends_at and job.state.ended else None
    nodes = dict.fromkeys([*job.nodes, *nodes_given(entries, job.id)])
    around = _node_moments(_controller_views(nodes, slurm), job.started_at, until) if job.started_at else []
    own = within(moments_of_run(entries), job.submitted_at or 0.0, until)
    verdict = explain_job(job, run.run if run else "")
    return Explanation(
        f"job {label}", verdict, merge_timelines(moments_of_job(job), own, around, _controller_moments(job, slurm))
    )


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


def _controller_moments(job: JobInfo, slurm: SlurmHere) -> list[Moment]:
    """Return what the controller did for this job on any node, for example releasing a spare."""
    from dalsegno.recovery.journal.event import read_event
    from dalsegno.why import Moment

    events = map(read_event, (_ask(slurm, {"events": -LAST}) or {}).get("events", []))
    return [
        Moment(each.at, "controller", f"{each.node}: {each.text}")
        for each in events
        if job.id in each.jobs and each.at >= (job.submitted_at or 0)
    ]


def _explain_node(name: str, slurm: SlurmHere) -> Explanation:
    from dalsegno.why import ControllerView, Explanation, explain_node, merge_timelines, moments_of_node

    node, controller = slurm.client.node(name), _controller_view(name, slurm) or ControllerView()
    slurms = moments_of_node(node, _events(name, slurm))
    return Explanation(
        f"node {name}",
        explain_node(node, controller),
        merge_timelines(slurms, controller.moments),
    )


def _events(node: str, slurm: SlurmHere) -> list[NodeEvent]:
    """Return the node's events in the accounting database; [] if there is no database or it does not answer."""
    try:
        return slurm.client_within(DATABASE_S).node_events(node)
    except CommandFailed:
        return []


def _controller_views(nodes: Iterable[str], slurm: SlurmHere) -> dict[str, ControllerView]:
    """Return the controller's facts about the first MAX_NODES nodes. Stop if the controller does not answer."""
    views: dict[str, ControllerView] = {}
    for node in list(nodes)[:MAX_NODES]:
        controller = _controller_view(node, slurm)
        if controller is None:
            break  # each further request would wait for the full timeout
        views[node] = controller
    return views


def _node_moments(views: Mapping[str, ControllerView], since: float, until: float | None) -> list[Moment]:
    """Return what the health checks and the controller recorded about these nodes between `since` and `until`."""
    from dalsegno.why import Moment, within

    moments = [
        Moment(moment.at, moment.who, f"{node}: {moment.text}")
        for node, view in views.items()
        for moment in view.moments
    ]
    return within(moments, since, until)


def _controller_view(node: str, slurm: SlurmHere) -> ControllerView | None:
    """Return the controller's facts about a node; None if it does not answer."""
    from dalsegno.why import read_controller_view

    answer = _ask(slurm, {"node": node})
    if answer is None:
        out.talk("the controller does not answer, so its events are missing here; check it with `dalsegno status`")
        return None
    return read_controller_view(answer)


def _ask(slurm: SlurmHere, request: dict[str, Any]) -> dict[str, Any] | None:
    """Return the controller's answer; {} if there is no controller, None if it does not answer."""
    from dalsegno.recovery.client import ask

    socket = slurm.controller or slurm.watcher
    if socket is None:
        return {}
    try:
        return ask(socket, request, CONTROLLER_S)
    except DalsegnoError:
        return None
