"""The forecast of a node's next repair. It uses the functions that also decide about repairs. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from dalsegno.health import Remedy
from dalsegno.recovery.decisions.budget import find_restraint
from dalsegno.recovery.decisions.phase import HeldAction, NodePhase
from dalsegno.recovery.decisions.policy import OFF, Policy
from dalsegno.recovery.decisions.records import NodeRecord, NodeRecords
from dalsegno.recovery.decisions.repair import next_step
from dalsegno.wire.frames import Message


@dataclass(frozen=True)
class Forecast:
    """The expected next repair (`how`; None if there is none), and why it is not carried out yet (`held`)."""

    how: Remedy | None
    why: str = ""  # why a lighter repair, or any repair, is not possible
    held: HeldAction = HeldAction.NO

    def message(self) -> Message:
        return {"how": self.how.value if self.how else "", "why": self.why, "held_back": self.held.value}

    @classmethod
    def read(cls, message: object) -> Forecast | None:
        """Parse a forecast from a controller; return None if it is missing or malformed."""
        if not isinstance(message, dict) or "how" not in message:
            return None
        how = next((each for each in Remedy if each.value == message["how"]), None)
        return cls(how, str(message.get("why", "")), HeldAction.of(message.get("held_back")))


def forecast(
    own: NodeRecord, partitions: Collection[str], records: NodeRecords, policy: Policy, now: float
) -> Forecast | None:
    """Return what will be done for a node; None if it is in service, being repaired, or waiting for an administrator.

    The limits on nodes out of service were checked when the node was taken out. Now only the limits on reboots and
    replacements apply.
    """
    if own.fault is None or own.phase not in (NodePhase.DRAINED, NodePhase.DOWN):
        return None
    if policy.mode == OFF:
        return Forecast(None, "automatic recovery is off in the cluster file")
    if records.blind:
        return Forecast(
            None, "the controller has lost contact with nearly all nodes: no action until it hears them again"
        )
    if own.fault.notice:
        return Forecast(None, "the cloud provider ends this instance: it is not repaired")
    if own.fault.server_away:
        return Forecast(None, "its file server does not answer: the node itself is not repaired")
    if own.fault.remedy is Remedy.DRAIN:
        return Forecast(Remedy.DRAIN)
    step = next_step(own, own.fault, partitions, records, policy, now)
    if isinstance(step, str):
        return Forecast(None, step)
    held = find_restraint(records, policy, partitions)
    return Forecast(step.how, step.why, held.held if held else HeldAction.NO)
