"""What agents say, as events. Pure."""

from __future__ import annotations

from dataclasses import replace

from dalsegno.launch.agent.frames import Message
from dalsegno.launch.causes import Failure, read_failure
from dalsegno.launch.events import Event, Joined, Left, Stopped, StoreOpened, WorkerEnded
from dalsegno.train.contract import DONE, SAVED


def read_word(agent: str, message: Message, age_s: float, healthy: bool = True) -> Event | None:
    """The event that a message means for the run; None for one that means none.

    `age_s` is the generation's, and `healthy` whether the agent's node is.
    """
    if "ready" in message:
        return Joined(agent)
    if "cold" in message:  # its workers are gone, and others take it some seconds: a spare is quicker
        return Left(agent)
    if "store" in message:
        return StoreOpened(agent, int(message["store"]), int(message["port"]))
    if "ended" in message:
        return _ended(agent, message["ended"], age_s, healthy)
    if "stopped" in message:
        failures = tuple(_failure(agent, report, healthy) for report in message.get("reports", ()))
        return Stopped(agent, int(message["stopped"]), failures)
    return None


def _ended(agent: str, report: Message, age_s: float, healthy: bool) -> WorkerEnded:
    failure = _failure(agent, report, healthy) if report["code"] not in (DONE, SAVED) else None
    return WorkerEnded(agent, int(report["generation"]), int(report["rank"]), int(report["code"]), failure, age_s)


def _failure(agent: str, report: Message, healthy: bool) -> Failure:
    failure = read_failure(
        int(report["rank"]),
        agent,
        int(report["code"]),
        str(report.get("traceback", "")),
        oom=bool(report.get("oom")),
        why=str(report.get("why", "")),
    )
    return replace(failure, healthy=healthy)


def still_runs(hello: Message, generation: int) -> bool:
    """Whether an agent that comes back has this generation's workers, and has not ended them meanwhile."""
    return int(hello["generation"]) == generation > int(hello["stopped"])
