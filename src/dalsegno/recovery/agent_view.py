"""What the controller knows of a node by its agent: a value for `decide`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum

from dalsegno.health.messages import NodeReport
from dalsegno.health.result import Verdict
from dalsegno.wire.frames import Message


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
    report: NodeReport | None = None
    boot: str = ""  # another after every boot of the host
    host_answers: bool | None = None
    slurmd_answers: bool | None = None
    answered: float = 0.0  # when its host or its slurmd last answered a probe; 0: never
    quiet_s: float = field(default=0.0, compare=False)  # how long ago that last word was, when this was told


def views_message(views: Collection[AgentView]) -> Message:
    """For whoever asks the controller: of the findings only what is not well, and the less the more nodes there are."""
    most = 1000 // max(len(views), 1)
    return {"agents": [_view_message(view, min(most, 16)) for view in views]}


def _view_message(view: AgentView, most: int) -> Message:
    findings = view.report.findings if view.report else ()
    bad = [each for each in findings if each.result.verdict is not Verdict.PASSED]
    told = [[each.check, each.result.verdict.value, each.result.text[:60]] for each in bad[:most]]
    said = {"presence": view.presence.value, "since": view.since, "heard": view.heard, "boot": view.boot}
    answers = {"host": view.host_answers, "slurmd": view.slurmd_answers}
    return {"node": view.node, **said, **answers, "checks": len(findings), "findings": told}
