"""Repair of a node that the controller took out of service, one step at a time, until it returns. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from zlib import crc32

from dalsegno.health import NodeReport, Remedy, Verdict
from dalsegno.recovery.agents.view import NODE_LIMITS
from dalsegno.recovery.decisions.actions import (
    Action,
    ChangePhase,
    Drain,
    Hold,
    Repair,
    Return,
    SetDown,
    TakeEvidence,
    Validate,
)
from dalsegno.recovery.decisions.budget import find_tripped_breaker, reboot_refusal
from dalsegno.recovery.decisions.facts import (
    BOOT,
    CORRUPTION,
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
from dalsegno.recovery.decisions.judge import find_fault, reported_faults
from dalsegno.recovery.decisions.phase import NodePhase
from dalsegno.recovery.decisions.policy import Policy
from dalsegno.recovery.decisions.records import DAY_S, MarkKind, NodeRecord, NodeRecords
from dalsegno.runs.comment import nodes_left
from dalsegno.wire.liveness import Presence

# The choice of the next repair: reset, reboot, replace. Each is tried if the one before did not help.


@dataclass(frozen=True)
class RepairStep:
    """The repair to try, and why a lighter one is not possible."""

    how: Remedy
    why: str = ""


def next_step(
    node: NodeRecord, fault: NodeFault, partitions: Collection[str], records: NodeRecords, policy: Policy, now: float
) -> RepairStep | str:
    """Return the next repair to try, or why none is left."""
    most = policy.caps.get(fault.check, Remedy.REPLACE)
    steps = [Remedy.RESET, Remedy.REBOOT, Remedy.REPLACE]
    refusals = []
    for step in steps:
        if step < fault.remedy:
            continue
        if most < step:
            refusals.append(f"the cluster file allows no more than {most.value} for {fault.check}")
            break
        why = _refusal(step, node, fault, partitions, records, policy, now)
        if not why:
            return RepairStep(step, "; ".join(refusals))
        refusals.append(why)
    if fault.remedy > Remedy.REBOOT and Remedy.REPLACE not in policy.can and Remedy.REBOOT in policy.can:
        # The machine cannot be replaced, so a reboot is the strongest step left.
        why = _refusal(Remedy.REBOOT, node, fault, partitions, records, policy, now)
        if why and node.node in policy.machines:
            return f"{why}; {refusals[-1]}"
        return why or RepairStep(Remedy.REBOOT, "; ".join(refusals))
    return refusals[-1]


def _refusal(
    step: Remedy,
    node: NodeRecord,
    fault: NodeFault,
    partitions: Collection[str],
    records: NodeRecords,
    policy: Policy,
    now: float,
) -> str:
    if step is Remedy.REPLACE and step not in policy.can and node.node in policy.machines:
        return f"a person must replace {policy.machines[node.node]}"
    if step not in policy.can:
        return f"this cluster's machines cannot be {PAST[step]} automatically"
    if step is Remedy.RESET:
        return "its GPUs were reset already" if Remedy.RESET in node.steps else ""
    if step is Remedy.REBOOT:
        if Remedy.REPLACE in node.steps:
            return "its replacement was faulty"
        if policy.machines and node.steps.count(Remedy.REBOOT) >= policy.reboots_per_fault:
            return "reboots did not help"  # or they could not be ordered, for example over ssh while the node is off
        return reboot_refusal(records, node.node, fault.key, policy, now)
    if node.steps.count(Remedy.REPLACE) >= policy.replaces_per_fault:
        return f"it was replaced {policy.replaces_per_fault} times, each time by a faulty machine"
    tripped = find_tripped_breaker(records, partitions, policy)
    return f"{policy.breaker} replacements in {tripped} failed in a row" if tripped else ""


PAST = {Remedy.RESET: "reset", Remedy.REBOOT: "rebooted", Remedy.REPLACE: "replaced"}


# Lifecycle of a node out of service


AGAIN_S = 60.0  # shortest time between validations while a fault needs an administrator
MAX_ASKS = 3  # maximum number of orders per validation: an order is lost if the agent or the controller restarts


@dataclass(frozen=True)
class RepairCase:
    """One node out of service, with everything that its repair depends on."""

    node: NodeFacts
    own: NodeRecord
    facts: Facts
    records: NodeRecords
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
        return self.now - max(self.own.entered, self.records.saw_at)


_NO_AGENT = "no node agent can validate it: an administrator must return it to service"


def repair(
    node: NodeFacts, own: NodeRecord, facts: Facts, records: NodeRecords, policy: Policy, now: float
) -> Action | None:
    case = RepairCase(node, own, facts, records, policy, now)
    if not policy.agents:
        waits = own.phase is NodePhase.NEEDS_ADMIN
        return None if waits else _require_admin(case, f"{case.fault.summary}; {_NO_AGENT}")
    if own.phase is NodePhase.DRAINED:
        return _decide_drained(case)
    if own.phase is NodePhase.DOWN:
        return _decide_down(case)
    if own.phase is NodePhase.REPAIRING:
        return _decide_repairing(case)
    if own.phase is NodePhase.VALIDATING:
        return _decide_validating(case)
    return _decide_needs_admin(case)


def _decide_drained(case: RepairCase) -> Action | None:
    """Decide the next action for a drained node: wait until its jobs end, then repair it."""
    if worse := _escalate(case):
        return worse
    if case.node.left or (case.node.ending and case.fault.check == SLURMD):
        # All runs have already left the node, or its slurmd is dead and will never confirm that the jobs have ended.
        return SetDown(case.name, case.fault)
    return _return_at_once(case) if case.node.busy else _decide_free(case)


def _return_at_once(case: RepairCase) -> Action | None:
    """Decide whether the node returns to service without a validation.

    Its fault must be over and of a kind that leaves no damage, and no run may have left the node. All its jobs must be
    runs, which then need not restart. After the outage of a file server, the node may also have other jobs, or no job.
    """
    jobs, check = case.node.jobs, case.fault.check
    stay = case.fault.server_away or (bool(jobs) and not any(is_plain(job) for job in jobs))
    stay = stay and not any(case.name in nodes_left(job.comment) for job in jobs)
    well = check in case.policy.passing and _is_over(case) and not reported_faults(case.node, case.policy)
    regular = case.name not in case.policy.spares  # a lent spare is not returned: it becomes a spare again
    return Return(case.name, f"{check} passes again", tried=False) if stay and well and regular else None


def _decide_free(case: RepairCase) -> Action | None:
    """Decide the next action for a node that has no more jobs."""
    if _is_announced(case):
        return _wait_for_administrator(case)
    if case.fault.server_away:
        return _return_at_once(case) or _wait_for_server(case)
    if _is_stale(case) or _is_over(case):
        return _validate(case)
    if case.fault.remedy is Remedy.DRAIN:
        return _wait_for_administrator(case)
    return _start_repair(case)


def _escalate(case: RepairCase) -> Action | None:
    """Escalate if the node now has a heavier fault than the one it was drained for."""
    fault = find_fault(case.node, replace(case.own, excuses=()), case.policy)
    if fault and fault.gone and not case.fault.gone:
        jobs = tuple(job.id for job in case.node.jobs if is_plain(job))
        remedy = case.fault.remedy if case.fault.notice else max(case.fault.remedy, fault.remedy)
        lost = fault if case.fault.server_away else replace(case.fault, gone=True, remedy=remedy)
        return SetDown(case.name, lost, jobs, case.node.held)
    if fault and (case.fault.remedy < fault.remedy or (fault.notice and fault.code != case.fault.code)):
        return Drain(case.name, fault, case.node.held)
    return None


def _is_stale(case: RepairCase) -> bool:
    """Return whether the node was rebooted since it was drained, but not by the controller. Its fault may be over."""
    booted, drained = case.node.slurm.booted_at, case.node.slurm.reason_at
    by_slurm = booted is not None and drained is not None and drained < booted
    by_agent = bool(case.own.boot) and case.node.agent.boot != case.own.boot
    return (by_slurm or by_agent) and case.node.connected and not case.own.steps and not case.own.asked


def _is_over(case: RepairCase) -> bool:
    """Return whether the fault ended without a repair. If the same fault occurs twice in a day, the node is repaired
    anyway, unless its file server was the cause."""
    untouched = not case.own.steps and not case.own.asked
    times = case.records.count(MarkKind.TAKEN, case.now - DAY_S, node=case.name, key=case.fault.key)
    return untouched and (times <= 1 or case.fault.server_away) and case.node.connected and _passes_now(case)


def _wait_for_administrator(case: RepairCase) -> Action | None:
    if not case.node.connected:
        return _require_admin_after(case, case.policy.person_s, "its agent does not answer")
    still = any(fault.check == case.fault.check for fault in reported_faults(case.node, case.policy))
    still = still or case.fault.check == CORRUPTION  # a validation does not detect this fault
    if not still and not case.own.asked:
        return _validate(case)
    if case.in_phase_s >= AGAIN_S and _passes_now(case):  # the check that failed in the validation passes now
        return _validate(case)
    if (notice := case.fault.notice) and case.now < notice.deadline + case.policy.person_s:
        return None  # an administrator can do nothing, because the cloud provider ends the instance
    return _require_admin_after(case, case.policy.person_s, case.fault.summary)


def _wait_for_server(case: RepairCase) -> Action | None:
    """Validate the node once its file system answers; until then, wait.

    An administrator is needed in two cases: the node's agent stays silent, or the server answers all other nodes and
    none of these returned recently. After an outage, nodes connect to their server at very different times.
    """
    if case.node.connected and _passes_now(case):
        again = not case.own.asked or case.in_phase_s >= AGAIN_S
        return _validate(case) if again else None
    since = case.node.agent.since
    if case.node.connected:
        others = [other for other in _other_nodes(case) if other.connected]
        known = [case.records.get(other.name) for other in others]
        faults = [fault for other in others for fault in reported_faults(other, case.policy)]
        if not others or any(fault.server_away for fault in (*faults, *(each.fault for each in known if each.fault))):
            return None
        since = max(since, *(each.entered for each in known))
    late = case.now - since >= case.policy.person_s
    return _require_admin_after(case, case.policy.person_s, case.fault.summary) if late else None


def _other_nodes(case: RepairCase) -> list[NodeFacts]:
    return [other for other in (case.facts.nodes or {}).values() if other.name != case.name]


def _require_admin_after(case: RepairCase, limit_s: float, why: str) -> Action | None:
    return _require_admin(case, why) if case.in_phase_s >= limit_s else None


def _require_admin(case: RepairCase, why: str) -> ChangePhase:
    return ChangePhase(case.name, NodePhase.NEEDS_ADMIN, why, boot=case.node.agent.boot or case.own.last_boot)


def _decide_down(case: RepairCase) -> Action | None:
    """Decide the next action for a lost node.

    Slurm must remove the node from its jobs before a repair, because the repair would end the jobs.
    """
    if case.node.busy:
        return _require_admin_after(case, case.policy.removal_s, "Slurm does not remove it from its jobs")
    if case.node.connected and not case.fault.gone:
        return _decide_free(case)  # the node was set down only so that Slurm would remove it from its jobs
    if case.node.connected and not case.own.steps and not case.own.asked and not _is_announced(case):
        return _validate(case)  # the node came back by itself
    if case.fault.notice:
        why = f"the cloud has not given it back: {case.fault.summary}"
        return _require_admin_after(case, case.policy.absent_s, why)
    if case.in_phase_s < case.policy.gone_s and not case.node.off:
        return None
    return _start_repair(case)


def _is_announced(case: RepairCase) -> bool:
    """Return whether the cloud provider has announced that it ends the node's current instance."""
    return case.node.connected and any(fault.notice for fault in reported_faults(case.node, case.policy))


