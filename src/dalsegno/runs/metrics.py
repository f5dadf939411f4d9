"""Metrics of training runs, from the folders of runs that the controller knows.

Users write these files. Numbers are therefore checked, text is used only in labels, and the number of runs, the bytes
read and the ranks of each run are limited. A run is shown until ten minutes after its end.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dalsegno.observe.exposition import Family, Histogram, HistogramFamily, MetricType, labelled
from dalsegno.runs.coordinator.reports.goodput import MAX_RANKS, TimeKind, TrainingProgress
from dalsegno.runs.folder import RunFolder
from dalsegno.runs.journal import Entry, RunEvent
from dalsegno.runs.rates import SAMPLES_RATE, TOKENS_RATE, believable, rate_of_ranks
from dalsegno.runs.status import NodeRole, RunPhase, RunStatus, status_from_json
from dalsegno.runs.user_files import JournalTail, WatchedFile
from dalsegno.spec.facts import facts_from_json
from dalsegno.system.files import user_of

MAX_RUNS = 1000
KEPT_S = 600.0  # how long a run is shown after its end
MAX_RANK_SERIES = 10_000  # limit on the series of all runs together
RESUME_S = (0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
MAX_RESUME_S, MAX_RESUMES = 86400.0, 100  # limits per run: the time of one resume, and resumes per `collect`
_RANK = re.compile(r"[0-9]{1,6}")
Samples = dict[tuple[str, ...], float]

# Metrics from the status and the progress of runs


@dataclass(frozen=True)
class MeasuredRun:
    """The metrics of one run, read from its files.

    `user` is the run's owner. `name` is the run's name when it was first observed.
    """

    run: str
    user: str
    name: str
    status: RunStatus
    progress: TrainingProgress | None = None

    @property
    def labels(self) -> tuple[str, str]:
        return self.run, self.user


Value = Callable[[MeasuredRun], float | None]


def _figure(name: str) -> Value:
    return lambda seen: seen.progress.figures.get(name) if seen.progress else None


def _rate(name: str) -> Value:
    return lambda seen: rate_of_ranks(name, seen.status, seen.progress)


def _share(seen: MeasuredRun) -> float | None:
    account = seen.progress.account if seen.progress else None
    return account.share if account and sum(account.spent.values()) else None


@dataclass(frozen=True)
class RunMetric:
    """A metric with one value for each run."""

    name: str
    help: str
    value: Value
    type: MetricType = MetricType.GAUGE


RUN_METRICS = (
    RunMetric("training_step", "Completed steps.", lambda seen: seen.progress.step if seen.progress else None),
    RunMetric("training_step_seconds", "Mean time of the last steps, without snapshots.", _figure("step_s")),
    RunMetric("training_loss", "Loss, as the script reports it.", _figure("loss")),
    RunMetric("training_samples_per_second", "Samples of all ranks per second.", _rate(SAMPLES_RATE)),
    RunMetric("training_tokens_per_second", "Tokens of all ranks per second.", _rate(TOKENS_RATE)),
    RunMetric("training_goodput_ratio", "Productive share of the run's time.", _share),
    RunMetric(
        "training_last_step_timestamp_seconds",
        "When a step was last reported.",
        lambda seen: (seen.progress.stepped_at or None) if seen.progress else None,
    ),
    RunMetric("training_generation", "Generation; each restart begins one.", lambda seen: seen.status.generation),
    RunMetric(
        "training_restarts_total",
        "Restarts after failures of the script.",
        lambda seen: seen.status.restarts,
        MetricType.COUNTER,
    ),
    RunMetric(
        "training_lost_nodes_total",
        "Nodes that the run has lost.",
        lambda seen: seen.status.lost_nodes,
        MetricType.COUNTER,
    ),
)


def run_families(runs: Iterable[MeasuredRun]) -> list[Family]:
    """Return the metrics of all runs. Implausible numbers are omitted."""
    runs = list(runs)
    families: list[Family] = [_info(runs)]
    for metric in RUN_METRICS:
        values: Samples = {}
        for seen in runs:
            if (value := believable(metric.value(seen))) is not None:
                values[seen.labels] = value
        families.append(labelled(metric.name, metric.help, ("run", "user"), values, metric.type))
    return [*families, *_time_families(runs), _rank_family(runs)]


def _info(runs: list[MeasuredRun]) -> Family:
    values: Samples = {(*seen.labels, seen.name, seen.status.phase.value, _job(seen.status)): 1 for seen in runs}
    about = "A run that the controller lists; always 1."
    return labelled("training_run_info", about, ("run", "user", "name", "phase", "job_id"), values)


def _job(status: RunStatus) -> str:
    return str(status.jobs[0]) if status.jobs and 0 < status.jobs[0] < 1 << 32 else ""


def _time_families(runs: list[MeasuredRun]) -> list[Family]:
    spent: Samples = {}
    for seen in runs:
        for kind in TimeKind if seen.progress else ():
            value = believable(seen.progress.account.spent.get(kind, 0.0)) if seen.progress else None
            if value is not None and value >= 0:
                spent[seen.run, seen.user, kind.value] = value
    lost: Samples = {key: value for key, value in spent.items() if key[2] != TimeKind.PRODUCTIVE.value}
    return [
        labelled(
            "training_time_seconds_total", "Time of the run by kind.", ("run", "user", "kind"), spent,
            MetricType.COUNTER,
        ),
        labelled(
            "training_badput_seconds_total", "Time of the run that was not productive, by reason.",
            ("run", "user", "reason"), lost, MetricType.COUNTER,
        ),
    ]  # fmt: skip


def _rank_family(runs: list[MeasuredRun]) -> Family:
    values: Samples = {}
    for seen in runs:
        ranks = seen.progress.ranks if seen.progress else {}
        for rank, ratio in list(ranks.items())[:MAX_RANKS]:
            value = believable(ratio)
            if _RANK.fullmatch(rank) and value is not None and len(values) < MAX_RANK_SERIES:
                values[seen.run, seen.user, rank] = value
    about = "Step time of a rank, without waiting for others, divided by the median of all ranks."
    return labelled("training_rank_step_ratio", about, ("run", "user", "rank"), values)


# Times to resume, from journals


@dataclass
class ResumeTimes:
    """The time that runs take from the loss of a node to their next step."""

    histogram: Histogram = field(default_factory=lambda: Histogram(RESUME_S))
    _lost_at: dict[str, float] = field(default_factory=dict)  # run -> when it first lost a node since its last resume

    def add(self, run: str, entries: Iterable[Entry]) -> None:
        """Add new entries of a run's journal."""
        count = 0
        for entry in entries:
            event, at = entry.get("event"), float(entry["at"])
            if event == RunEvent.LOST and entry.get("was") == NodeRole.MEMBER.value:
                self._lost_at.setdefault(run, at)
            elif event == RunEvent.FIRST_STEP and run in self._lost_at:
                took_s = at - self._lost_at.pop(run)
                count += 1
                if 0 <= took_s < MAX_RESUME_S and count <= MAX_RESUMES:
                    self.histogram = self.histogram.observe(took_s)

    def forget(self, run: str) -> None:
        self._lost_at.pop(run, None)

    def family(self) -> Family:
        about = "Time from the declared loss of a node of a run to the next step of the run."
        return HistogramFamily("dalsegno_recovery_resume_seconds", about, (), {(): self.histogram})


