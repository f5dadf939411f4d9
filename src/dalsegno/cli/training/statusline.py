"""The state of a run as text: one live line, one message per change, or one word in a table."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dalsegno.cli import out
from dalsegno.runs.journal import Entry, RunEvent
from dalsegno.runs.status import NodeRole, RunCause, RunNodeStatus, RunPhase, RunStatus

if TYPE_CHECKING:
    from dalsegno.runs.folder import RunFolder
    from dalsegno.runs.status import RunStatus


_TAKING_PART = (NodeRole.MEMBER, NodeRole.READY)


@dataclass(frozen=True)
class Cause:
    """The event that ended a generation, as text, and the node of the event."""

    text: str = ""
    node: str = ""


NOTHING = Cause()


def live_text(status: RunStatus, now: float) -> str:
    """Return the current state as one line for the bottom of a terminal."""
    parts = [status.run, status.phase.value, nodes_text(status)]
    if status.generation:
        parts.append(f"generation {status.generation}")
    if status.restarts:
        parts.append(_count(status.restarts, "restart"))
    if status.phase in (RunPhase.WAITING, RunPhase.STARTING, RunPhase.RESTARTING) and status.message:
        parts.append(status.message)
    if is_smaller(status):
        parts.append("smaller than requested: this changes the effective batch")
    return "  ".join([*parts, clock(elapsed_s(status, now))])


def describe_changes(
    before: RunStatus | None, after: RunStatus, cause: Cause = NOTHING, announced: int = 0
) -> list[str]:
    """Return a message for each change from one status to the next.

    `cause` is the event that ended the last generation. Generations up to `announced` were reported before.
    Notes are left out: they are in the journal, where each appears once.
    """
    news = [f"{_label(node)} is lost" for node in _lost(before, after) if node.name != cause.node]
    if after.phase is RunPhase.WAITING:
        return [*news, *_waiting(before, after)]
    if after.phase is RunPhase.STARTING and (before is None or before.phase is not RunPhase.STARTING):
        news.append(f"run {after.run} starts on {_count(len(after.nodes) or after.wanted_nodes, 'node')}")
    elif (
        after.phase is RunPhase.RESTARTING
        and after.started
        and (before is None or before.phase is not RunPhase.RESTARTING)
    ):
        news.append(f"run {after.run} restarts{f': {cause.text}' if cause.text else ''}")
    elif after.phase is RunPhase.RUNNING and after.generation > announced and not _same_generation(before, after):
        news.append(_generation(after, "" if cause_was_shown(before) else cause.text))
    is_state = after.note_at is None and after.message and not is_smaller(after)
    if before is not None and is_state and before.message != after.message:
        news.append(after.message)
    return news


def _same_generation(before: RunStatus | None, after: RunStatus) -> bool:
    return before is not None and (before.phase, before.generation) == (RunPhase.RUNNING, after.generation)


def cause_was_shown(before: RunStatus | None) -> bool:
    """Return whether the last reported status was RESTARTING: the report of it named what ended the last generation."""
    return before is not None and before.phase is RunPhase.RESTARTING


def new_generations(entries: Sequence[Entry], announced: int, cause_shown: bool) -> dict[int, str]:
    """Return a message for each generation in the journal after `announced`, by the generation's number."""
    found: dict[int, str] = {}
    for place, entry in enumerate(entries):
        if entry.get("event") == RunEvent.GENERATION and int(entry["generation"]) > announced:
            cause = last_cause(entries[: place + 1]).text if found or not cause_shown else ""
            found[int(entry["generation"])] = _formed(entry, cause)
    return found


def _formed(entry: Entry, cause: str) -> str:
    nodes, each = len(entry["nodes"]), int(entry["nproc_per_node"])
    return _generation_text(int(entry["generation"]), nodes, nodes * each, int(entry.get("wanted", nodes)), cause)


def last_cause(entries: Iterable[Entry]) -> Cause:
    """Return the event that ended the last generation.

    It is the first failed rank in the journal, otherwise the first node that was lost or whose warm parent died. A lost
    spare does not end a generation.
    """
    now: list[Entry] = []
    before: list[Entry] = []
    members: Sequence[str] = ()
    for entry in entries:
        if entry.get("event") == RunEvent.GENERATION:
            before, now, members = now, [], entry.get("nodes", ())
        elif _ends_generation(entry, members):
            now.append(entry)
    causes = sorted(now or before, key=lambda entry: entry["event"] != RunEvent.FAILED)
    return Cause(_cause_text(causes[0]), str(causes[0].get("node", ""))) if causes else NOTHING


def _ends_generation(entry: Entry, members: Sequence[str]) -> bool:
    if entry.get("event") == RunEvent.COLD:
        return entry.get("node") in members
    if entry.get("event") == RunEvent.LOST:
        return bool(entry.get("was", NodeRole.MEMBER.value) == NodeRole.MEMBER.value)
    return entry.get("event") == RunEvent.FAILED and not entry.get("noise")


def describe_end(status: RunStatus) -> str:
    """Return the final message about a run that has ended."""
    took = clock(elapsed_s(status, status.ended or status.updated))
    facts = [f"after {took}"]
    if status.generation > 1:
        facts.append(_count(status.generation, "generation"))
    if status.lost_nodes:
        facts.append(f"{_count(status.lost_nodes, 'node')} lost")
    end = "is done" if status.exit_code == 0 else f"ended with code {status.exit_code}"
    why = f": {status.message}" if status.message and status.exit_code != 0 else ""
    return f"run {status.run} {end} {', '.join(facts)}{why}"


