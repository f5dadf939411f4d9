"""The verdict on a cluster. Pure: `assess` turns an overview into a verdict, and `describe` turns the verdict into a
line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from dalsegno.overview.conditions import NodeCondition, RunImpact, node_conditions, run_impact
from dalsegno.overview.facts import FailingScrape, Overview
from dalsegno.targets.base import ClusterPhase, DaemonStatus, counted


class VerdictCode(Enum):
    """The kinds of problems of a cluster. The most urgent kind is first."""

    INCOMPLETE = "incomplete"  # the cluster is partly created or removed, or a change is not finished
    STOPPED = "stopped"  # no daemon runs
    SLURM_SILENT = "slurm-silent"
    CONTROLLER_SILENT = "controller-silent"
    DAEMONS_DEAD = "daemons-dead"
    NODES_FAULTY = "nodes-faulty"  # nodes have faults, and no repair is in progress
    NODES_REPAIRED = "nodes-repaired"  # the controller or the platform is repairing nodes, or will repair them
    TRAINING_AFFECTED = "training-affected"
    NODES_LEFT_ALONE = "nodes-left-alone"
    NODES_SUSPECTED = "nodes-suspected"
    RECOVERY_PAUSED = "recovery-paused"
    SCRAPES_FAILING = "scrapes-failing"  # Prometheus cannot read an exporter, although the daemon runs
    PROBLEMS = "problems"  # other problems, such as injected faults
    HEALTHY = "healthy"


class VerdictLevel(Enum):
    """The urgency of a verdict."""

    GOOD = "good"
    WARN = "warn"
    BAD = "bad"


_WARNINGS = (
    VerdictCode.NODES_REPAIRED,
    VerdictCode.NODES_LEFT_ALONE,
    VerdictCode.NODES_SUSPECTED,
    VerdictCode.SCRAPES_FAILING,
)
_CODES = {
    NodeCondition.LEFT_ALONE: VerdictCode.NODES_LEFT_ALONE,
    NodeCondition.SUSPECTED: VerdictCode.NODES_SUSPECTED,
    **dict.fromkeys(
        (
            NodeCondition.NEEDS_ADMIN,
            NodeCondition.HELD_BACK,
            NodeCondition.OFF,
            NodeCondition.OUT,
            NodeCondition.NOT_RESPONDING,
            NodeCondition.UNKNOWN,
        ),
        VerdictCode.NODES_FAULTY,
    ),
}
_SLURM_DAEMONS = ("slurmctld", "munged")
_CONTROLLER = "controller"
_HARMED = (RunImpact.NO_COORDINATOR, RunImpact.RESTARTING, RunImpact.WAITING)
_ALONE = {VerdictCode.INCOMPLETE, VerdictCode.STOPPED}  # if one of these applies, no other code is reported


@dataclass(frozen=True)
class NodeGroup:
    """Nodes in the same condition."""

    condition: NodeCondition
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class RunGroup:
    """Runs with the same impact. `size` and `wanted` are the current and requested node counts of the first run."""

    impact: RunImpact
    runs: tuple[str, ...]
    size: int = 0
    wanted: int = 0


@dataclass(frozen=True)
class ClusterVerdict:
    """The verdict: all codes that apply, the most urgent first, and what they are about."""

    codes: tuple[VerdictCode, ...]
    phase: ClusterPhase = ClusterPhase.UP
    total_nodes: int = 0
    nodes: tuple[NodeGroup, ...] = ()  # only nodes that are not healthy
    runs: tuple[RunGroup, ...] = ()  # only runs that are not over
    all_runs: bool = True
    dead: tuple[DaemonStatus, ...] = ()  # daemons that do not run, except those of nodes that are out of service
    problems: int = 0
    # scrapes that fail, except those of dead daemons and of nodes out of service
    failing_scrapes: tuple[FailingScrape, ...] = ()

    @property
    def code(self) -> VerdictCode:
        return self.codes[0]

    @property
    def level(self) -> VerdictLevel:
        if self.code is VerdictCode.HEALTHY:
            return VerdictLevel.GOOD
        return VerdictLevel.WARN if self.code in _WARNINGS else VerdictLevel.BAD

    @property
    def other_daemons(self) -> tuple[DaemonStatus, ...]:
        """The dead daemons that no other code reports."""
        slurm = _SLURM_DAEMONS if VerdictCode.SLURM_SILENT in self.codes else ()
        controller = (_CONTROLLER,) if VerdictCode.CONTROLLER_SILENT in self.codes else ()
        return tuple(daemon for daemon in self.dead if daemon.name not in (*slurm, *controller))


def assess(overview: Overview) -> ClusterVerdict:
    """Return the verdict on a cluster."""
    status = overview.status
    conditions = node_conditions(overview)
    verdict = ClusterVerdict(
        codes=tuple(_silences(overview)),
        phase=status.phase,
        total_nodes=len(conditions),
        nodes=tuple(_node_groups(conditions)),
        runs=tuple(_run_groups(overview)),
        all_runs=overview.all_runs,
        dead=tuple(_dead_daemons(status.daemons, conditions)),
        problems=len(status.problems),
        failing_scrapes=tuple(_failing_scrapes(overview, conditions)),
    )
    codes = {*verdict.codes, *_find_codes(overview, verdict)}
    if codes & _ALONE:
        codes &= _ALONE
    return replace(verdict, codes=tuple(code for code in VerdictCode if code in codes) or (VerdictCode.HEALTHY,))


def _silences(overview: Overview) -> Iterator[VerdictCode]:
    if not overview.slurm_answers:
        yield VerdictCode.SLURM_SILENT
    if overview.has_controller and overview.controller is None:
        yield VerdictCode.CONTROLLER_SILENT


def _find_codes(overview: Overview, verdict: ClusterVerdict) -> Iterator[VerdictCode]:
    status = overview.status
    if status.phase in _PHASES:
        yield VerdictCode.INCOMPLETE
    if status.daemons and not any(daemon.running for daemon in status.daemons):
        yield VerdictCode.STOPPED
    if verdict.other_daemons:
        yield VerdictCode.DAEMONS_DEAD
    yield from (_CODES.get(group.condition, VerdictCode.NODES_REPAIRED) for group in verdict.nodes)
    if any(group.impact in _HARMED for group in verdict.runs):
        yield VerdictCode.TRAINING_AFFECTED
    if overview.controller and overview.controller.paused:
        yield VerdictCode.RECOVERY_PAUSED
    if verdict.failing_scrapes:
        yield VerdictCode.SCRAPES_FAILING
    explained = verdict.dead or verdict.nodes or verdict.codes
    if status.phase is ClusterPhase.DEGRADED and not explained:
        yield VerdictCode.PROBLEMS


def _node_groups(conditions: dict[str, NodeCondition]) -> Iterator[NodeGroup]:
    for condition in NodeCondition:
        nodes = tuple(name for name, each in conditions.items() if each is condition)
        if nodes and not condition.healthy:
            yield NodeGroup(condition, nodes)


def _run_groups(overview: Overview) -> Iterator[RunGroup]:
    for impact in RunImpact:
        found = [run.status for run in overview.runs if run_impact(run) is impact]
        if found:
            size, wanted = found[0].group_size, found[0].wanted_nodes
            yield RunGroup(impact, tuple(status.run for status in found), size, wanted)


def _dead_daemons(daemons: Iterable[DaemonStatus], conditions: dict[str, NodeCondition]) -> Iterator[DaemonStatus]:
    """Yield the dead daemons, except those on a node that is out of service, where daemons need not run."""
    for daemon in daemons:
        if not daemon.running and _should_run(daemon.host, conditions):
            yield daemon


def _should_run(host: str, conditions: dict[str, NodeCondition]) -> bool:
    running = (NodeCondition.IN_SERVICE, NodeCondition.LENT, NodeCondition.SPARE, NodeCondition.SUSPECTED)
    return conditions.get(host, NodeCondition.IN_SERVICE) in running


def _failing_scrapes(overview: Overview, conditions: dict[str, NodeCondition]) -> Iterator[FailingScrape]:
    """Yield the exporters that Prometheus cannot read, unless a dead daemon or the node's condition explains it."""
    dead = {daemon.host for daemon in overview.status.daemons if not daemon.running}
    for scrape in overview.failing_scrapes:
        if scrape.host not in dead and _should_run(scrape.host, conditions):
            yield scrape


