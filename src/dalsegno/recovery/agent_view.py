"""What the controller knows about a node from its agent, as a value for `decide`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum

from dalsegno.health.messages import NodeReport
from dalsegno.health.result import Verdict
from dalsegno.wire.frames import Message


class Presence(Enum):
    """Whether a node is reachable. Only GONE is a verdict on the node; the others describe its agent."""

    NEVER = "never seen"  # since this controller started; its host answers, or was not probed yet
    CONNECTED = "connected"
    SILENT = "silent"  # for a second, or its connection broke; its host is being probed
    AGENT_DEAD = "agent dead"  # its host or its slurmd answers, so the node is alive
    GONE = "gone"  # agent, host and slurmd do not answer


@dataclass(frozen=True)
class AgentView:
    """The state of one agent. Times are seconds since 1970 by the controller's clock; None means not asked.

    The last report is kept when the node is lost: it may show why.
    """

    node: str
    presence: Presence = Presence.NEVER
    since: float = 0.0  # when `presence` last changed
    heard: float = 0.0  # the agent's last message; 0: none
    report: NodeReport | None = None
    boot: str = ""  # changes with every boot of the host
    host_answers: bool | None = None
    slurmd_answers: bool | None = None
    answered: float = 0.0  # when its host or its slurmd last answered a probe; 0: never
    quiet_s: float = field(default=0.0, compare=False)  # time since the last message, when the view was made


def views_message(views: Collection[AgentView]) -> Message:
    """Return the answer to `agents`. It lists only findings that did not pass, and fewer the more nodes there are."""
    most = 1000 // max(len(views), 1)
    return {"agents": [_view_message(view, min(most, 16)) for view in views]}


def _view_message(view: AgentView, most: int) -> Message:
    findings = view.report.findings if view.report else ()
    bad = [each for each in findings if each.result.verdict is not Verdict.PASSED]
    shown = [[each.check, each.result.verdict.value, each.result.text[:60]] for each in bad[:most]]
    state = {"presence": view.presence.value, "since": view.since, "heard": view.heard, "boot": view.boot}
    answers = {"host": view.host_answers, "slurmd": view.slurmd_answers}
    return {"node": view.node, **state, **answers, "checks": len(findings), "findings": shown}
