"""The events of a drill, and the cost of each fault."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Any

from dalsegno.recovery.journal.event import Event, EventKind, EventStage, read_event
from dalsegno.runs.journal import Entry, RunEvent

IN_PROGRESS_S = 0.5  # a step that was in progress when a fault hit may be recorded this much later
MAX_LEAVE_S = 10.0  # maximum time from the drain of a node until the run has left it


class DrillMarkKind(Enum):
    """What a mark stands for. The values are the labels in reports."""

    KNOWN = "known"
    DRAINED = "drained"
    VALIDATED = "validated"
    RETURNED = "returned"
    GENERATION = "generation"
    INJECTED = "injected"


@dataclass(frozen=True)
class FaultImpact:
    """An injected fault and its expected effects."""

    number: int
    fault: str
    node: str
    at: float  # seconds since 1970, like all times in this module
    stops: bool = True  # whether training stops
    needs_repair: bool = True  # whether the controller should repair the node
    without_spare: bool = False  # whether the run lost a node while no spare was ready


@dataclass(frozen=True)
class DrillMark:
    """An event that the run's coordinator or the cluster's controller recorded."""

    at: float
    # An EventKind if no DrillMarkKind fits, for example for a reboot, a note, or an action that has begun or failed.
    kind: DrillMarkKind | EventKind
    node: str = ""
    text: str = ""


@dataclass(frozen=True)
class TrainedStep:
    """A step that rank 0 completed."""

    at: float
    step: int
    loss: float
    generation: int


@dataclass(frozen=True)
class Recovery:
    """The recovery from a fault. `resumed_s` is how long training stopped; the other times are in seconds after the
    fault. None means that the event was not seen."""

    impact: FaultImpact
    known_s: float | None = None
    drained_s: float | None = None
    resumed_s: float | None = None
    returned_s: float | None = None
    steps_lost: int = 0
    stopped: bool = True  # whether training stopped


@dataclass(frozen=True)
class TrainingStop:
    """A stop of training that is not the direct effect of a fault."""

    impact: FaultImpact | None  # the last fault before the stop
    after_s: float  # time from that fault to the stop
    for_s: float  # duration of the stop
    why: str = ""  # the recorded cause; "" if unknown


@dataclass(frozen=True)
class Drill:
    """A whole drill. `exact` says whether the weights equal those of an undisturbed run; None if not tested."""

    seed: int
    nodes: tuple[str, ...]
    started: float
    ended: float
    impacts: tuple[FaultImpact, ...]
    marks: tuple[DrillMark, ...]
    steps: tuple[TrainedStep, ...]
    goodput: Mapping[str, float] = field(default_factory=dict)  # seconds spent, by kind
    exit_code: int = 0
    orphans: int = 0
    exact: bool | None = None
    held_back: Mapping[str, str] = field(default_factory=dict)  # nodes that the controller may not repair, and why
    troubles: str = ""  # failures of the undisturbed run, which the drill did not inject

    @property
    def recoveries(self) -> tuple[Recovery, ...]:
        return tuple(recovery(impact, self.impacts, self.marks, self.steps) for impact in self.impacts)

    @property
    def more_stops(self) -> tuple[TrainingStop, ...]:
        """Return the stops of training that are not the direct effect of a fault."""
        return find_other_stops(self.impacts, self.marks, self.steps)

    @property
    def last_event_at(self) -> float:
        """Return the time of the last fault, mark or step, or the end of the drill if that was earlier."""
        times = (
            [impact.at for impact in self.impacts] + [mark.at for mark in self.marks] + [step.at for step in self.steps]
        )
        return min(max(times, default=self.ended), self.ended)

    @property
    def steps_lost(self) -> int:
        """Return how many steps were repeated because they were not saved."""
        return sum(mark_repeated(self.steps))

    @property
    def share(self) -> float:
        """Return the productive share of the run's time."""
        total = sum(self.goodput.values())
        return self.goodput.get("productive", 0.0) / total if total else 0.0

    @property
    def survived(self) -> bool:
        return self.exit_code == 0 and not self.orphans and self.exact is not False