# The verdict as text


_PHASES = {
    ClusterPhase.HALF_MADE: "the cluster is only partly created",
    ClusterPhase.CHANGING: "a change of the cluster is not finished",
    ClusterPhase.HALF_REMOVED: "the removal of the cluster is not finished",
    ClusterPhase.GONE: "the cluster is gone",
}
_NODES = {  # the text of each condition, in singular and plural
    NodeCondition.NEEDS_ADMIN: ("needs an administrator", "need an administrator"),
    NodeCondition.HELD_BACK: ("has a fault and is not repaired", "have a fault and are not repaired"),
    NodeCondition.OFF: ("is off", "are off"),
    NodeCondition.OUT: ("is out of service", "are out of service"),
    NodeCondition.NOT_RESPONDING: ("does not respond to slurmctld", "do not respond to slurmctld"),
    NodeCondition.UNKNOWN: ("is unknown to slurmctld", "are unknown to slurmctld"),
    NodeCondition.TAKEN: ("is ended by its cloud provider", "are ended by their cloud provider"),
    NodeCondition.DOWN: ("is down and will be repaired", "are down and will be repaired"),
    NodeCondition.DRAINED: ("is drained and will be repaired", "are drained and will be repaired"),
    NodeCondition.REPAIRING: ("is being repaired", "are being repaired"),
    NodeCondition.RESETTING: ("is being reset", "are being reset"),
    NodeCondition.REBOOTING: ("is being rebooted", "are being rebooted"),
    NodeCondition.REPLACING: ("is being replaced", "are being replaced"),
    NodeCondition.VALIDATING: ("is being validated", "are being validated"),
    NodeCondition.LEFT_ALONE: (
        "is kept out of service by an administrator",
        "are kept out of service by an administrator",
    ),
    NodeCondition.SUSPECTED: ("may have a fault", "may have a fault"),
}
_RUNS = {
    RunImpact.NO_COORDINATOR: ("has no coordinator", "have no coordinator"),
    RunImpact.RESTARTING: ("is restarting", "are restarting"),
    RunImpact.WAITING: ("waits for nodes", "wait for nodes"),
    RunImpact.SMALLER: ("continues on {size} of {wanted} nodes", "continue on fewer nodes"),
}
_EXPORTERS = {"node": "node_exporter", "dalsegno": "the observer"}  # maps a Prometheus job to its exporter
_MOST_GROUPS = 3  # maximum number of node groups that the line names


