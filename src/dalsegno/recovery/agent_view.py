"""What the controller knows of a node by its agent: a value for `decide`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from dalsegno.health.report import Report


class Presence(Enum):
    """Whether a node is there. Only GONE is a verdict on the node; the others say what is known of its agent."""

    NEVER = "never seen"  # since this controller began; its host answers, or was not asked yet
    CONNECTED = "connected"
    SILENT = "silent"  # for a second, or its connection broke; its host is being asked
    AGENT_DEAD = "agent dead"  # its host or its slurmd answers: the node lives
    GONE = "gone"  # agent, host and slurmd say nothing: two witnesses


@dataclass(frozen=True)
class AgentView:
    """Times are seconds since 1970 by our own clock. Of what was not asked nothing is said: None.

    The last report stays when its node is lost: it may say why.
    """

    node: str
    presence: Presence = Presence.NEVER
    since: float = 0.0  # when `presence` became what it is
    heard: float = 0.0  # the agent's last word; 0: none
    report: Report | None = None
    boot: str = ""  # another after every boot of the host
    host_answers: bool | None = None
    slurmd_answers: bool | None = None
