"""Update the records when an action begins or ends, or a node changes its phase. Pure."""

from __future__ import annotations

from dataclasses import replace

from dalsegno.health import Remedy
from dalsegno.recovery.decisions.actions import (
    Action,
    ChangePhase,
    CloseLoan,
    ContactChange,
    Drain,
    Expedite,
    Hold,
    Note,
    Promote,
    Recall,
    Release,
    Repair,
    Requeue,
    Return,
    SetDown,
    TakeEvidence,
    Validate,
)
from dalsegno.recovery.decisions.facts import Facts
from dalsegno.recovery.decisions.phase import HeldAction, NodePhase
from dalsegno.recovery.decisions.policy import Policy
from dalsegno.recovery.decisions.reason import ANYTHING
from dalsegno.recovery.decisions.records import BudgetMark, MarkKind, NodeRecord, NodeRecords, PendingAction

MAX_RETRY_S = 60.0
MAX_REPAIR_FAILURES = 5  # after this many failures in a row, a repair counts as tried, and the next one is chosen


def begin_action(
    records: NodeRecords, action: Action, id: str, now: float, partitions: tuple[str, ...] = ()
) -> NodeRecords:
    """Return the records with an action that is about to be carried out. From now on, it counts against budgets."""
    old = records.get(action.node)
    boot = action.boot if isinstance(action, Repair) else ""
    how = action.how.value if isinstance(action, Repair) else ""
    new = replace(old, pending=PendingAction(id, now, boot, how), since=now)
    marks: list[BudgetMark] = []
    if isinstance(action, (Drain, SetDown)) and not old.counts:
        marks.append(BudgetMark(MarkKind.TAKEN, action.node, now, action.fault.key, partitions, action.runs))
    if isinstance(action, Repair) and action.how is Remedy.REBOOT:
        marks.append(BudgetMark(MarkKind.REBOOTED, action.node, now, action.fault.key, partitions))
    if isinstance(action, Repair) and action.how is Remedy.REPLACE:
        records = replace(records, replaced_gpus=records.replaced_gpus | set(action.gpus))
    return records.with_node(new, *marks)


def end_action(
    records: NodeRecords,
    action: Action,
    id: str,
    error: str,
    now: float,
    policy: Policy,
    partitions: tuple[str, ...] = (),
) -> NodeRecords:
    """Return the records after an action was carried out, or failed."""
    old = replace(records.get(action.node), pending=None, since=now)
    if error:
        return _apply_failed(records, old, action, now, policy, partitions)
    return records.with_node(
        _apply_done(
            replace(old, failures=0, retry_at=0.0, said="", about=ANYTHING, held_back=HeldAction.NO), action, id, now
        ),
        *_success_marks(records, old, action, now, partitions),
    )


def _success_marks(
    records: NodeRecords, old: NodeRecord, action: Action, now: float, partitions: tuple[str, ...]
) -> list[BudgetMark]:
    if isinstance(action, Release) and action.run:
        return [BudgetMark(MarkKind.LENT, old.node, now, "", partitions, (action.run,))]
    if isinstance(action, Recall) and action.run:
        return [BudgetMark(MarkKind.RECALLED, old.node, now, "", partitions, (action.run,))]
    if isinstance(action, Hold) and old.phase is NodePhase.LENT:
        return _unused_loan(records, old, now, partitions)
    replaced = isinstance(action, (Return, Hold)) and Remedy.REPLACE in old.steps
    return [BudgetMark(MarkKind.REPLACED_WELL, old.node, now, "", partitions)] if replaced else []


def _unused_loan(records: NodeRecords, node: NodeRecord, now: float, partitions: tuple[str, ...]) -> list[BudgetMark]:
    """Return a mark if the job that was lent a spare has ended without starting there; the run may then be lent
    another.

    This happens when a lost node is usable again: the run cancels the job and submits one that may use that node.
    """
    lent = [mark.runs for mark in records.marks if mark.kind is MarkKind.LENT and mark.node == node.node]
    if node.closed or not lent:
        return []
    return [BudgetMark(MarkKind.RECALLED, node.node, now, "", partitions, lent[-1])]


def _apply_done(node: NodeRecord, action: Action, id: str, now: float) -> NodeRecord:
    if isinstance(action, Drain):
        return _apply_taken(node, NodePhase.DRAINED, action, now)
    if isinstance(action, SetDown):
        return replace(
            _apply_taken(node, NodePhase.DOWN, action, now), victims=tuple(sorted({*node.victims, *action.jobs}))
        )
    if isinstance(action, TakeEvidence):
        return replace(node, evidence=True)
    if isinstance(action, Repair):
        steps = (*node.steps, action.how)
        return replace(node, phase=NodePhase.REPAIRING, entered=now, steps=steps, asks=0, boot=action.boot)
    if isinstance(action, Validate):
        return replace(node, phase=NodePhase.VALIDATING, entered=now, asked=id, asks=node.asks + 1, boot=action.boot)
    if isinstance(action, Return):
        return replace(
            clear_faults(node, NodePhase.IN_SERVICE, now), validated_at=now if action.tried else node.validated_at
        )
    if isinstance(action, Hold):
        return replace(clear_faults(node, NodePhase.SPARE, now), validated_at=now)
    if isinstance(action, Release):
        return replace(clear_faults(node, NodePhase.LENT, now), lent_to=action.job)
    if isinstance(action, Promote):
        return replace(clear_faults(node, NodePhase.IN_SERVICE, now), stands_for=action.place)
    if isinstance(action, CloseLoan):
        return replace(node, closed=True)
    if isinstance(action, Recall):
        return clear_faults(node, NodePhase.SPARE, now)
    if isinstance(action, Expedite):
        return replace(node, told_at=now)
    if isinstance(action, Requeue):
        return replace(node, victims=tuple(sorted({*node.victims, action.job})))
    return node