# The source of the metrics of all runs


@dataclass(frozen=True)
class KnownRun:
    """A run that the controller lists: its folder, whose name is the run's id, and its owner."""

    folder: Path
    uid: int


class _WatchedRun:
    """The files of a run, and when the controller last listed it."""

    def __init__(self, known: KnownRun, user: str) -> None:
        self.known, self.user, self.name = known, user, ""
        folder = RunFolder(known.folder)
        self.run = folder.run
        self._status = WatchedFile(folder.status, known.uid, status_from_json)
        self._progress = WatchedFile(folder.progress, known.uid, _progress)
        self.journal = JournalTail(folder.journal, known.uid)
        self.last_known = 0.0

    def observe(self, now: float) -> MeasuredRun | None:
        """Return the run; None if its status cannot be read, or it ended too long ago."""
        status = self._status.read()
        if status is None or (status.phase is RunPhase.ENDED and not now - (status.ended or 0.0) < KEPT_S):
            return None
        # The first name is kept, because every new name would create another series.
        self.name = self.name or status.name
        return MeasuredRun(self.run, self.user, self.name, status, self._progress.read())


def _progress(data: Mapping[str, object]) -> TrainingProgress:
    return facts_from_json(TrainingProgress, data)


class RunMetrics:
    """The source of all run metrics. `known` returns the runs that the controller lists."""

    name = "runs"

    def __init__(self, known: Callable[[], Iterable[KnownRun]], clock: Callable[[], float] = time.time) -> None:
        self._known, self._clock = known, clock
        self._watched: dict[KnownRun, _WatchedRun] = {}
        self._resumes = ResumeTimes()

    def collect(self) -> list[Family]:
        """Return all families. Raise DalsegnoError if the runs cannot be listed."""
        now = self._clock()
        self._update_watched(now)
        seen = []
        for watched in self._watched.values():
            self._resumes.add(watched.run, watched.journal.read_new())
            if (run := watched.observe(now)) is not None:
                seen.append(run)
        return [*run_families(seen), self._resumes.family()]

    def _update_watched(self, now: float) -> None:
        for known in self._known():
            if known not in self._watched and len(self._watched) < MAX_RUNS:
                self._watched[known] = _WatchedRun(known, user_of(known.uid))
            if known in self._watched:
                self._watched[known].last_known = now
        # The controller forgets a run when it ends, but its metrics stay for a while.
        for known, watched in list(self._watched.items()):
            if now - watched.last_known >= KEPT_S:
                del self._watched[known]
                self._resumes.forget(watched.run)
