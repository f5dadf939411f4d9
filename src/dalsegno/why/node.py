"""Explain a node: whether it is in service, and if not, who drained it and why. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dalsegno.health import Remedy
from dalsegno.health import Verdict as CheckVerdict
from dalsegno.recovery.decisions.facts import NodeFault
from dalsegno.recovery.decisions.forecast import Forecast
from dalsegno.recovery.decisions.phase import HeldAction, NodePhase
from dalsegno.recovery.decisions.reason import SLURM_USERS, Topic, read_reason, rule_of, slurm_users_of
from dalsegno.recovery.journal.event import EventKind
from dalsegno.slurm.facts import NodeFlag, NodeInfo
from dalsegno.slurm.parse.nodes import NodeEvent
from dalsegno.slurm.render import SPARE_REASON
from dalsegno.why.answer import Conclusion, Moment


@dataclass(frozen=True)
class ControllerView:
    """The controller's knowledge about a node. The defaults are for a cluster without a controller."""

    phase: NodePhase | None = None
    note: str = ""
    held: HeldAction = HeldAction.NO  # why the controller does not act
    tried: Remedy | None = None  # the last remedy
    ahead: Forecast | None = None  # the planned repair
    moments: tuple[Moment, ...] = ()
    failing: tuple[str, ...] = ()  # checks whose last result is a failure, with their findings
    slurm_users: frozenset[str] = SLURM_USERS
    excused: tuple[str, ...] = ()  # faults that are ignored because a user returned the node to service
    fault: NodeFault | None = None  # the current fault; Slurm's reason names the fault for which the node was drained
    about: Topic = Topic.OTHER  # subject of the note


def read_controller_view(answer: Mapping[str, Any]) -> ControllerView:
    """Parse the controller's answer. Unknown values, from another version, are tolerated."""
    own = answer.get("node", {})
    phase = NodePhase.parse(own["phase"]) if "phase" in own else None
    return ControllerView(
        phase,
        str(own.get("note", "")),
        HeldAction.of(own.get("held_back")),
        next((each for each in Remedy if each.value in own.get("tried", ())[-1:]), None),
        Forecast.read(answer.get("ahead")),
        tuple(_moments(answer)),
        _failing(answer),
        slurm_users_of(answer),
        tuple(map(str, own.get("excused", ()))),
        read_reason(str(own.get("reason", ""))),
        Topic(own.get("about")),
    )


def _moments(answer: Mapping[str, Any]) -> Iterator[Moment]:
    for event in answer.get("events", ()):
        asked = EventKind(event.get("kind")) is EventKind.REQUEST
        yield Moment(float(event["at"]), "person" if asked else "controller", str(event["text"]))
    for each in answer.get("checks", ()):
        yield Moment(float(each["at"]), "check", f"{each['check']} {each['verdict']}: {each['text']}")


def _failing(answer: Mapping[str, Any]) -> tuple[str, ...]:
    last = {str(each["check"]): each for each in sorted(answer.get("checks", ()), key=lambda each: float(each["at"]))}
    return tuple(
        f"{check} ({each['text']})" for check, each in last.items() if each["verdict"] == CheckVerdict.FAILED.value
    )


# The verdict on a node

SAME_S = 2  # maximum difference between the times of a drain in slurmctld and in the database
_UNKNOWN = ControllerView()
_WILL = {
    Remedy.RESET: ("its GPUs are reset", "its GPUs would be reset"),
    Remedy.REBOOT: ("it is rebooted", "it would be rebooted"),
    Remedy.REPLACE: ("it is replaced by another machine", "it would be replaced by another machine"),
}
_DOES = {
    Remedy.RESET: "its GPUs are being reset",
    Remedy.REBOOT: "it is being rebooted",
    Remedy.REPLACE: "it is being replaced by another machine",
}
_BUT = {HeldAction.PAUSED: "but automation is paused", HeldAction.OBSERVING: "but the controller only observes"}
_PERSON = "it stays out of service until that check passes: an administrator must repair it"