def _apply_taken(node: NodeRecord, phase: NodePhase, action: Drain | SetDown, now: float) -> NodeRecord:
    again = node.out  # if the node was already out of service, its fault has become worse
    return replace(
        node,
        phase=phase,
        entered=now,
        fault=action.fault,
        steps=node.steps if again else (),
        evidence=node.evidence and again,
        boot=node.boot if again else node.last_boot,
        held=tuple(sorted({*(node.held if again else ()), *action.held})),
        asked=node.asked if again else "",
        asks=node.asks if again else 0,
        excuses=(),
        stands_for="",
    )


def clear_faults(node: NodeRecord, phase: NodePhase, now: float) -> NodeRecord:
    """Return a record without faults and repairs; the jobs that lost the node are kept."""
    return NodeRecord(
        node.node, phase, since=now, entered=now, seen=True, victims=node.victims, told_at=node.told_at,
        validated_at=node.validated_at, last_boot=node.last_boot,
        stands_for=node.stands_for if phase is NodePhase.IN_SERVICE else "",
    )  # fmt: skip


def _apply_failed(
    records: NodeRecords, node: NodeRecord, action: Action, now: float, policy: Policy, partitions: tuple[str, ...]
) -> NodeRecords:
    """Return the records after a failed action, with the time of the next attempt.

    A failed replacement counts against the budget. A repair that keeps failing is not retried.
    """
    pause = min(policy.retry_s * 2**node.failures, MAX_RETRY_S)
    node = replace(node, failures=node.failures + 1, retry_at=now + pause)
    if isinstance(action, Requeue):  # a job whose requeue failed is not requeued again
        return records.with_node(replace(node, failures=0, retry_at=0.0, left=(*node.left, action.job)))
    if not isinstance(action, Repair):
        return records.with_node(node)
    if action.how is Remedy.REPLACE:
        node = replace(node, steps=(*node.steps, action.how), retry_at=now + policy.capacity_s)
        return records.with_node(
            node, BudgetMark(MarkKind.REPLACED_BADLY, node.node, now, action.fault.key, partitions)
        )
    if node.failures >= MAX_REPAIR_FAILURES:
        node = replace(node, steps=(*node.steps, action.how), failures=0, retry_at=0.0)
    return records.with_node(node)


def apply_change(
    records: NodeRecords, action: ChangePhase | Note, now: float, partitions: tuple[str, ...] = ()
) -> NodeRecords:
    """Return the records with a new phase or a remark, without an action."""
    old = records.get(action.node)
    if isinstance(action, Note):
        left = tuple(job for job in old.victims if job not in action.settles)
        excuses = old.excuses if action.excuses is None else action.excuses
        noted = replace(old, said=action.text, about=action.about, held_back=action.held_back, excuses=excuses)
        return records.with_node(replace(old, victims=left) if action.settles else noted)
    marks = []
    if action.failed and old.steps[-1:] == (Remedy.REPLACE,):
        marks.append(BudgetMark(MarkKind.REPLACED_BADLY, old.node, now, old.fault.key if old.fault else "", partitions))
    if action.to is NodePhase.SPARE and old.phase is NodePhase.LENT:
        marks += _unused_loan(records, old, now, partitions)
    if action.to in (NodePhase.IN_SERVICE, NodePhase.SPARE):
        cleared = replace(clear_faults(old, action.to, now), excuses=action.excuses, relapses=action.relapses)
        return records.with_node(cleared, *marks)
    new = replace(old, phase=action.to, since=now, entered=now, fault=action.fault or old.fault)
    boot, relapses = action.boot or old.boot, action.relapses or old.relapses
    changed = replace(
        new, said=action.why, about=action.about, held_back=action.held_back, boot=boot, relapses=relapses
    )
    return records.with_node(changed, *marks)


def apply_contact_change(records: NodeRecords, action: ContactChange, now: float) -> NodeRecords:
    return replace(records, blind=action.blind, saw_at=records.saw_at if action.blind else now)


def record_seen(records: NodeRecords, facts: Facts) -> NodeRecords:
    """Return the records with the nodes that were seen. From then on, their absence is a fault."""
    for node in (facts.nodes or {}).values():
        old = records.get(node.name)
        boot = node.agent.boot if node.connected and node.agent.boot else old.last_boot
        seen = old.seen or node.slurm.in_service or node.connected
        if (seen, boot) != (old.seen, old.last_boot):
            records = records.with_node(replace(old, seen=seen, last_boot=boot))
    return records
