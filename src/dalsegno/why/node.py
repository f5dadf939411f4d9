"""A node: whether it is in service, and if not, who took it out and what for. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dalsegno.health import Remedy
from dalsegno.health import Verdict as CheckVerdict
from dalsegno.recovery.facts import NodeFault
from dalsegno.recovery.phase import HeldAction, NodePhase
from dalsegno.recovery.reason import SLURM_USERS, Topic, read_reason, rule_of, slurm_users_of
from dalsegno.recovery.repair import Forecast
from dalsegno.slurm.facts import NodeFlag, NodeInfo
from dalsegno.slurm.parse.nodes import NodeEvent
from dalsegno.slurm.render import SPARE_REASON
from dalsegno.why.answer import Conclusion, Moment

# ---- What a controller tells of a node that it looks after, read once.


@dataclass(frozen=True)
class Care:
    """Its phase (None where nobody looks after it), what was said of it last, and what was found and done."""

    phase: NodePhase | None = None
    note: str = ""
    held: HeldAction = HeldAction.NO  # why that is all that was done
    tried: Remedy | None = None  # last
    ahead: Forecast | None = None  # what is to be done for it
    moments: tuple[Moment, ...] = ()
    failing: tuple[str, ...] = ()  # checks of which the last word is that they fail, with what they found
    slurm_users: frozenset[str] = SLURM_USERS
    excused: tuple[str, ...] = ()  # what is wrong with it and left to whoever has returned it
    fault: NodeFault | None = None  # for which it is out now; Slurm's reason tells what it was taken out for
    about: Topic = Topic.OTHER  # what the note is about


def read_care(told: Mapping[str, Any]) -> Care:
    """From the controller's answer; a controller of another version may have words that are not known here."""
    own = told.get("node", {})
    phase = NodePhase.told(own["phase"]) if "phase" in own else None
    return Care(
        phase,
        str(own.get("note", "")),
        HeldAction.of(own.get("held_back")),
        next((each for each in Remedy if each.value in own.get("tried", ())[-1:]), None),
        Forecast.read(told.get("ahead")),
        tuple(_moments(told)),
        _failing(told),
        slurm_users_of(told),
        tuple(map(str, own.get("excused", ()))),
        read_reason(str(own.get("reason", ""))),
        Topic(own.get("about")),
    )


def _moments(told: Mapping[str, Any]) -> Iterator[Moment]:
    for event in told.get("events", ()):
        yield Moment(float(event["at"]), "controller", str(event["text"]))
    for each in told.get("checks", ()):
        yield Moment(float(each["at"]), "check", f"{each['check']} {each['verdict']}: {each['text']}")


def _failing(told: Mapping[str, Any]) -> tuple[str, ...]:
    last = {str(each["check"]): each for each in sorted(told.get("checks", ()), key=lambda each: float(each["at"]))}
    return tuple(
        f"{check} ({each['text']})" for check, each in last.items() if each["verdict"] == CheckVerdict.FAILED.value
    )


# ---- A node: whether it is in service, and if not, who took it out and what for. Pure.


SAME_S = 2  # between slurmctld's time of a drain and the database's
_UNKNOWN = Care()
_WILL = {
    Remedy.RESET: ("its GPUs are reset", "its GPUs would be reset"),
    Remedy.REBOOT: ("it is booted anew", "it would be booted anew"),
    Remedy.REPLACE: ("another machine takes its place", "another machine would take its place"),
}
_DOES = {
    Remedy.RESET: "its GPUs are being reset",
    Remedy.REBOOT: "it is being booted anew",
    Remedy.REPLACE: "another machine takes its place",
}
_BUT = {HeldAction.PAUSED: "but automation is paused", HeldAction.OBSERVING: "but the controller only observes"}
_PERSON = "it stays out until that passes again: somebody has to look at it"


