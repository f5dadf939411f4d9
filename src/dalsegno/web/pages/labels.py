"""Labels that several pages share: coloured chips for states of nodes, runs and events. Pure."""

from __future__ import annotations

from enum import Enum

from dalsegno.recovery.journal.event import Event, EventKind, EventStage
from dalsegno.runs.status import RunCause, RunPhase, RunStatus
from dalsegno.slurm.facts import JobState
from dalsegno.web.html import Markup, link, tag
from dalsegno.web.snapshot import NodeView


class ChipKind(Enum):
    """The colour of a chip. The values are class names of the style sheet."""

    GOOD = "good"
    BUSY = "busy"
    WAIT = "wait"
    WARN = "warn"
    BAD = "bad"
    PLAIN = "plain"


def chip(text: object, kind: ChipKind) -> Markup:
    return tag("span", text, class_=f"chip {kind.value}")


def state_chip(node: NodeView) -> Markup:
    """Return a chip with the state of a node."""
    return tag("span", node.label, class_=f"chip {node.tone.value}")


_PHASES = {
    RunPhase.WAITING: ChipKind.WAIT,
    RunPhase.STARTING: ChipKind.WAIT,
    RunPhase.RUNNING: ChipKind.BUSY,
    RunPhase.STOPPING: ChipKind.WARN,
    RunPhase.RESTARTING: ChipKind.WARN,
    RunPhase.ENDING: ChipKind.PLAIN,
    RunPhase.UNKNOWN: ChipKind.PLAIN,
}


def run_chip(status: RunStatus) -> Markup:
    """Return a chip with the phase of a run, or with the way it ended."""
    if not status.over:
        return chip(status.phase.value, _PHASES[status.phase])
    if status.exit_code == 0:
        return chip("done", ChipKind.GOOD)
    if status.cause.cancelled:
        return chip("cancelled", ChipKind.PLAIN)
    return chip("lost" if status.cause is RunCause.CLUSTER_GONE else "failed", ChipKind.BAD)


_JOBS = {
    JobState.RUNNING: ChipKind.BUSY,
    JobState.PENDING: ChipKind.WAIT,
    JobState.COMPLETING: ChipKind.PLAIN,
    JobState.CONFIGURING: ChipKind.WAIT,
    JobState.SUSPENDED: ChipKind.WARN,
    JobState.STOPPED: ChipKind.WARN,
    JobState.COMPLETED: ChipKind.GOOD,
    JobState.CANCELLED: ChipKind.PLAIN,
}


def job_chip(state: JobState) -> Markup:
    kind = _JOBS.get(state, ChipKind.BAD if state.ended else ChipKind.PLAIN)
    return chip(state.value.lower().replace("_", " "), kind)


_KINDS = {
    EventKind.DRAIN: ChipKind.WARN,
    EventKind.SET_DOWN: ChipKind.BAD,
    EventKind.REPLACE: ChipKind.WARN,
    EventKind.REBOOT: ChipKind.WARN,
    EventKind.RESET: ChipKind.WARN,
    EventKind.VALIDATE: ChipKind.BUSY,
    EventKind.RETURN: ChipKind.GOOD,
    EventKind.REQUEST: ChipKind.BUSY,
    EventKind.AUTOMATION: ChipKind.BUSY,
}


def event_chip(event: Event) -> Markup:
    """Return the kind of an event as a chip. A failed action is always red."""
    failed = event.stage is EventStage.FAILED
    return chip(event.kind.value, ChipKind.BAD if failed else _KINDS.get(event.kind, ChipKind.PLAIN))


def run_link(run: str) -> Markup:
    return link(f"/run/{run}", run)