def describe(verdict: ClusterVerdict) -> str:
    """Return the verdict as one line for people."""
    if verdict.phase in _PHASES:
        return _PHASES[verdict.phase]
    if VerdictCode.STOPPED in verdict.codes:
        return "no daemon of the cluster is running"
    faults = [*_daemon_clauses(verdict), *_node_clause(verdict)]
    remarks = list(_remarks(verdict))
    training = _training_clause(verdict, bool(faults))
    if not faults and remarks:
        faults, remarks = [f"healthy, but {' and '.join(remarks)}"], []
    if not faults:
        faults = ["the cluster is healthy" if training else "healthy"]
    return "; ".join([*faults, *remarks, *([training] if training else [])])


def _daemon_clauses(verdict: ClusterVerdict) -> Iterator[str]:
    dead = {daemon.name for daemon in verdict.dead}
    if VerdictCode.SLURM_SILENT in verdict.codes:
        culprit = next((name for name in _SLURM_DAEMONS if name in dead), "")
        yield f"{culprit} is not running" if culprit else "slurmctld does not answer"
    if VerdictCode.CONTROLLER_SILENT in verdict.codes:
        yield f"the controller {'is not running' if _CONTROLLER in dead else 'does not answer'}, nodes are not repaired"
    others = verdict.other_daemons
    if len(others) == 1:
        yield f"{others[0].name} on {others[0].host} is not running"
    elif others:
        yield f"{len(others)} daemons are not running"


def _node_clause(verdict: ClusterVerdict) -> Iterator[str]:
    """Yield a clause such as `1 of 5 nodes is being replaced, 2 are off`, unless all nodes are healthy."""
    parts: list[str] = []
    for group in verdict.nodes[:_MOST_GROUPS]:
        count = len(group.nodes)
        number = f"{count} of {counted(verdict.total_nodes, 'node')}" if not parts else str(count)
        parts.append(f"{number} {_NODES[group.condition][count > 1]}")
    more = sum(len(group.nodes) for group in verdict.nodes[_MOST_GROUPS:])
    if parts:
        yield ", ".join([*parts, *([f"{more} more {'has' if more == 1 else 'have'} other problems"] if more else [])])


def _remarks(verdict: ClusterVerdict) -> Iterator[str]:
    if VerdictCode.RECOVERY_PAUSED in verdict.codes:
        yield "automatic recovery is paused"
    scrapes = verdict.failing_scrapes
    if scrapes:
        more = f" and {len(scrapes) - 1} more" if len(scrapes) > 1 else ""
        yield f"Prometheus cannot read {_EXPORTERS.get(scrapes[0].job, scrapes[0].job)} on {scrapes[0].host}{more}"
    if VerdictCode.PROBLEMS in verdict.codes:
        yield f"there {'is' if verdict.problems == 1 else 'are'} {counted(verdict.problems, 'warning')}"


def _training_clause(verdict: ClusterVerdict, faulty: bool) -> str:
    """Return the clause about training; "" if there is none. If the cluster has no fault, the clause is only about runs
    that are impaired."""
    shown = [group for group in verdict.runs if group.impact in (_HARMED if not faulty else _RUNS)]
    if shown:
        return ", ".join(_describe_runs(group) for group in shown)
    if not faulty or not verdict.runs:
        return ""
    queued = next((len(group.runs) for group in verdict.runs if group.impact is RunImpact.QUEUED), 0)
    waiting = f"{counted(queued, 'run')} {'waits' if queued == 1 else 'wait'} in the queue" if queued else ""
    trains = any(group.impact is RunImpact.UNAFFECTED for group in verdict.runs)
    unaffected = f"{'' if verdict.all_runs else 'your '}training is not affected" if trains else ""
    return ", ".join(filter(None, (unaffected, waiting)))


def _describe_runs(group: RunGroup) -> str:
    one, several = _RUNS[group.impact]
    if len(group.runs) == 1:
        return f"run {group.runs[0]} {one.format(size=group.size, wanted=group.wanted)}"
    return f"{len(group.runs)} runs {several}"


def verdict_message(verdict: ClusterVerdict) -> dict[str, Any]:
    """Return the verdict for `--json`."""
    return {
        "code": verdict.code.value,
        "text": describe(verdict),
        "codes": [code.value for code in verdict.codes],
        "nodes": [{"condition": group.condition.value, "nodes": list(group.nodes)} for group in verdict.nodes],
        "runs": [{"impact": group.impact.value, "runs": list(group.runs)} for group in verdict.runs],
    }