def _start_repair(case: RepairCase) -> Action | None:
    if not case.own.evidence:
        return None if _may_agent_return(case) else TakeEvidence(case.name, case.own.held)
    step = next_step(case.own, case.fault, case.node.slurm.partitions, case.records, case.policy, case.now)
    if isinstance(step, str):
        return _require_admin(case, f"{case.fault.summary}; {step}")
    boot = case.node.agent.boot or case.own.last_boot
    return Repair(case.name, step.how, case.fault, boot, _gpus(case.node.agent.report), step.why)


def _may_agent_return(case: RepairCase) -> bool:
    """Return whether the agent could still connect after a restart or an outage, and then send its evidence."""
    agent = case.node.agent
    waited_for = agent.presence in (Presence.NEVER, Presence.SILENT) and case.now < agent.since + NODE_LIMITS.new_s
    return waited_for and not case.node.off


def _gpus(report: NodeReport | None) -> tuple[str, ...]:
    return tuple(gpu.uuid for gpu in report.gpus if gpu.uuid) if report else ()


def _decide_repairing(case: RepairCase) -> Action | None:
    """Decide the next action for a node under repair. After a reboot or replacement, it must have a new boot id."""
    back = case.node.connected and (case.own.steps[-1] is Remedy.RESET or case.node.agent.boot != case.own.boot)
    if not back and case.in_phase_s >= case.policy.boot_s:
        return _fail_repair(case, NodeFault(BOOT, Remedy.REBOOT, f"did not come back within {case.policy.boot_s:g} s"))
    if not back:
        return None
    return _reject_replaced_gpus(case) or _validate(case)


