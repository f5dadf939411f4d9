"""Decide about the spares of a partition: validate them, keep them out of scheduling, lend them to runs, take them
back. Pure.

A job that is lent a spare gets the highest priority. Users can set the comment of their jobs, so a comment is not
enough: the job must belong to a run that the controller supervises for the same user. A run is lent at most as many
spares as it has lost nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from dalsegno.recovery.decisions.actions import Action, ChangePhase, CloseLoan, Hold, Promote, Recall, Release, Validate
from dalsegno.recovery.decisions.facts import Facts, NodeFacts, is_active, is_join_job
from dalsegno.recovery.decisions.judge import find_fault
from dalsegno.recovery.decisions.phase import NodePhase
from dalsegno.recovery.decisions.policy import Policy
from dalsegno.recovery.decisions.reason import Owner
from dalsegno.recovery.decisions.records import NodeRecord, NodeRecords
from dalsegno.slurm.facts import JobInfo, JobState
from dalsegno.slurm.parse.messages import parse_pending

LOAN_S = 600.0  # a job that has not started on its spare within this time loses the spare


def lend(facts: Facts, records: NodeRecords, policy: Policy, now: float) -> dict[str, Action]:
    """Return the spares to release now: one for each job that waits to replace a lost node, while spares are free."""
    free = [
        node for node in (facts.nodes or {}).values() if _is_ready(node, records.get(node.name), facts, policy, now)
    ]
    served = {own.lent_to for own in records.nodes.values() if own.phase is NodePhase.LENT}
    lent: dict[str, Action] = {}
    given: Counter[str] = Counter()
    for job in facts.jobs:
        run = facts.run_of(job)
        if job.id in served or not is_owed(job, facts, records, given[run]):
            continue
        node = next((each for each in free if job.partition in each.slurm.partitions), None)
        if node:
            free.remove(node)
            given[run] += 1
            lent[node.name] = Release(node.name, job.id, run, job.uid or 0)
    return lent


def promote(facts: Facts, records: NodeRecords, policy: Policy, now: float, lent: Collection[str]) -> dict[str, Action]:
    """Return the spares to put into service now, each in place of a node whose machine only a person can replace.

    `lent` are the spares that jobs get in this round. A promoted spare stays in service until the failed node returns.
    """
    nodes = facts.nodes or {}
    free = [
        node
        for node in nodes.values()
        if node.name not in lent and _is_ready(node, records.get(node.name), facts, policy, now)
    ]
    filled = {own.stands_for for own in records.nodes.values()}
    promoted: dict[str, Action] = {}
    for name, machine in policy.machines.items():
        lost = nodes.get(name)
        if lost is None or name in filled or name in policy.spares or not _needs_admin(name, records):
            continue
        spare = next((each for each in free if set(each.slurm.partitions) & set(lost.slurm.partitions)), None)
        if spare:
            free.remove(spare)
            promoted[spare.name] = Promote(spare.name, name, machine)
    return promoted


def _needs_admin(node: str, records: NodeRecords) -> bool:
    return records.get(node).phase is NodePhase.NEEDS_ADMIN


def keep_promoted(
    node: NodeFacts, own: NodeRecord, owner: Owner, records: NodeRecords, policy: Policy
) -> tuple[bool, Action | None]:
    """Decide for a spare that stands in for another node. Return False as the first value if other rules must decide;
    the second value is the action.

    If the other node is back, the spare is held again; its jobs continue.
    """
    needed = _needs_admin(own.stands_for, records)
    if owner is Owner.SPARE and needed:  # slurmctld has read its configuration again, in which the node is a spare
        again = Promote(node.name, own.stands_for, policy.machines.get(own.stands_for, ""))
        return True, again if node.connected and node.slurm.responding else None
    if owner is Owner.SPARE:
        return True, ChangePhase(node.name, NodePhase.SPARE, "is a spare again")
    if needed or own.phase is not NodePhase.IN_SERVICE or owner is not Owner.NOBODY:
        return False, None
    return True, Hold(node.name, f"{own.stands_for} is back")


def is_owed(job: JobInfo, facts: Facts, records: NodeRecords, given: int = 0) -> bool:
    """Return whether a job waits to replace a lost node of its run. `given` counts the spares already released to the
    run in this round."""
    if not is_join_job(job) or job.state is not JobState.PENDING or parse_pending(job.reason).held_back:
        return False
    run = facts.run_of(job)
    lives = any(is_active(each) and facts.run_of(each) == run for each in facts.jobs)
    return bool(run) and lives and records.owed(run) > given


def _is_ready(node: NodeFacts, own: NodeRecord, facts: Facts, policy: Policy, now: float) -> bool:
    kept = own.phase is NodePhase.SPARE and not own.pending and own.since < facts.slurm_at and own.retry_at <= now
    return (
        kept
        and not node.busy
        and node.slurm.draining
        and node.connected
        and node.slurm.responding
        and not find_fault(node, own, policy)
    )


def keep_spare(
    node: NodeFacts, own: NodeRecord, owner: Owner, facts: Facts, policy: Policy, now: float
) -> tuple[bool, Action | None]:
    """Decide for a spare of a partition. Return False as the first value if other rules must decide; the second value
    is the action."""
    if own.phase is NodePhase.LENT:
        return _decide_lent(node, own, owner, facts, now)
    if owner is not Owner.SPARE or own.phase.out or find_fault(node, own, policy):
        return False, None
    if not own.validated_at or now - own.validated_at >= policy.burn_in_s:
        return True, Validate(node.name, boot=node.agent.boot) if node.connected and not node.busy else None
    return True, ChangePhase(node.name, NodePhase.SPARE, "is a spare") if own.phase is not NodePhase.SPARE else None


def _decide_lent(
    node: NodeFacts, own: NodeRecord, owner: Owner, facts: Facts, now: float
) -> tuple[bool, Action | None]:
    """Decide for a lent spare. Return False as the first value if other rules must decide; the second value is the
    action.

    The node becomes a spare again when its job has ended and no other job is on it. When slurmctld restarts or reads
    its files again, it drains the node. The controller then releases the node at once: otherwise the job would wait
    forever, and the run would count the node as failing.
    """
    job = next((job for job in facts.jobs if job.id == own.lent_to and not job.state.ended), None)
    if job and owner is Owner.SPARE:
        again = Release(node.name, own.lent_to, uid=job.uid or 0)
        return True, again if node.connected and node.slurm.responding else None
    if job and own.since < facts.slurm_at and owner is Owner.NOBODY:
        if job.state is JobState.PENDING and (parse_pending(job.reason).held_back or now - own.entered >= LOAN_S):
            return True, Recall(node.name, job.id, facts.run_of(job))
        if is_active(job) and not own.closed:
            return True, CloseLoan(node.name)
    if job or node.busy or owner not in (Owner.NOBODY, Owner.SPARE):
        return False, None
    if owner is Owner.SPARE:  # slurmctld has read its configuration again, in which the node is a spare
        return True, ChangePhase(node.name, NodePhase.SPARE, "is a spare again")
    return True, Hold(node.name)
