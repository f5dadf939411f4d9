"""Spares of a partition: validated, kept out of scheduling, lent to a job that joins a run, and taken back. Pure.

A job that is lent a spare gets the highest priority, so the job's comment, which a user can set, is not enough. The job
must belong to a run that the controller supervises for the same user. A run is lent at most as many spares as it has
lost nodes.
"""

from __future__ import annotations

from collections import Counter

from dalsegno.recovery.actions import Action, ChangePhase, CloseLoan, Hold, Recall, Release, Validate
from dalsegno.recovery.facts import Facts, NodeFacts, is_active, is_join_job
from dalsegno.recovery.judge import find_fault
from dalsegno.recovery.phase import NodePhase
from dalsegno.recovery.policy import Policy
from dalsegno.recovery.reason import Owner
from dalsegno.recovery.records import NodeRecord, NodeRecords
from dalsegno.slurm.facts import JobInfo, JobState
from dalsegno.slurm.parse.messages import parse_pending

LOAN_S = 600.0  # a job that has not started on its spare by then loses the spare


def lend(facts: Facts, records: NodeRecords, policy: Policy, now: float) -> dict[str, Action]:
    """Return the spares to release now, one for each job that waits to replace a lost node of its run."""
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
        kept and node.slurm.draining and node.connected and node.slurm.responding and not find_fault(node, own, policy)
    )


def keep_spare(
    node: NodeFacts, own: NodeRecord, owner: Owner, facts: Facts, policy: Policy, now: float
) -> tuple[bool, Action | None]:
    """Return whether the node is handled as a spare, and the action for it."""
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
    """Decide for a lent spare. It becomes a spare again when its job has ended and no other job is on it.

    When slurmctld restarts or reads its files again, it drains the node. The controller then releases the node at once:
    otherwise the job would wait forever, and the run would count the node as failing.
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
    if owner is Owner.SPARE:  # slurmctld has read its files again, which list the node as a spare
        return True, ChangePhase(node.name, NodePhase.SPARE, "is a spare again")
    return True, Hold(node.name)