def _reject_replaced_gpus(case: RepairCase) -> Action | None:
    """Return the action that rejects a new machine, if one of its GPUs is from a machine that was replaced; None if
    not."""
    replaced_gpus = (
        set(_gpus(case.node.agent.report)) & case.records.replaced_gpus if Remedy.REPLACE in case.own.steps else set()
    )
    if not replaced_gpus:
        return None
    text = f"GPU {min(replaced_gpus)} was replaced before and has come back"
    return _fail_repair(case, NodeFault(PASSPORT, Remedy.REPLACE, text))


def _fail_repair(case: RepairCase, fault: NodeFault) -> Action:
    """Record that the last repair did not help. A faulty new machine is replaced, not repaired.

    If the node's file server does not answer, nothing is known about the repair: the node is validated again later.
    """
    if fault.server_away:
        return ChangePhase(case.name, NodePhase.DRAINED, fault.summary, fault)
    replaced = Remedy.REPLACE in case.own.steps
    remedy = Remedy.REPLACE if replaced else max(case.policy.remedy(fault), Remedy.DRAIN)
    to = NodePhase.DOWN if case.node.gone else NodePhase.DRAINED
    return ChangePhase(case.name, to, fault.summary, replace(fault, remedy=remedy), failed=True)


def _validate(case: RepairCase) -> Validate:
    return Validate(case.name, _choose_partner(case), case.node.agent.boot)