def explain_node(node: NodeInfo, care: Care = _UNKNOWN) -> Conclusion:
    """From the outside in: what Slurm does not hear of, what somebody took out, what runs."""
    fault = read_reason(node.reason)
    if care.phase is NodePhase.GIVEN_UP and node.draining:
        return Conclusion(f"{node.name} was given up: {care.note or node.reason}", f"dalsegno nodes show {node.name}")
    if care.phase is NodePhase.SUSPECTED and node.in_service:
        # Only its agent could tell more, and `up` starts it again.
        look = "dalsegno up" if care.about is Topic.AGENT_DEAD else f"dalsegno health --node {node.name}"
        command = _next(care, look)
        return Conclusion(f"{node.name} is in service, and suspected: {care.note}", command)
    if node.reason == SPARE_REASON:
        return Conclusion(f"{node.name} is a spare: validated, and kept for a run that loses a node", "dalsegno runs")
    if fault and (node.draining or node.down):
        return Conclusion(
            f"{node.name} is out of service by our own hand: {_fault(care.fault or fault, care)}",
            _next(care, _look(node.name, care)),
        )
    if rule_of(node, care.slurm_users):
        tells = care.held is not HeldAction.NO or care.about is Topic.SLURM_DRAIN
        does = care.note if tells else "a controller of ours validates and returns it, unless it happens too often"
        return Conclusion(
            f"{node.name} was taken out of service by Slurm itself: {node.reason}; {does}",
            _next(care, f"dalsegno events --node {node.name}"),
        )
    if node.draining:
        return _drained_by_others(node, care)
    if care.excused and node.in_service:
        wrong = ", ".join(care.excused)
        text = f"{node.name} is in service in spite of {wrong}: that is left to whoever has returned it"
        return Conclusion(text, f"dalsegno health --node {node.name}")
    return _by_state(node)


def moments_of_node(node: NodeInfo, events: Sequence[NodeEvent]) -> Iterator[Moment]:
    """What Slurm's accounting tells of it, and what slurmctld says now, which the database may not have yet."""
    for each in events:
        yield Moment(each.at, "slurm", f"{each.state.lower()}: {each.reason} ({each.user})")
    at = node.reason_at
    if at and not any(each.reason == node.reason and abs(each.at - at) <= SAME_S for each in events):
        yield Moment(at, "slurm", f"{node.reason} ({node.reason_user})")


def _drained_by_others(node: NodeInfo, care: Care) -> Conclusion:
    """Nobody is told to return a node to service whose checks fail: it would be taken out again at once."""
    by = f" by {node.reason_user}" if node.reason_user else ""
    drained = f"{node.name} was drained{by}: {node.reason or 'no reason given'}; what others drain, we leave alone"
    if care.failing:
        return Conclusion(
            f"{drained}. It is not fit for service: {', '.join(care.failing)}", f"dalsegno health --node {node.name}"
        )
    return Conclusion(drained, f"scontrol update nodename={node.name} state=resume")


def _fault(fault: NodeFault, care: Care) -> str:
    code = f" {fault.code}" if fault.code else ""
    said = f" ({fault.text})" if fault.text else ""
    return f"{fault.check}{code}{said}; {_does(fault.remedy, care)}"


def _does(remedy: Remedy, care: Care) -> str:
    """What happens to it now, or will: only what the controller means to do, and is let do."""
    if care.phase is None:
        return "no controller says what becomes of it"
    if care.phase is NodePhase.REPAIRING:
        return _DOES.get(care.tried or remedy, "it is being mended")
    if care.ahead:
        return _will(care.ahead)
    if care.held is not HeldAction.NO:
        return care.note
    return "it is being validated" if care.phase is NodePhase.VALIDATING else "it is being seen to"


def _will(ahead: Forecast) -> str:
    if ahead.how is None:
        return f"nothing more is done for it: {ahead.why}"
    if ahead.how not in _WILL:
        return _PERSON
    is_so, would_be = _WILL[ahead.how]
    heavier = f" ({ahead.why})" if ahead.why else ""
    what = f"{would_be}{heavier}, {_BUT[ahead.held]}" if ahead.held in _BUT else f"{is_so}{heavier}"
    return f"as soon as its jobs have left it, {what}"


def _next(care: Care, look: str) -> str:
    """The command that lets things go on, where one does; else one to look closer."""
    held = care.ahead.held if care.ahead else care.held
    return "dalsegno automation resume" if held.ends_with_resume else look


def _look(name: str, care: Care) -> str:
    waits = care.ahead and care.ahead.how is Remedy.DRAIN
    return f"dalsegno health --node {name}" if waits else f"dalsegno nodes show {name}"


def _by_state(node: NodeInfo) -> Conclusion:
    name = node.name
    if node.down or not node.responding:
        why = f": {node.reason}" if node.reason else ""
        return Conclusion(f"{name} does not answer Slurm{why}", f"dalsegno health --node {name}")
    if NodeFlag.INVALID_REG in node.flags:
        return Conclusion(
            f"{name} has other hardware than slurm.conf says: {node.reason}", f"scontrol show node {name}"
        )
    if not node.in_service:
        return Conclusion(f"{name} is {node.state_text or node.state.value.lower()}", f"scontrol show node {name}")
    used = f", {node.gpus_used} of {node.gpus} GPUs in use" if node.gpus else ""
    return Conclusion(f"{name} is in service ({node.state.value.lower()}{used})")
