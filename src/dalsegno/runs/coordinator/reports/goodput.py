"""Account for a run's time: compute from the run's events how long each kind of activity took.

Every second is counted once: as productive, checkpoints, starting, waiting for nodes, or lost to failures. Lost time
includes the time until a run resumes after a failure and the time of repeated steps.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from statistics import median

from dalsegno.errors import DalsegnoError
from dalsegno.runs.coordinator.agents.messages import Stepped
from dalsegno.runs.coordinator.generations.generations import GenerationPhase, Run
from dalsegno.runs.coordinator.reports.history import HistoryWriter
from dalsegno.runs.files import read_value
from dalsegno.runs.folder import RunFolder
from dalsegno.runs.slow_ranks import SlowWatch, find_slow_rank
from dalsegno.spec.facts import facts_from_json, facts_to_json
from dalsegno.system.files import write_atomic


class TimeKind(Enum):
    """The activity that a second of a run was spent on, in the order of display."""

    PRODUCTIVE = "productive"
    LOST = "lost"
    CHECKPOINTS = "checkpoints"
    WAITING = "waiting"
    STARTING = "starting"


@dataclass(frozen=True)
class Goodput:
    """The time of each kind that the run has spent until `at`."""

    at: float
    spent: Mapping[TimeKind, float] = field(default_factory=dict)
    kind: TimeKind = TimeKind.WAITING  # kind of the time since `at`
    furthest: int = 0  # the highest step reached so far
    step: int = 0
    saving_s: float = 0.0  # time for snapshots that the current generation has reported
    failures: int = 0

    @property
    def share(self) -> float:
        """The productive fraction of the time until `at`."""
        total = sum(self.spent.values())
        return self.spent.get(TimeKind.PRODUCTIVE, 0.0) / total if total else 0.0


def add_time(account: Goodput, now: float, kind: TimeKind | None = None) -> Goodput:
    """Add the time since the last entry to its kind, and set the kind of the time that follows."""
    passed = max(0.0, now - account.at)
    spent = {**account.spent, account.kind: account.spent.get(account.kind, 0.0) + passed}
    return replace(account, at=max(now, account.at), spent=spent, kind=kind or account.kind)


def record_start(account: Goodput, now: float) -> Goodput:
    """Record that a generation forms with all its nodes present."""
    lost = account.kind is TimeKind.LOST
    return replace(add_time(account, now, TimeKind.LOST if lost else TimeKind.STARTING), saving_s=0.0)


def record_grant(account: Goodput, now: float) -> Goodput:
    """Record that Slurm granted the first nodes. From then on, time counts as starting instead of waiting."""
    return (
        add_time(account, now, TimeKind.STARTING) if account.kind is TimeKind.WAITING and not account.step else account
    )


def record_wait(account: Goodput, now: float) -> Goodput:
    """Record that nodes are missing."""
    return add_time(account, now, TimeKind.WAITING)


def record_failure(account: Goodput, now: float, counts: bool = True) -> Goodput:
    """Record a failure, and count it if `counts` is set.

    The time from the last step until the run is back at that step is lost.
    """
    kind = account.kind if account.kind is TimeKind.WAITING else TimeKind.LOST
    return add_time(replace(account, kind=kind, failures=account.failures + counts), now, TimeKind.LOST)


def record_step(account: Goodput, now: float, step: int, saving_s: float) -> Goodput:
    """Record a step. The first step of a generation ends its start. The time of a repeated step counts as lost."""
    new = step > account.furthest
    first = account.kind in (TimeKind.STARTING, TimeKind.WAITING)
    kind = account.kind if first else (TimeKind.PRODUCTIVE if new else TimeKind.LOST)
    account = add_time(replace(account, kind=kind), now)
    account = _charge_saving(account, kind, max(0.0, saving_s - account.saving_s))
    return replace(
        account,
        kind=TimeKind.PRODUCTIVE if new else TimeKind.LOST,
        step=step,
        furthest=max(step, account.furthest),
        saving_s=saving_s,
    )


def _charge_saving(account: Goodput, kind: TimeKind, saved_s: float) -> Goodput:
    """Move the time for snapshots from productive time to checkpoints."""
    moved = min(saved_s, account.spent.get(kind, 0.0)) if kind is TimeKind.PRODUCTIVE else 0.0
    if not moved:
        return account
    spent = dict(account.spent)
    spent[kind] -= moved
    spent[TimeKind.CHECKPOINTS] = spent.get(TimeKind.CHECKPOINTS, 0.0) + moved
    return replace(account, spent=spent)


def record_change(account: Goodput, before: Run, after: Run, now: float) -> Goodput:
    """Account for a change of the run's state."""
    if (before.phase, before.generation) == (after.phase, after.generation):
        return account
    if before.phase is GenerationPhase.RUNNING and after.exit_code is None:
        failed = bool(after.failures) or after.lost_member or after.restarts > before.restarts
        account = record_failure(account, now, counts=failed)
    if after.phase is GenerationPhase.OPENING:
        return record_start(account, now)
    if after.phase is GenerationPhase.GATHERING and not after.pausing:
        return record_wait(account, now)
    return add_time(account, now)