def _choose_partner(case: RepairCase) -> str:
    """Return an idle, healthy node of the same partition, or "". Nodes under repair usually get different partners."""
    good = [other.name for other in _other_nodes(case) if _may_be_partner(case, other)]
    return good[crc32(case.name.encode()) % len(good)] if good else ""


def _may_be_partner(case: RepairCase, other: NodeFacts) -> bool:
    shares = set(other.slurm.partitions) & set(case.node.slurm.partitions)
    known = case.records.get(other.name).phase in (NodePhase.IN_SERVICE, NodePhase.SPARE)
    idle = other.connected and not other.busy and not reported_faults(other, case.policy)
    return bool(shares) and known and idle


def _decide_validating(case: RepairCase) -> Action | None:
    answer = case.node.validation
    if answer is None or answer.ask != case.own.asked:
        if case.node.gone or case.in_phase_s >= case.policy.validate_s:
            return _fail_repair(case, NodeFault(VALIDATION, Remedy.REBOOT, "it did not finish its validation in time"))
        lost = case.node.connected and case.node.validating != case.own.asked
        return _validate(case) if lost and case.own.asks < MAX_ASKS else None
    if not answer.passed:
        bad = heaviest(fault_of(each) for each in failures(answer.findings))
        return _fail_repair(case, bad or NodeFault(VALIDATION, Remedy.DRAIN, "no check could be run"))
    if refused := _reject_replaced_gpus(case):  # checked again, because the agent may have reported its GPUs only now
        return refused
    if _are_gpus_unknown(case) and case.in_phase_s < case.policy.validate_s:
        return None
    if not case.node.slurm.responding:
        return _require_admin_after(
            case, case.policy.validate_s + case.policy.boot_s, "it is healthy, but slurmd does not register"
        )
    spare = case.name in case.policy.spares
    return Hold(case.name, answer.proof) if spare else Return(case.name, answer.proof)


def _are_gpus_unknown(case: RepairCase) -> bool:
    new = Remedy.REPLACE in case.own.steps
    return new and case.node.slurm.gpus > 0 and not _gpus(case.node.agent.report)


def _decide_needs_admin(case: RepairCase) -> Action | None:
    """Validate again if an administrator has worked on the node.

    This is assumed if the node was rebooted, if the GPUs for which it was refused were forgiven or removed, or if a
    failed check that no repair can cure passes now.
    """
    again = case.node.connected and not case.node.busy
    rebooted = bool(case.own.boot) and case.node.agent.boot != case.own.boot
    repaired = case.fault.remedy is Remedy.DRAIN and _passes_now(case)
    if again and (rebooted or repaired or _is_forgiven(case) or _is_stale(case)):
        return _validate(case)
    return None


def _is_forgiven(case: RepairCase) -> bool:
    return case.fault.check == PASSPORT and not set(_gpus(case.node.agent.report)) & case.records.replaced_gpus


def _passes_now(case: RepairCase) -> bool:
    report = case.node.agent.report
    findings = [each for each in report.findings if each.check == case.fault.check] if report else []
    return bool(findings) and all(each.result.verdict is Verdict.PASSED for each in findings)
