"""The state of a node's agent, as far as the controller knows it: an immutable input of recovery's decisions."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from dalsegno.health.messages import GpuReading, NodeReport, readings_rows
from dalsegno.health.result import Verdict
from dalsegno.wire.frames import Message
from dalsegno.wire.liveness import LivenessLimits, Presence

# A heartbeat is due every 0.4 s. A probe connects to the node's host and its slurmd.
NODE_LIMITS = LivenessLimits(
    look_s=0.05, silent_s=1.0, probe_s=0.35, again_s=0.5, stuck_s=10.0, settled_s=2.0, new_s=15.0, known_s=5.0
)


@dataclass(frozen=True)
class AgentView:
    """The state of one agent. Times are seconds since 1970 by the controller's clock.

    The last report is kept after the node is lost, because the report may show the cause.
    """

    node: str
    presence: Presence = Presence.NEVER
    since: float = 0.0  # when `presence` last changed
    last_seen: float = 0.0  # when the agent's last message arrived; 0: never
    report: NodeReport | None = None
    boot: str = ""  # boot id, which changes with every boot of the host
    host_answers: bool | None = None  # None if the host was not probed
    slurmd_answers: bool | None = None
    answered: float = 0.0  # when the host or slurmd last answered a probe; 0: never
    readings: tuple[GpuReading, ...] = field(default=(), compare=False)  # shown to people; no decision depends on it
    quiet_s: float = field(default=0.0, compare=False)  # age of the last message when the view was made


def views_message(views: Collection[AgentView]) -> Message:
    """Return the answer to the request `agents`.

    To limit its size, it lists only findings that did not pass, and fewer of them per node in a large cluster.
    """
    most = 1000 // max(len(views), 1)
    return {"agents": [_view_message(view, min(most, 16)) for view in views]}


def _view_message(view: AgentView, most: int) -> Message:
    findings = view.report.findings if view.report else ()
    bad = [each for each in findings if each.result.verdict is not Verdict.PASSED]
    shown = [[each.check, each.result.verdict.value, each.result.text[:60]] for each in bad[:most]]
    state = {"presence": view.presence.value, "since": view.since, "heard": view.last_seen, "boot": view.boot}
    answers = {"host": view.host_answers, "slurmd": view.slurmd_answers}
    readings = readings_rows(view.readings)
    return {"node": view.node, **state, **answers, "checks": len(findings), "findings": shown, "readings": readings}
