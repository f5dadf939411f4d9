"""What agents' words mean for the run, as events. Pure."""

from __future__ import annotations

from dataclasses import replace

from dalsegno.launch.causes import Failure, read_failure
from dalsegno.launch.events import Event, Joined, Left, Stopped, StoreOpened, WorkerEnded
from dalsegno.launch.words import AllStopped, Cold, Ended, Ready, Report, StoreOpen, Word
from dalsegno.train.contract import DONE, SAVED


def event_of(agent: str, word: Word, age_s: float, healthy: bool = True) -> Event | None:
    """The event that a word means for the run; None for one that means none.

    `age_s` is the generation's, and `healthy` whether the agent's node is.
    """
    if isinstance(word, Ready):
        return Joined(agent)
    if isinstance(word, Cold):  # its workers are gone, and others take it some seconds: a spare is quicker
        return Left(agent)
    if isinstance(word, StoreOpen):
        return StoreOpened(agent, word.generation, word.port)
    if isinstance(word, Ended):
        return _ended(agent, word.report, age_s, healthy)
    if isinstance(word, AllStopped):
        return Stopped(agent, word.generation, tuple(_failure(agent, report, healthy) for report in word.reports))
    return None


def _ended(agent: str, report: Report, age_s: float, healthy: bool) -> WorkerEnded:
    failure = _failure(agent, report, healthy) if report.code not in (DONE, SAVED) else None
    return WorkerEnded(agent, report.generation, report.rank, report.code, failure, age_s)


def _failure(agent: str, report: Report, healthy: bool) -> Failure:
    failure = read_failure(report.rank, agent, report.code, report.traceback, oom=report.oom)
    return replace(failure, healthy=healthy)
