"""The events that the controller records. Each has text for people and fields for programs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from dalsegno.wire.frames import Message

_JOB = re.compile(r"\bjob (\d+)\b")


class EventKind(Enum):
    """The action that the event is about, or the kind of information that it reports."""

    DRAIN = "drain"
    SET_DOWN = "setdown"
    EVIDENCE = "evidence"
    RESET = "reset"
    REBOOT = "reboot"
    REPLACE = "replace"
    VALIDATE = "validate"
    RETURN = "return"
    HOLD = "hold"
    RELEASE = "release"
    PROMOTE = "promote"
    CLOSE_LOAN = "closeloan"
    RECALL = "recall"
    REQUEUE = "requeue"
    EXPEDITE = "expedite"
    TURN = "turn"  # a node has changed its phase
    NOTE = "note"
    SIGHT = "sight"  # contact with the nodes was lost or regained
    PASSPORT = "passport"  # a person accepted a GPU that had been replaced, so that it may come back
    AUTOMATION = "automation"
    REQUEST = "request"  # a person did something, in the web page or with `inject`
    UNKNOWN = "unknown"  # an event that another version wrote

    @classmethod
    def _missing_(cls, value: object) -> EventKind:
        return cls.UNKNOWN


class EventStage(Enum):
    """The progress of an event's action."""

    INFO = ""  # no action: information only
    BEGUN = "begun"
    DONE = "done"
    FAILED = "failed"
    SUSPECTED = "suspected"  # no action: a fault was found, and the node stays in service

    @classmethod
    def _missing_(cls, value: object) -> EventStage:
        return cls.INFO


@dataclass(frozen=True)
class Event:
    """A recorded event. Ids only increase."""

    id: int
    at: float
    node: str  # "" for an event of the whole cluster
    kind: EventKind
    text: str
    stage: EventStage = EventStage.INFO
    jobs: tuple[int, ...] = ()  # jobs that the event concerns

    def message(self) -> Message:
        """Return the event as the controller sends it."""
        return {**vars(self), "kind": self.kind.value, "stage": self.stage.value, "jobs": list(self.jobs)}


def read_event(message: Mapping[str, Any]) -> Event:
    """Parse an event from a controller. Events of older versions lack the stage and the jobs."""
    text = str(message["text"])
    jobs = tuple(map(int, message["jobs"])) if "jobs" in message else jobs_in_old_text(text)
    return Event(
        int(message["id"]),
        float(message["at"]),
        str(message["node"]),
        EventKind(message["kind"]),
        text,
        EventStage(message.get("stage")),
        jobs,
    )


def jobs_in_old_text(text: str) -> tuple[int, ...]:
    """Return the jobs named in the text of an old event, written before events listed their jobs."""
    return tuple(dict.fromkeys(map(int, _JOB.findall(text))))