def recovery(
    impact: FaultImpact, impacts: Sequence[FaultImpact], marks: Sequence[DrillMark], steps: Sequence[TrainedStep]
) -> Recovery:
    """Return the recovery from a fault.

    If another fault that needs a repair hits the same node later, a detection after that belongs to the later fault.
    A drain and a return belong to both, because a single repair removes all faults of a node.
    """
    later = [each.at for each in impacts if each.node == impact.node and each.at > impact.at and each.needs_repair]
    until = min(later, default=float("inf"))
    on_node = [mark for mark in marks if mark.node == impact.node]

    def after(kind: DrillMarkKind, since: float = impact.at, before: float = float("inf")) -> float | None:
        return min(
            (mark.at - impact.at for mark in on_node if mark.kind is kind and since <= mark.at < before), default=None
        )

    was_drained = impact.needs_repair and _was_drained(impact, on_node)
    drained_s = 0.0 if was_drained else after(DrillMarkKind.DRAINED) if impact.needs_repair else None
    first = [after(DrillMarkKind.KNOWN, before=until), drained_s]
    return Recovery(
        impact,
        known_s=min((known for known in first if known is not None), default=None),
        drained_s=drained_s,
        resumed_s=stop_duration_s(impact, steps) if impact.stops else None,
        returned_s=after(DrillMarkKind.RETURNED, impact.at + drained_s) if drained_s is not None else None,
        steps_lost=count_lost_steps(impact, impacts, steps),
        stopped=impact.stops and not _trained_on(impact, steps),
    )


def _was_drained(impact: FaultImpact, on_node: Sequence[DrillMark]) -> bool:
    """Return whether the node was already drained when the fault hit: a run leaves a drained node a moment later."""
    before = [
        mark.kind
        for mark in on_node
        if mark.kind in (DrillMarkKind.DRAINED, DrillMarkKind.RETURNED) and mark.at < impact.at
    ]
    return bool(before) and before[-1] is DrillMarkKind.DRAINED


def stop_duration_s(impact: FaultImpact, steps: Sequence[TrainedStep]) -> float | None:
    """Return how long training stopped; None if it has not resumed in a later generation.

    The stop begins with the last step of the generation that was hit, which may come some time after the fault. It ends
    with the first step of a later generation.
    """
    hit = max((step.generation for step in steps if step.at <= impact.at), default=0)
    stopped = max((step.at for step in steps if step.generation <= hit), default=impact.at)
    first = min((step.at for step in steps if step.at > impact.at and step.generation > hit), default=None)
    return None if first is None else first - max(stopped, impact.at)


def find_other_stops(
    impacts: Sequence[FaultImpact], marks: Sequence[DrillMark], steps: Sequence[TrainedStep]
) -> tuple[TrainingStop, ...]:
    """Return the stops between generations that are not the direct effect of a fault."""
    first, last = dict[int, float](), dict[int, float]()
    for step in steps:
        first[step.generation] = min(step.at, first.get(step.generation, step.at))
        last[step.generation] = max(step.at, last.get(step.generation, step.at))
    known = {_generation_after(impact, steps) for impact in impacts if impact.stops}
    pairs = [(old, new) for old, new in pairwise(sorted(first)) if new not in known]
    return tuple(_stop(last[old], first[new], impacts, marks) for old, new in pairs)


def _stop(began: float, ended: float, impacts: Sequence[FaultImpact], marks: Sequence[DrillMark]) -> TrainingStop:
    missed = [mark for mark in marks if mark.kind is DrillMarkKind.KNOWN and began <= mark.at <= ended]
    taken = [mark for mark in marks if mark.kind is DrillMarkKind.DRAINED and began - MAX_LEAVE_S <= mark.at <= ended]
    hit = {mark.node for mark in (missed or taken)}
    before = [each for each in impacts if each.at <= ended]
    impact = max([each for each in before if each.node in hit] or before, key=lambda each: each.at, default=None)
    why = f"{missed[0].node}: {missed[0].text}" if missed else ""
    return TrainingStop(impact, began - impact.at if impact else 0.0, ended - began, why)


def _generation_after(impact: FaultImpact, steps: Sequence[TrainedStep]) -> int | None:
    """Return the first generation that trained after the generation that a fault hit; None if there is none."""
    hit = max((step.generation for step in steps if step.at <= impact.at), default=0)
    return min((step.generation for step in steps if step.at > impact.at and step.generation > hit), default=None)


def _trained_on(impact: FaultImpact, steps: Sequence[TrainedStep]) -> bool:
    """Return whether the run continued to train after the fault, in the same generation, until it ended."""
    after = [step for step in steps if step.at > impact.at + IN_PROGRESS_S]
    return bool(after) and _generation_after(impact, steps) is None


