"""A node that is out of service by our hand: from its fault to its return, one step at a time. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from zlib import crc32

from dalsegno.health import NodeReport, Remedy, Verdict
from dalsegno.recovery.actions import Action, Drain, Hold, Mend, Return, SetDown, TakeEvidence, Turn, Validate
from dalsegno.recovery.agent_view import Presence
from dalsegno.recovery.book import DAY_S, Book, MarkKind, NodeBook
from dalsegno.recovery.budget import breaker, reboot_refusal, restraint
from dalsegno.recovery.facts import (
    BOOT,
    PASSPORT,
    SLURMD,
    VALIDATION,
    Facts,
    NodeFacts,
    NodeFault,
    failures,
    fault_of,
    heaviest,
    is_plain,
)
from dalsegno.recovery.judge import find_fault, found
from dalsegno.recovery.phase import HeldAction, NodePhase
from dalsegno.recovery.policy import OFF, Policy
from dalsegno.recovery.presence import NEW_S
from dalsegno.runs.comment import nodes_left
from dalsegno.wire.frames import Message

# ---- What to try next for a node: reset, reboot, replace, each where the one before did not help. Pure.


@dataclass(frozen=True)
class RepairStep:
    """What to try, and why nothing lighter that might have helped."""

    how: Remedy
    why: str = ""


def next_step(
    node: NodeBook, fault: NodeFault, partitions: Collection[str], book: Book, policy: Policy, now: float
) -> RepairStep | str:
    """The next thing to try, or why nothing is left."""
    most = policy.caps.get(fault.check, Remedy.REPLACE)
    steps = [Remedy.RESET, Remedy.REBOOT, Remedy.REPLACE]
    refusals = []
    for step in steps:
        if step < fault.remedy:
            continue
        if most < step:
            refusals.append(f"no more than {most.value} may be done for {fault.check}")
            break
        why = _refusal(step, node, fault, partitions, book, policy, now)
        if not why:
            return RepairStep(step, "; ".join(refusals))
        refusals.append(why)
    if fault.remedy > Remedy.REBOOT and Remedy.REPLACE not in policy.can and Remedy.REBOOT in policy.can:
        why = _refusal(Remedy.REBOOT, node, fault, partitions, book, policy, now)  # better than nothing
        return why or RepairStep(Remedy.REBOOT, "; ".join(refusals))
    return refusals[-1]


def _refusal(
    step: Remedy, node: NodeBook, fault: NodeFault, partitions: Collection[str], book: Book, policy: Policy, now: float
) -> str:
    if step not in policy.can:
        return f"this cluster's machines cannot be {PAST[step]} from here"
    if step is Remedy.RESET:
        return "its GPUs were reset already" if Remedy.RESET in node.steps else ""
    if step is Remedy.REBOOT:
        if Remedy.REPLACE in node.steps:
            return "its replacement was bad"
        return reboot_refusal(book, node.node, fault.key, policy, now)
    if node.steps.count(Remedy.REPLACE) >= policy.replaces_per_fault:
        return f"it was replaced {policy.replaces_per_fault} times, and none of them was good"
    tripped = breaker(book, partitions, policy)
    return f"{policy.breaker} replacements in {tripped} failed one after the other" if tripped else ""


PAST = {Remedy.RESET: "reset", Remedy.REBOOT: "rebooted", Remedy.REPLACE: "replaced"}


# ---- A node that is out of service by our hand: from its fault to its return, one step at a time. Pure.


AGAIN_S = 60.0  # from a validation that failed for what only a person can mend to the next, at the least
MOST_ASKS = 3  # an order that got lost, with its agent or with us, is given again


@dataclass(frozen=True)
class Case:
    """One node out of service, and all that bears on it."""

    node: NodeFacts
    own: NodeBook
    facts: Facts
    book: Book
    policy: Policy
    now: float

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def fault(self) -> NodeFault:
        return self.own.fault or NodeFault(VALIDATION, Remedy.DRAIN, "not validated yet")

    @property
    def in_phase_s(self) -> float:
        return self.now - max(self.own.entered, self.book.saw_at)


def repair(node: NodeFacts, own: NodeBook, facts: Facts, book: Book, policy: Policy, now: float) -> Action | None:
    case = Case(node, own, facts, book, policy, now)
    if own.phase is NodePhase.DRAINED:
        return _drained(case)
    if own.phase is NodePhase.DOWN:
        return _down(case)
    if own.phase is NodePhase.REPAIRING:
        return _repairing(case)
    if own.phase is NodePhase.VALIDATING:
        return _validating(case)
    return _given_up(case)


def _drained(case: Case) -> Action | None:
    """It lives, or did: jobs may end, then it is mended."""
    if worse := _worse(case):
        return worse
    if case.node.left or (case.node.ending and case.fault.check == SLURMD):
        return SetDown(case.name, case.fault)  # which the runs outlive; and a dead slurmd never says that jobs are over
    return _spare_its_runs(case) if case.node.busy else _free(case)


def _spare_its_runs(case: Case) -> Action | None:
    """What came from outside is over before a run has left it: to leave would cost that run a restart for nothing."""
    jobs, check = case.node.jobs, case.fault.check
    stay = bool(jobs) and not any(is_plain(job) or case.name in nodes_left(job.comment) for job in jobs)
    well = check in case.policy.passing and _is_over(case) and not found(case.node, case.policy)
    ours = case.name not in case.policy.spares  # one that is lent goes back to where it came from
    return Return(case.name, f"{check} passes again", tried=False) if stay and well and ours else None


def _free(case: Case) -> Action | None:
    """It is there, and has no jobs any more."""
    if _is_stale(case) or _is_over(case):
        return _validate(case)
    if case.fault.remedy is Remedy.DRAIN:
        return _wait_for_a_person(case)
    return _mend(case)


def _worse(case: Case) -> Action | None:
    """What has come on top of what it was drained for."""
    fault = find_fault(case.node, replace(case.own, excuses=()), case.policy)
    if fault and fault.gone and not case.fault.gone:
        jobs = tuple(job.id for job in case.node.jobs if is_plain(job))
        return SetDown(
            case.name, replace(case.fault, gone=True, remedy=max(case.fault.remedy, fault.remedy)), jobs, case.node.held
        )
    if fault and case.fault.remedy < fault.remedy:
        return Drain(case.name, fault, case.node.held)
    return None


def _is_stale(case: Case) -> bool:
    """Drained before its last boot, which was not of our doing: what was wrong then may be over."""
    booted, drained = case.node.slurm.booted_at, case.node.slurm.reason_at
    by_slurm = booted is not None and drained is not None and drained < booted
    by_agent = bool(case.own.boot) and case.node.agent.boot != case.own.boot
    return (by_slurm or by_agent) and case.node.connected and not case.own.steps and not case.own.asked


def _is_over(case: Case) -> bool:
    """What it was taken out for passes again before anything was done. The second time in a day it is mended."""
    untouched = not case.own.steps and not case.own.asked
    times = case.book.count(MarkKind.TAKEN, case.now - DAY_S, node=case.name, key=case.fault.key)
    return untouched and times <= 1 and case.node.connected and _passes_now(case)


def _wait_for_a_person(case: Case) -> Action | None:
    if not case.node.connected:
        return _too_long(case, case.policy.person_s, "its agent does not answer")
    still = any(fault.check == case.fault.check for fault in found(case.node, case.policy))
    if not still and not case.own.asked:
        return _validate(case)
    if case.in_phase_s >= AGAIN_S and _passes_now(case):  # what failed its validation does not any more
        return _validate(case)
    return _too_long(case, case.policy.person_s, f"needs a person: {case.fault.words}")


def _too_long(case: Case, limit_s: float, why: str) -> Action | None:
    return _give_up(case, why) if case.in_phase_s >= limit_s else None


def _give_up(case: Case, why: str) -> Turn:
    return Turn(case.name, NodePhase.GIVEN_UP, why, boot=case.node.agent.boot or case.own.last_boot)


def _down(case: Case) -> Action | None:
    """It was gone. Rebuilt before Slurm has taken it out of its jobs, it would end them all."""
    if case.node.busy:
        return _too_long(case, case.policy.removal_s, "Slurm does not take it out of its jobs")
    if case.node.connected and not case.fault.gone:
        return _free(case)  # it was only taken from runs that had left it
    if case.node.connected and not case.own.steps and not case.own.asked:
        return _validate(case)  # it has come back by itself
    if case.in_phase_s < case.policy.gone_s and not case.node.off:
        return None
    return _mend(case)


def _mend(case: Case) -> Action | None:
    if not case.own.evidence:
        return None if _may_yet_speak(case) else TakeEvidence(case.name, case.own.held)
    step = next_step(case.own, case.fault, case.node.slurm.partitions, case.book, case.policy, case.now)
    if isinstance(step, str):
        return _give_up(case, f"{case.fault.words}; {step}")
    boot = case.node.agent.boot or case.own.last_boot
    return Mend(case.name, step.how, case.fault, boot, _gpus(case.node.agent.report), step.why)


def _may_yet_speak(case: Case) -> bool:
    """Its agent is being waited for, after a restart of ours or a broken line: it has more to tell than anybody."""
    agent = case.node.agent
    waited_for = agent.presence in (Presence.NEVER, Presence.SILENT) and case.now < agent.since + NEW_S
    return waited_for and not case.node.off


def _gpus(report: NodeReport | None) -> tuple[str, ...]:
    return tuple(gpu.uuid for gpu in report.gpus if gpu.uuid) if report else ()


def _repairing(case: Case) -> Action | None:
    """Reset, it is still there; rebooted or replaced, it must come back with another boot."""
    back = case.node.connected and (case.own.steps[-1] is Remedy.RESET or case.node.agent.boot != case.own.boot)
    if not back and case.in_phase_s >= case.policy.boot_s:
        return _not_helped(case, NodeFault(BOOT, Remedy.REBOOT, f"did not come back within {case.policy.boot_s:g} s"))
    if not back:
        return None
    return _refuse_lemons(case) or _validate(case)


def _refuse_lemons(case: Case) -> Action | None:
    """A new machine with a GPU that was sent away."""
    lemons = set(_gpus(case.node.agent.report)) & case.book.lemons if Remedy.REPLACE in case.own.steps else set()
    if not lemons:
        return None
    text = f"GPU {min(lemons)} was sent away before, and has come back"
    return _not_helped(case, NodeFault(PASSPORT, Remedy.REPLACE, text))


def _not_helped(case: Case, fault: NodeFault) -> Action:
    """What was tried last has not helped. A new machine that is bad is not mended but replaced."""
    replaced = Remedy.REPLACE in case.own.steps
    remedy = Remedy.REPLACE if replaced else max(case.policy.remedy(fault), Remedy.DRAIN)
    to = NodePhase.DOWN if case.node.gone else NodePhase.DRAINED
    return Turn(case.name, to, fault.words, replace(fault, remedy=remedy), failed=True)


def _validate(case: Case) -> Validate:
    return Validate(case.name, _partner(case), case.node.agent.boot)


def _partner(case: Case) -> str:
    """A good node of the same kind that has nothing to do; not the same for all, when many come back at once."""
    good = [other.name for other in (case.facts.nodes or {}).values() if _may_be_partner(case, other)]
    return good[crc32(case.name.encode()) % len(good)] if good else ""


def _may_be_partner(case: Case, other: NodeFacts) -> bool:
    shares = set(other.slurm.partitions) & set(case.node.slurm.partitions)
    known = case.book.of(other.name).phase in (NodePhase.IN_SERVICE, NodePhase.SPARE)
    idle = other.connected and not other.busy and not found(other, case.policy)
    return other.name != case.name and bool(shares) and known and idle


def _validating(case: Case) -> Action | None:
    answer = case.node.validation
    if answer is None or answer.ask != case.own.asked:
        if case.node.gone or case.in_phase_s >= case.policy.validate_s:
            return _not_helped(case, NodeFault(VALIDATION, Remedy.REBOOT, "it did not finish its validation"))
        lost = case.node.connected and case.node.validating != case.own.asked
        return _validate(case) if lost and case.own.asks < MOST_ASKS else None
    if not answer.passed:
        bad = heaviest(fault_of(each) for each in failures(answer.findings))
        return _not_helped(case, bad or NodeFault(VALIDATION, Remedy.DRAIN, "no check could be run"))
    if refused := _refuse_lemons(case):  # its agent says which GPUs it has after it has come
        return refused
    if _has_not_said_its_gpus(case) and case.in_phase_s < case.policy.validate_s:
        return None
    if not case.node.slurm.responding:
        return _too_long(case, case.policy.validate_s + case.policy.boot_s, "it is well, but slurmd does not register")
    spare = case.name in case.policy.spares
    return Hold(case.name, answer.proof) if spare else Return(case.name, answer.proof)


def _has_not_said_its_gpus(case: Case) -> bool:
    new = Remedy.REPLACE in case.own.steps
    return new and case.node.slurm.gpus > 0 and not _gpus(case.node.agent.report)


def _given_up(case: Case) -> Action | None:
    """A person has been at work: it was booted anew, or what failed does not any more."""
    again = case.node.connected and not case.node.busy
    rebooted = bool(case.own.boot) and case.node.agent.boot != case.own.boot
    mended = case.fault.remedy is Remedy.DRAIN and _passes_now(case)
    if again and (rebooted or mended or _is_forgiven(case) or _is_stale(case)):
        return _validate(case)
    return None


def _is_forgiven(case: Case) -> bool:
    return case.fault.check == PASSPORT and not set(_gpus(case.node.agent.report)) & case.book.lemons


def _passes_now(case: Case) -> bool:
    report = case.node.agent.report
    findings = [each for each in report.findings if each.check == case.fault.check] if report else []
    return bool(findings) and all(each.result.verdict is Verdict.PASSED for each in findings)


# ---- What will be done for a node that is out of service, as things are now; by the functions that decide it.
# Pure.


@dataclass(frozen=True)
class Forecast:
    """`how` is what comes next, None where that is nothing; `held`: it comes only when this is over."""

    how: Remedy | None
    why: str = ""  # nothing lighter, or nothing at all
    held: HeldAction = HeldAction.NO

    def message(self) -> Message:
        return {"how": self.how.value if self.how else "", "why": self.why, "held_back": self.held.value}

    @classmethod
    def read(cls, told: object) -> Forecast | None:
        """As a controller says it; None where it says nothing, or speaks otherwise."""
        if not isinstance(told, dict) or "how" not in told:
            return None
        how = next((each for each in Remedy if each.value == told["how"]), None)
        return cls(how, str(told.get("why", "")), HeldAction.of(told.get("held_back")))


def forecast(own: NodeBook, partitions: Collection[str], book: Book, policy: Policy, now: float) -> Forecast | None:
    """None where nothing is to come: it is in service, under way, or given up. How many may be out, and how many an
    hour, was asked when it was taken out: whatever is out is mended, as far as reboots and replacements go."""
    if own.fault is None or own.phase not in (NodePhase.DRAINED, NodePhase.DOWN):
        return None
    if policy.mode == OFF:
        return Forecast(None, "the cluster file says that nodes are left alone")
    if book.blind:
        return Forecast(None, "the controller sees hardly a node: nothing is done until it does")
    if own.fault.remedy is Remedy.DRAIN:
        return Forecast(Remedy.DRAIN)
    step = next_step(own, own.fault, partitions, book, policy, now)
    if isinstance(step, str):
        return Forecast(None, step)
    held = restraint(book, policy)
    return Forecast(step.how, step.why, held.held if held else HeldAction.NO)
