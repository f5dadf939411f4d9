"""The rows of each panel: nodes, GPUs, runs and jobs, events. Pure."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from dalsegno.cli.live.facts import LiveFacts
from dalsegno.cli.live.table import Column, Row, cells
from dalsegno.cli.live.text import Tone, TonedText
from dalsegno.cli.live.view import Panel
from dalsegno.cli.training.statusline import age, clock, elapsed_s, ended_state, members
from dalsegno.errors import DalsegnoError
from dalsegno.health.messages import GpuReading
from dalsegno.hostlist import expand
from dalsegno.overview.conditions import NodeCondition, node_conditions, run_impact
from dalsegno.overview.facts import NodeRecovery, ObservedRun
from dalsegno.recovery.journal.event import Event, EventStage
from dalsegno.runs.status import is_over
from dalsegno.slurm.facts import JobState
from dalsegno.targets.base import JobStatus, NodeStatus, counted

UNKNOWN = "-"
_BAD = (
    NodeCondition.NEEDS_ADMIN,
    NodeCondition.HELD_BACK,
    NodeCondition.OFF,
    NodeCondition.OUT,
    NodeCondition.NOT_RESPONDING,
    NodeCondition.UNKNOWN,
    NodeCondition.DOWN,
)
_STAGES = {EventStage.FAILED: Tone.BAD, EventStage.SUSPECTED: Tone.WARNING, EventStage.DONE: Tone.PLAIN}

COLUMNS = {
    Panel.NODES: (
        Column("NODE"), Column("STATE", 12), Column("CONDITION", 14), Column("SINCE", 6, drop=4),
        Column("GPUS", 12, drop=2), Column("PARTITION", 16, drop=5), Column("JOBS", 20, drop=1), Column("REASON"),
    ),
    Panel.GPUS: (
        Column("NODE"), Column("TYPE", 12, drop=4), Column("IN USE", 8), Column("UTIL", 5, right=True),
        Column("TEMP", 5, right=True), Column("MEMORY", 16, right=True), Column("UTIL % OF EACH"),
    ),
    Panel.RUNS: (
        Column("RUN"), Column("USER", 10, drop=5), Column("STATE", 24), Column("NODES", 7), Column("GEN", 4, drop=6),
        Column("STEP", 10, drop=1, right=True), Column("LOSS", 8, drop=2, right=True),
        Column("STEP TIME", 9, drop=4, right=True), Column("GOODPUT", 7, drop=3, right=True),
        Column("TIME", 11, drop=7, right=True), Column("MESSAGE"),
    ),
    Panel.EVENTS: (Column("TIME", 14), Column("NODE", 20), Column("EVENT")),
}  # fmt: skip


@dataclass(frozen=True)
class PanelRows:
    """The title of a panel, its rows, and what to show if there are none."""

    title: str
    rows: Sequence[Row] = ()
    empty: str = ""


@dataclass(frozen=True)
class Filter:
    """Selects rows by name. Case does not matter; an empty filter selects all rows."""

    text: str = ""
    words: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "words", tuple(self.text.casefold().split()))

    def takes(self, *names: str) -> bool:
        """Return whether each word of the filter is part of one of the names."""
        return all(any(word in name.casefold() for name in names) for word in self.words)


def panel_rows(facts: LiveFacts, wanted: Filter, now: float) -> dict[Panel, PanelRows]:
    """Return the content of all panels."""
    jobs = jobs_by_node(facts.overview.status.jobs or ())
    return {
        Panel.NODES: _node_panel(facts, wanted, jobs, now),
        Panel.GPUS: _gpu_panel(facts, wanted, jobs),
        Panel.RUNS: _run_panel(facts, wanted, now),
        Panel.EVENTS: _event_panel(facts, wanted),
    }


def jobs_by_node(jobs: Iterable[JobStatus]) -> dict[str, list[JobStatus]]:
    found: dict[str, list[JobStatus]] = {}
    for job in jobs:
        for node in _nodes_of(job):
            found.setdefault(node, []).append(job)
    return found


def _nodes_of(job: JobStatus) -> list[str]:
    if job.state is JobState.PENDING or job.state.ended:
        return []
    try:
        return expand(job.nodes)
    except DalsegnoError:
        return []


def natural(name: str) -> tuple[str | int, ...]:
    """Return a key that sorts node-9 before node-10."""
    return tuple(int(part) if part.isdecimal() else part for part in re.split(r"([0-9]{1,18})", name))


# The panel of nodes


def _node_panel(facts: LiveFacts, wanted: Filter, jobs: Mapping[str, list[JobStatus]], now: float) -> PanelRows:
    overview = facts.overview
    conditions = node_conditions(overview)
    records = overview.controller.nodes if overview.controller else {}
    urgency = {each: 99 if each.healthy else number for number, each in enumerate(NodeCondition)}
    nodes = sorted(overview.status.nodes, key=lambda node: (urgency[conditions[node.name]], natural(node.name)))
    rows = [
        _node_row(node, conditions[node.name], records.get(node.name), jobs.get(node.name, ()), now)
        for node in nodes
        if wanted.takes(node.name, *_users(jobs.get(node.name, ())))
    ]
    return PanelRows(_title("NODES", len(rows), len(nodes)), rows, "no nodes")


def _users(jobs: Iterable[JobStatus]) -> Iterator[str]:
    for job in jobs:
        yield from (job.user, job.name, job.id)


def _node_row(
    node: NodeStatus, condition: NodeCondition, record: NodeRecovery | None, jobs: Sequence[JobStatus], now: float
) -> Row:
    since = age(now - record.since) if record and record.since else UNKNOWN
    reason = node.reason or (record.note or record.reason if record and not condition.healthy else "")
    return cells(
        node.name,
        TonedText(node.state, tone_of(condition)),
        TonedText(condition.value.replace("-", " "), tone_of(condition)),
        since,
        f"{_in_use(node)} {node.gpu_type}".rstrip() if node.gpus else UNKNOWN,
        ",".join(node.partitions),
        _job_text(jobs),
        reason,
    )


def tone_of(condition: NodeCondition) -> Tone:
    if condition.healthy:
        return Tone.GOOD
    return Tone.BAD if condition in _BAD else Tone.WARNING


def _in_use(node: NodeStatus) -> str:
    return f"{'?' if node.gpus_used is None else node.gpus_used}/{node.gpus}"


def _job_text(jobs: Sequence[JobStatus]) -> str:
    if not jobs:
        return UNKNOWN
    more = f" +{len(jobs) - 1}" if len(jobs) > 1 else ""
    return f"{jobs[0].id} {jobs[0].user}{more}"


# The panel of GPUs


def _gpu_panel(facts: LiveFacts, wanted: Filter, jobs: Mapping[str, list[JobStatus]]) -> PanelRows:
    overview = facts.overview
    nodes = sorted((node for node in overview.status.nodes if node.gpus), key=lambda node: natural(node.name))
    rows = [
        _gpu_row(node, overview.gpus.get(node.name, ()))
        for node in nodes
        if wanted.takes(node.name, *_users(jobs.get(node.name, ())))
    ]
    total = sum(node.gpus for node in nodes)
    used = sum(node.gpus_used or 0 for node in nodes)
    return PanelRows(f"GPUS ({used} of {total} in use)" if total else "GPUS", rows, "no GPUs")


def _gpu_row(node: NodeStatus, figures: Sequence[GpuReading]) -> Row:
    """Return a node's row: the mean utilisation, highest temperature and memory of its GPUs, and the utilisation of
    each."""
    loads = [gpu.utilization_percent for gpu in figures]
    known = [load for load in loads if load is not None]
    heat = [gpu.temperature_c for gpu in figures if gpu.temperature_c is not None]
    used = [gpu.memory_used_mib for gpu in figures if gpu.memory_used_mib is not None]
    total = [gpu.memory_total_mib for gpu in figures if gpu.memory_total_mib is not None]
    memory = f"{sum(used) / 1024:.0f}/{sum(total) / 1024:.0f} GiB" if used and total else UNKNOWN
    return cells(
        node.name,
        node.gpu_type or UNKNOWN,
        _in_use(node),
        _percent(sum(known) / len(known)) if known else UNKNOWN,
        f"{max(heat):.0f} C" if heat else UNKNOWN,
        memory,
        " ".join(UNKNOWN if load is None else f"{load:.0f}" for load in loads) or UNKNOWN,
    )


def _percent(value: float) -> str:
    return f"{value:.0f} %"


# The panel of runs and other jobs


def _run_panel(facts: LiveFacts, wanted: Filter, now: float) -> PanelRows:
    overview = facts.overview
    runs = sorted(overview.runs, key=lambda run: -run.status.created)
    known = {run.status.run for run in runs}
    others = [job for job in overview.status.jobs or () if job.name not in known]
    matching = [run for run in runs if wanted.takes(*_run_names(run))]
    jobs = [job for job in others if wanted.takes(job.name, job.user, job.id, *_nodes_of(job))]
    rows = [
        *(_run_row(run, now) for run in matching if not is_over(run.status)),
        *map(_job_row, jobs),
        *(_run_row(run, now) for run in matching if is_over(run.status)),
    ]
    active = counted(sum(not is_over(run.status) for run in runs), "run")
    return PanelRows(f"RUNS AND JOBS ({active}, {counted(len(others), 'other job')})", rows, "no runs and no jobs")


def _run_names(run: ObservedRun) -> list[str]:
    status = run.status
    return [status.run, status.name, status.user, *(node.name for node in status.nodes), *map(str, status.jobs)]


def _run_row(run: ObservedRun, now: float) -> Row:
    status, progress = run.status, run.progress
    figures = progress.figures if progress else {}
    over = is_over(status)
    return cells(
        status.run,
        status.user,
        _run_state(run),
        str(status.wanted_nodes) if over else f"{len(members(status))}/{status.wanted_nodes}",
        str(status.generation or UNKNOWN),
        f"{progress.step:,}" if progress else UNKNOWN,
        _number(figures.get("loss")),
        f"{_number(figures['step_s'])} s" if figures.get("step_s") else UNKNOWN,
        f"{100 * progress.account.share:.0f} %" if progress else UNKNOWN,
        clock(elapsed_s(status, now)) if status.started else UNKNOWN,
        " ".join(status.message.split()),
    )


def _number(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.4g}"


def _run_state(run: ObservedRun) -> TonedText:
    status = run.status
    if is_over(status):
        return TonedText(ended_state(status), Tone.FAINT if status.exit_code == 0 else Tone.BAD)
    if run.silent:
        return TonedText(f"{status.phase.value}, no coordinator", Tone.BAD)
    impact = run_impact(run)
    tone = {"unaffected": Tone.GOOD, "queued": Tone.PLAIN}.get(impact.value, Tone.WARNING) if impact else Tone.PLAIN
    return TonedText(status.phase.value, tone)


def _job_row(job: JobStatus) -> Row:
    nodes = len(_nodes_of(job))
    running = job.state is JobState.RUNNING
    return cells(
        job.name,
        job.user,
        TonedText(job.state.value.lower(), Tone.GOOD if running else Tone.PLAIN),
        str(nodes or UNKNOWN),
        *[UNKNOWN] * 5,
        clock(job.elapsed_s) if nodes else UNKNOWN,
        f"job {job.id} {job.reason or job.nodes}",
    )


# The panel of events


def _event_panel(facts: LiveFacts, wanted: Filter) -> PanelRows:
    events = [event for event in reversed(facts.overview.events) if wanted.takes(event.node, event.text)]
    return PanelRows("EVENTS (newest first)", [_event_row(event) for event in events], "no events yet")


def _event_row(event: Event) -> Row:
    kind = "" if event.node else f"{event.kind.value} "  # the text of a node's event already contains its kind
    at = time.strftime("%m-%d %H:%M:%S", time.localtime(event.at))
    return cells(at, event.node or UNKNOWN, TonedText(f"{kind}{event.text}", _STAGES.get(event.stage, Tone.PLAIN)))


def _title(name: str, shown: int, total: int) -> str:
    return f"{name} ({total})" if shown == total else f"{name} ({shown} of {total})"