def nodes_text(status: RunStatus) -> str:
    """Return, for example, `3/4 nodes and 1 spare`: three nodes are in training, four were requested."""
    spares = sum(node.state is NodeRole.SPARE for node in status.nodes)
    extra = f" and {_count(spares, 'spare')}" if spares else ""
    return f"{len(members(status))}/{_count(status.wanted_nodes, 'node')}{extra}"


def members(status: RunStatus) -> list[str]:
    return [node.name for node in status.nodes if node.state in _TAKING_PART]


def is_smaller(status: RunStatus) -> bool:
    return status.phase is RunPhase.RUNNING and 0 < status.group_size < status.wanted_nodes


def elapsed_s(status: RunStatus, now: float) -> float:
    """Return the time from the start of the first generation until now, or until the run's end. If no generation has
    started, count from the submission of the run."""
    return max(0.0, (status.ended or now) - (status.started or status.created))


def clock(seconds: float) -> str:
    """Format a time as squeue does: 1-02:03:04, 2:03:04, 0:05."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}-{hour:02}:{minute:02}:{second:02}"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


def _generation(after: RunStatus, cause: str) -> str:
    wanted = after.wanted_nodes if is_smaller(after) else 0
    return _generation_text(after.generation, after.group_size, after.world_size, wanted, cause)


def _generation_text(number: int, nodes: int, processes: int, wanted: int, cause: str) -> str:
    why = f" ({cause})" if cause and number > 1 else ""
    smaller = f"; smaller than the {_count(wanted, 'node')} requested, which changes the effective batch"
    size = f"{_count(nodes, 'node')}, {_count(processes, 'process', 'processes')}"
    return f"generation {number}: {size}{why}{smaller if nodes < wanted else ''}"


def _cause_text(entry: Entry) -> str:
    if entry["event"] == RunEvent.LOST:
        return f"{entry.get('node')} is lost: {entry.get('why')}"
    if entry["event"] == RunEvent.COLD:
        return f"{entry.get('node')}: {entry.get('why')}, and its workers with it"
    return f"rank {entry.get('rank')} on {entry.get('node')} {entry.get('what')}"


def _waiting(before: RunStatus | None, after: RunStatus) -> list[str]:
    if before is not None and (before.phase, before.message) == (after.phase, after.message):
        return []
    if after.cause is RunCause.HANDED_OVER:
        return [f"run {after.run} is submitted"]
    return [f"run {after.run} waits in the queue{f': {after.message}' if after.message else ''}"]


def _lost(before: RunStatus | None, after: RunStatus) -> list[RunNodeStatus]:
    """Return the nodes that were lost between two statuses. A node whose job ended normally is not lost."""
    if before is None or after.lost_nodes <= before.lost_nodes:
        return []
    here = {node.name for node in after.nodes}
    return [node for node in before.nodes if node.name not in here]


def _label(node: RunNodeStatus) -> str:
    return f"{'spare' if node.state is NodeRole.SPARE else 'node'} {node.name}"


def _count(count: int, noun: str, plural: str = "") -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {plural or noun + 's'}"


def state_of(status: RunStatus, now: float) -> str:
    """Return the run's phase, or how the run ended. Add whether its coordinator has died or is silent."""
    from dalsegno.runs.status import coordinator_is_dead, is_over, silent_s

    if is_over(status):
        return ended_state(status)
    phase = "ending" if status.over else status.phase.value
    if coordinator_is_dead(status):
        return f"{status.phase.value}, no coordinator"
    silent = silent_s(status, now)
    return phase if silent is None else f"{phase}, silent for {age(silent)}"


def ended_state(status: RunStatus) -> str:
    """Return how a run ended: done, cancelled, lost or failed."""
    if status.exit_code == 0:
        return "done"
    if status.cause.cancelled:
        return "cancelled"
    return "lost" if status.cause is RunCause.CLUSTER_GONE else "failed"


def age(seconds: float) -> str:
    """Return a rough age: 40s, 12m, 5h, 3d."""
    for unit, size in (("d", 86_400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{int(seconds // size)}{unit}"
    return f"{max(0, int(seconds))}s"


def facts_of(run: RunFolder, status: RunStatus) -> dict[str, Any]:
    from dalsegno.cli.training.watch import job_ids
    from dalsegno.spec.facts import facts_to_json

    known = {"state": state_of(status, time.time()), "folder": str(run.root.resolve()), "jobs": job_ids(run, status)}
    return {**facts_to_json(status), **known}


def status_of(run: RunFolder) -> RunStatus | None:
    """Return a run's status, marked as lost if its cluster is gone. If it cannot be read, warn and return None."""
    from dalsegno.cli.training.watch import cluster_is_gone, mark_lost
    from dalsegno.errors import DalsegnoError
    from dalsegno.runs.status import read_status

    try:
        status = read_status(run.status)
        return mark_lost(status) if status and not status.over and cluster_is_gone(run) else status
    except (DalsegnoError, OSError) as error:
        out.warn(f"run {run.run} cannot be read: {error}")
        return None