def count_lost_steps(impact: FaultImpact, impacts: Sequence[FaultImpact], steps: Sequence[TrainedStep]) -> int:
    """Return the number of steps that were repeated between this fault and the next."""
    until = min((each.at for each in impacts if each.at > impact.at), default=float("inf"))
    return sum(lost for step, lost in zip(steps, mark_repeated(steps), strict=True) if impact.at < step.at <= until)


def mark_repeated(steps: Sequence[TrainedStep]) -> list[int]:
    """Return one number for each step, in order: 1 if the step had already been completed, otherwise 0."""
    furthest, found = -1, []
    for step in steps:
        found.append(int(step.step <= furthest))
        furthest = max(furthest, step.step)
    return found


# Marks from the records of the coordinator and of the controller


def marks_of_run(entries: Iterable[Entry]) -> Iterator[DrillMark]:
    for entry in entries:
        at, node = float(entry["at"]), str(entry.get("node", ""))
        if entry.get("event") == RunEvent.LOST:
            yield DrillMark(at, DrillMarkKind.KNOWN, node, f"lost by the run: {entry.get('why')}")
        elif entry.get("event") == RunEvent.COLD:
            yield DrillMark(at, DrillMarkKind.KNOWN, node, str(entry.get("why")))
        elif entry.get("event") == RunEvent.FAILED and not entry.get("noise"):
            yield DrillMark(at, DrillMarkKind.KNOWN, node, f"rank {entry.get('rank')} {entry.get('what')}")
        elif entry.get("event") == RunEvent.GENERATION:
            nodes = ", ".join(map(str, entry.get("nodes", ())))
            yield DrillMark(at, DrillMarkKind.GENERATION, "", f"generation {entry.get('generation')} on {nodes}")


def describe_run_failures(entries: Iterable[Entry]) -> str:
    """Return a text with the number of restarts of a run and the first reason; "" if it was undisturbed."""
    known = list(entries)
    again = (
        max((int(entry["generation"]) for entry in known if entry.get("event") == RunEvent.GENERATION), default=1) - 1
    )
    first = next((mark for mark in marks_of_run(known) if mark.kind is DrillMarkKind.KNOWN), None)
    why = f"{first.node}: {first.text}" if first else ""
    if again < 1:
        return why
    return f"it restarted {again} time{'s' * (again != 1)}" + (f", first because of {why}" if why else "")


_DONE = {
    EventKind.DRAIN: DrillMarkKind.DRAINED,
    EventKind.SET_DOWN: DrillMarkKind.DRAINED,
    EventKind.VALIDATE: DrillMarkKind.VALIDATED,
    EventKind.RETURN: DrillMarkKind.RETURNED,
    EventKind.HOLD: DrillMarkKind.RETURNED,
}


def marks_of_controller(events: Iterable[Mapping[str, Any]]) -> Iterator[DrillMark]:
    """Yield the controller's events as marks. An event for which no DrillMarkKind fits keeps its own kind.

    Requests of people are left out, because the drill has its own marks of the faults that it injects.
    """
    for event in map(read_event, events):
        if event.kind is not EventKind.REQUEST:
            yield DrillMark(event.at, _mark_kind(event), event.node, event.text)


def _mark_kind(event: Event) -> DrillMarkKind | EventKind:
    if event.stage is EventStage.SUSPECTED:
        return DrillMarkKind.KNOWN
    return _DONE.get(event.kind, event.kind) if event.stage is EventStage.DONE else event.kind


# Notes of the training script


class TrainingNotes:
    """The file to which rank 0 of every generation appends its steps. The drill reads it while it grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.steps: list[TrainedStep] = []
        self.last: TrainedStep | None = (
            None  # last step of the newest generation; a lost node may still append steps of an older one
        )
        self.weights = ""  # digest of the final weights
        self._read_to = 0

    def read(self) -> list[TrainedStep]:
        """Return the new steps. An incomplete last line is read later; a line that a crash cut off is ignored."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self._read_to)
                whole = file.read().rpartition(b"\n")[0]
        except FileNotFoundError:
            return []
        self._read_to += len(whole) + bool(whole)
        before = len(self.steps)
        for line in whole.decode(errors="replace").splitlines():
            self._take(line.split())
        return self.steps[before:]

    def _take(self, fields: list[str]) -> None:
        if len(fields) == 5 and fields[0] == "step":
            step = TrainedStep(float(fields[1]), int(fields[2]), float(fields[3]), int(fields[4]))
            self.steps.append(step)
            self.last = step if self.last is None or step.generation >= self.last.generation else self.last
        elif len(fields) == 2 and fields[0] == "weights":
            self.weights = fields[1]