# The progress file


WRITE_S = 1.0


MAX_RANKS = 256  # in a larger run, only the slowest ranks are written


@dataclass(frozen=True)
class TrainingProgress:
    """The progress of a run: its time accounting, and the figures that its ranks report.

    `figures` contains the latest values that rank 0 reported, such as loss, step time and samples per second.

    `ranks` maps each rank to its relative step time: the time without waiting for others, divided by the median of all
    ranks.
    """

    account: Goodput
    figures: Mapping[str, float] = field(default_factory=dict)
    stepped_at: float = 0.0  # when a step was last reported
    ranks: Mapping[str, float] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """The number of completed steps."""
        return self.account.step


def compare_ranks(busy_s: Mapping[int, float]) -> dict[str, float]:
    """Return each rank's step time divided by the median of all ranks. In large runs, return only the slowest ranks."""
    middle = median(busy_s.values()) if busy_s else 0.0
    if not middle:
        return {}
    slowest = sorted(busy_s, key=lambda rank: -busy_s[rank])[:MAX_RANKS]
    return {str(rank): round(busy_s[rank] / middle, 3) for rank in sorted(slowest)}


class ProgressWriter:
    """Writes the progress file at intervals, and continues the file of a previous coordinator."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.progress = self._previous() or TrainingProgress(Goodput(at=time.time()))
        self._busy_s: dict[int, float] = {}  # step time by rank, without waiting for others, in the current generation
        self.history = HistoryWriter(RunFolder(path.parent).history)
        self._written = 0.0
        self.slow = SlowWatch()

    def watch_slow_ranks(self, run: Run, note: Callable[[str], None], now: float) -> None:
        """Write a note about a rank that has been the slowest for some time. `now` is on the monotonic clock."""
        group = run.group if run.phase is GenerationPhase.RUNNING else None
        places = {int(rank): group.agent_of(int(rank)) for rank in self.progress.ranks} if group else {}
        slow = find_slow_rank(self.progress.ranks, places) if group else None
        if self.slow.update(slow, now) and slow is not None:
            note(slow.sentence())

    def _previous(self) -> TrainingProgress | None:
        with contextlib.suppress(DalsegnoError):  # if the file is damaged, the accounting starts over
            return read_progress(self._path)
        return None

    def changed(self, before: Run, after: Run) -> None:
        account = record_change(self.progress.account, before, after, time.time())
        self.progress = replace(self.progress, account=account)
        if before.generation != after.generation:
            self._busy_s, self.progress = {}, replace(self.progress, ranks={})

    def record_grant(self) -> None:
        """Record that the run has its first nodes."""
        self.progress = replace(self.progress, account=record_grant(self.progress.account, time.time()))

    def record_step(self, message: Stepped) -> None:
        self._busy_s.update(message.busy_s)
        if message.progress:
            saving_s, now = message.progress.get("saving_s", 0.0), time.time()
            account = record_step(self.progress.account, now, message.step, saving_s)
            self.progress = TrainingProgress(account, dict(message.progress), now, self.progress.ranks)
            self.history.record(account.at, message.step, message.generation, message.progress)

    def write(self, last: bool = False) -> None:
        """Write the history, and the progress file if the run reports steps.

        Unless `last` is set, skip the progress file if the last write is less than WRITE_S ago.
        """
        self.history.write(last)
        if not self.progress.figures or (time.monotonic() - self._written < WRITE_S and not last):
            return
        self._written = time.monotonic()
        account = add_time(self.progress.account, time.time())
        self.progress = replace(self.progress, account=account, ranks=compare_ranks(self._busy_s))
        with contextlib.suppress(DalsegnoError, OSError):  # a full disk must not end the run
            text = json.dumps(facts_to_json(self.progress), indent=1)
            write_atomic(self._path, text, mode=0o644, durable=False)


def read_progress(path: Path) -> TrainingProgress | None:
    """Return the progress from the file; None if there is none, because the script reports no steps."""
    data = read_value(path)
    return facts_from_json(TrainingProgress, data) if isinstance(data, Mapping) else None