def explain_node(node: NodeInfo, controller: ControllerView = _UNKNOWN) -> Conclusion:
    """Return the verdict on a node."""
    fault = read_reason(node.reason)
    if controller.phase is NodePhase.NEEDS_ADMIN and node.draining:
        return Conclusion(
            f"{node.name} is not repaired automatically any more: {controller.note or node.reason}",
            f"dalsegno nodes show {node.name}",
        )
    if controller.phase is NodePhase.SUSPECTED and node.in_service:
        # A dead agent reports no more checks. `dalsegno up` restarts it.
        default = "dalsegno up" if controller.about is Topic.AGENT_DEAD else f"dalsegno health --node {node.name}"
        command = _next(controller, default)
        return Conclusion(f"{node.name} is in service but suspected: {controller.note}", command)
    if node.reason == SPARE_REASON:
        return Conclusion(
            f"{node.name} is a spare: validated, and reserved for a run that loses a node", "dalsegno runs"
        )
    if fault and (node.draining or node.down):
        return Conclusion(
            f"{node.name} was drained by the controller: {_fault(controller.fault or fault, controller)}",
            _next(controller, _details_command(node.name, controller)),
        )
    if rule_of(node, controller.slurm_users):
        is_known = controller.held is not HeldAction.NO or controller.about is Topic.SLURM_DRAIN
        does = (
            controller.note
            if is_known
            else "the controller validates it and returns it to service, unless it happens too often"
        )
        return Conclusion(
            f"{node.name} was drained by Slurm itself: {node.reason}; {does}",
            _next(controller, f"dalsegno events --node {node.name}"),
        )
    if node.draining:
        return _drained_by_others(node, controller)
    if controller.excused and node.in_service:
        wrong = ", ".join(controller.excused)
        text = f"{node.name} is in service despite {wrong}: a user returned it to service"
        return Conclusion(text, f"dalsegno health --node {node.name}")
    return _by_state(node)


def moments_of_node(node: NodeInfo, events: Sequence[NodeEvent]) -> Iterator[Moment]:
    """Yield the events from Slurm's accounting, and the current reason, which the database may not have yet."""
    for each in events:
        yield Moment(each.at, "slurm", f"{each.state.lower()}: {each.reason} ({each.user})")
    at = node.reason_at
    if at and not any(each.reason == node.reason and abs(each.at - at) <= SAME_S for each in events):
        yield Moment(at, "slurm", f"{node.reason} ({node.reason_user})")


def _drained_by_others(node: NodeInfo, controller: ControllerView) -> Conclusion:
    """Return the verdict on a node that a user drained. Do not suggest a resume while its health checks fail."""
    by = f" by {node.reason_user}" if node.reason_user else ""
    drained = f"{node.name} was drained{by}: {node.reason or 'no reason given'}; the controller does not touch it"
    if controller.failing:
        return Conclusion(
            f"{drained}. It fails its health checks: {', '.join(controller.failing)}",
            f"dalsegno health --node {node.name}",
        )
    return Conclusion(drained, f"scontrol update nodename={node.name} state=resume")


def _fault(fault: NodeFault, controller: ControllerView) -> str:
    code = f" {fault.code}" if fault.code else ""
    details = f" ({fault.text})" if fault.text else ""
    if fault.server_away:
        return f"{fault.text or fault.check}; it is not repaired, and returns to service when the server answers"
    if notice := fault.notice:
        text = fault.text or notice.summary
        return f"{text}; it is not repaired, and returns to service when the cloud has given it another machine"
    return f"{fault.check}{code}{details}; {_does(fault.remedy, controller)}"


def _does(remedy: Remedy, controller: ControllerView) -> str:
    """Return a clause that says what the controller does with the node now, or will do next."""
    if controller.phase is None:
        return "there is no controller to repair it"
    if controller.phase is NodePhase.REPAIRING:
        return _DOES.get(controller.tried or remedy, "it is being repaired")
    if controller.ahead:
        return _will(controller.ahead)
    if controller.held is not HeldAction.NO:
        return controller.note
    return "it is being validated" if controller.phase is NodePhase.VALIDATING else "the controller is working on it"


def _will(ahead: Forecast) -> str:
    if ahead.how is None:
        return f"it is not repaired automatically any more: {ahead.why}"
    if ahead.how not in _WILL:
        return _PERSON
    will_be, would_be = _WILL[ahead.how]
    heavier = f" ({ahead.why})" if ahead.why else ""
    what = f"{would_be}{heavier}, {_BUT[ahead.held]}" if ahead.held in _BUT else f"{will_be}{heavier}"
    return f"as soon as its jobs have ended, {what}"


def _next(controller: ControllerView, default: str) -> str:
    """Return the command that resumes automation, if the repair waits for that; otherwise `default`."""
    held = controller.ahead.held if controller.ahead else controller.held
    return "dalsegno automation resume" if held.ends_with_resume else default


def _details_command(name: str, controller: ControllerView) -> str:
    waits = controller.ahead and controller.ahead.how is Remedy.DRAIN
    return f"dalsegno health --node {name}" if waits else f"dalsegno nodes show {name}"


def _by_state(node: NodeInfo) -> Conclusion:
    name = node.name
    if node.down or not node.responding:
        why = f": {node.reason}" if node.reason else ""
        return Conclusion(f"{name} does not answer Slurm{why}", f"dalsegno health --node {name}")
    if NodeFlag.INVALID_REG in node.flags:
        return Conclusion(
            f"{name} does not have the hardware in slurm.conf: {node.reason}", f"scontrol show node {name}"
        )
    if not node.in_service:
        return Conclusion(f"{name} is {node.state_text or node.state.value.lower()}", f"scontrol show node {name}")
    used = f", {node.gpus_used} of {node.gpus} GPUs in use" if node.gpus else ""
    return Conclusion(f"{name} is in service ({node.state.value.lower()}{used})")
