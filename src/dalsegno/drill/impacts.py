"""What happened in a drill, and what each fault cost. Pure: times in, times out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from dalsegno.recovery.event import Event, EventKind, EventStage, read_event
from dalsegno.runs.journal import Entry, RunEvent

UNDER_WAY_S = 0.5  # a step in progress when the fault hit may be recorded this much later
LEAVES_S = 10.0  # from the drain of a node until the run has left it
KNOWN, DRAINED, VALIDATED, RETURNED = "known", "drained", "validated", "returned"


@dataclass(frozen=True)
class FaultImpact:
    """An injected fault. `stops`: training on the node stops; `heals`: the node should be repaired; `without_spare`: it
    took a node from the run while no spare was ready."""

    number: int
    fault: str
    node: str
    at: float  # seconds since 1970, as all times here
    stops: bool = True
    heals: bool = True
    without_spare: bool = False


@dataclass(frozen=True)
class DrillMark:
    """An event that the run's coordinator or the cluster's controller recorded."""

    at: float
    what: str  # KNOWN, DRAINED, VALIDATED, RETURNED, or another label
    node: str = ""
    text: str = ""


@dataclass(frozen=True)
class TrainedStep:
    """A step that the first rank has completed."""

    at: float
    step: int
    loss: float
    generation: int


@dataclass(frozen=True)
class Recovery:
    """The recovery from a fault, in seconds after it; None: not seen."""

    impact: FaultImpact
    known_s: float | None = None
    drained_s: float | None = None
    resumed_s: float | None = None
    returned_s: float | None = None
    steps_lost: int = 0
    stopped: bool = True  # whether training stopped, as far as known


@dataclass(frozen=True)
class TrainingStop:
    """A stop of training that is not the direct effect of a fault: after which fault, how long after it, how long, and
    why, as far as the run has recorded it."""

    impact: FaultImpact | None
    after_s: float
    for_s: float
    why: str = ""


@dataclass(frozen=True)
class Drill:
    """A whole drill. `exact`: whether the weights equal those of an undisturbed run bit for bit; None: not tested."""

    seed: int
    nodes: tuple[str, ...]
    started: float
    ended: float
    impacts: tuple[FaultImpact, ...]
    marks: tuple[DrillMark, ...]
    steps: tuple[TrainedStep, ...]
    goodput: Mapping[str, float] = field(default_factory=dict)  # seconds by kind
    exit_code: int = 0
    orphans: int = 0
    exact: bool | None = None
    held_back: Mapping[str, str] = field(default_factory=dict)  # nodes that the controller may not repair, and why
    troubles: str = ""  # faults of the undisturbed run, although none was injected

    @property
    def recoveries(self) -> tuple[Recovery, ...]:
        return tuple(recovery(impact, self.impacts, self.marks, self.steps) for impact in self.impacts)

    @property
    def more_stops(self) -> tuple[TrainingStop, ...]:
        """Return the stops that are not in the row of a fault."""
        return find_other_stops(self.impacts, self.marks, self.steps)

    @property
    def last_event_at(self) -> float:
        """Return the time of the last event."""
        times = (
            [impact.at for impact in self.impacts] + [mark.at for mark in self.marks] + [step.at for step in self.steps]
        )
        return min(max(times, default=self.ended), self.ended)

    @property
    def steps_lost(self) -> int:
        """Return how many steps were repeated because they were not saved."""
        return sum(again(self.steps))

    @property
    def share(self) -> float:
        """Return the productive share of its time."""
        total = sum(self.goodput.values())
        return self.goodput.get("productive", 0.0) / total if total else 0.0

    @property
    def survived(self) -> bool:
        return self.exit_code == 0 and not self.orphans and self.exact is not False


def recovery(
    impact: FaultImpact, impacts: Sequence[FaultImpact], marks: Sequence[DrillMark], steps: Sequence[TrainedStep]
) -> Recovery:
    """Return the recovery from a fault. Marks after the next fault of the same node belong to that one, if it needs a
    repair. One drain and return repair all faults of a node."""
    later = [each.at for each in impacts if each.node == impact.node and each.at > impact.at and each.heals]
    until = min(later, default=float("inf"))
    on_node = [mark for mark in marks if mark.node == impact.node]

    def after(what: str, since: float = impact.at, before: float = float("inf")) -> float | None:
        return min(
            (mark.at - impact.at for mark in on_node if mark.what == what and since <= mark.at < before), default=None
        )

    out = impact.heals and _was_out(impact, on_node)
    drained_s = 0.0 if out else after(DRAINED) if impact.heals else None
    first = [after(KNOWN, before=until), drained_s]
    return Recovery(
        impact,
        known_s=min((known for known in first if known is not None), default=None),
        drained_s=drained_s,
        resumed_s=resumed(impact, steps) if impact.stops else None,
        returned_s=after(RETURNED, impact.at + drained_s) if drained_s is not None else None,
        steps_lost=count_lost_steps(impact, impacts, steps),
        stopped=impact.stops and not _trained_on(impact, steps),
    )


def _was_out(impact: FaultImpact, on_node: Sequence[DrillMark]) -> bool:
    """Return whether the node was drained already: a run may train there for a moment longer."""
    before = [mark.what for mark in on_node if mark.what in (DRAINED, RETURNED) and mark.at < impact.at]
    return bool(before) and before[-1] == DRAINED


def resumed(impact: FaultImpact, steps: Sequence[TrainedStep]) -> float | None:
    """Return how long training stood still: from the last step of the generation that was hit to the first step of a
    later one. The generation may have trained on for a while."""
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
    missed = [mark for mark in marks if mark.what == KNOWN and began <= mark.at <= ended]
    taken = [mark for mark in marks if mark.what == DRAINED and began - LEAVES_S <= mark.at <= ended]
    hit = {mark.node for mark in (missed or taken)}
    before = [each for each in impacts if each.at <= ended]
    impact = max([each for each in before if each.node in hit] or before, key=lambda each: each.at, default=None)
    why = f"{missed[0].node}: {missed[0].text}" if missed else ""
    return TrainingStop(impact, began - impact.at if impact else 0.0, ended - began, why)


def _generation_after(impact: FaultImpact, steps: Sequence[TrainedStep]) -> int | None:
    """Return the generation that trains after a fault."""
    hit = max((step.generation for step in steps if step.at <= impact.at), default=0)
    return min((step.generation for step in steps if step.at > impact.at and step.generation > hit), default=None)


def _trained_on(impact: FaultImpact, steps: Sequence[TrainedStep]) -> bool:
    """Return whether training continued: the run was done before the node was taken from it."""
    after = [step for step in steps if step.at > impact.at + UNDER_WAY_S]
    return bool(after) and _generation_after(impact, steps) is None


def count_lost_steps(impact: FaultImpact, impacts: Sequence[FaultImpact], steps: Sequence[TrainedStep]) -> int:
    """Return the steps that were repeated between this fault and the next."""
    until = min((each.at for each in impacts if each.at > impact.at), default=float("inf"))
    return sum(lost for step, lost in zip(steps, again(steps), strict=True) if impact.at < step.at <= until)


def again(steps: Sequence[TrainedStep]) -> list[int]:
    """Return 1 for each step that was completed before, else 0."""
    furthest, found = -1, []
    for step in steps:
        found.append(int(step.step <= furthest))
        furthest = max(furthest, step.step)
    return found


# Records of the coordinator and the controller as marks


def marks_of_run(entries: Iterable[Entry]) -> Iterator[DrillMark]:
    for entry in entries:
        at, node = float(entry["at"]), str(entry.get("node", ""))
        if entry.get("event") == RunEvent.LOST:
            yield DrillMark(at, KNOWN, node, f"lost by the run: {entry.get('why')}")
        elif entry.get("event") == RunEvent.COLD:
            yield DrillMark(at, KNOWN, node, str(entry.get("why")))
        elif entry.get("event") == RunEvent.FAILED and not entry.get("noise"):
            yield DrillMark(at, KNOWN, node, f"rank {entry.get('rank')} {entry.get('what')}")
        elif entry.get("event") == RunEvent.GENERATION:
            nodes = ", ".join(map(str, entry.get("nodes", ())))
            yield DrillMark(at, "generation", "", f"generation {entry.get('generation')} on {nodes}")


def describe_run_failures(entries: Iterable[Entry]) -> str:
    """Return how often a run restarted, and the first reason; "" if it was undisturbed."""
    known = list(entries)
    again = (
        max((int(entry["generation"]) for entry in known if entry.get("event") == RunEvent.GENERATION), default=1) - 1
    )
    first = next((mark for mark in marks_of_run(known) if mark.what == KNOWN), None)
    why = f"{first.node}: {first.text}" if first else ""
    if again < 1:
        return why
    return f"it restarted {again} time{'s' * (again != 1)}" + (f", first because of {why}" if why else "")


_MEANS = {
    EventKind.DRAIN: DRAINED,
    EventKind.SET_DOWN: DRAINED,
    EventKind.VALIDATE: VALIDATED,
    EventKind.RETURN: RETURNED,
    EventKind.HOLD: RETURNED,
}


def marks_of_controller(events: Iterable[Mapping[str, Any]]) -> Iterator[DrillMark]:
    """Yield the controller's events as marks. Actions that only began or failed keep the name of their kind."""
    for event in map(read_event, events):
        yield DrillMark(event.at, _meaning(event), event.node, event.text)


def _meaning(event: Event) -> str:
    if event.stage is EventStage.SUSPECTED:
        return KNOWN
    done = event.stage is EventStage.DONE
    return _MEANS.get(event.kind, event.kind.value) if done else event.kind.value


# The notes of the training, read while they grow


class TrainingNotes:
    """The file to which the first rank of every generation appends lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.steps: list[TrainedStep] = []
        self.last: TrainedStep | None = None  # of the newest generation: a lost node may still write older steps
        self.weights = ""  # digest of the final weights
        self._read_to = 0

    def read(self) -> list[TrainedStep]:
        """Return the new steps. An incomplete line is read later; one that a crash has cut off is ignored."""
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
