"""Spares of a partition: validated, kept out of scheduling, lent to the job that joins a run, and taken back. Pure."""

from __future__ import annotations

from dalsegno.recovery.actions import Action, Hold, Release, Turn, Validate
from dalsegno.recovery.book import Book, NodeBook
from dalsegno.recovery.facts import Facts, NodeFacts, joins
from dalsegno.recovery.judge import find_fault
from dalsegno.recovery.phase import Phase
from dalsegno.recovery.policy import Policy
from dalsegno.recovery.reason import Owner
from dalsegno.slurm import JobState

HELD_BACK = ("BeginTime", "Dependency", "JobHeldUser", "JobHeldAdmin", "JobArrayTaskLimit")


def lend(facts: Facts, book: Book, policy: Policy, now: float) -> dict[str, Action]:
    """Spares to release now, one for each job that waits for a node more."""
    free = [node for node in (facts.nodes or {}).values() if _is_ready(node, book.of(node.name), facts, policy, now)]
    served = {own.lent_to for own in book.nodes.values() if own.phase is Phase.LENT}
    lent: dict[str, Action] = {}
    for job in facts.jobs:
        waits = job.state is JobState.PENDING and job.reason not in HELD_BACK and job.id not in served
        if not joins(job) or not waits:
            continue
        node = next((each for each in free if job.partition in each.slurm.partitions), None)
        if node:
            free.remove(node)
            lent[node.name] = Release(node.name, job.id)
    return lent


def _is_ready(node: NodeFacts, own: NodeBook, facts: Facts, policy: Policy, now: float) -> bool:
    kept = own.phase is Phase.SPARE and not own.pending and own.since < facts.slurm_at and own.retry_at <= now
    return (
        kept and node.slurm.draining and node.connected and node.slurm.responding and not find_fault(node, own, policy)
    )


def keep_spare(
    node: NodeFacts, own: NodeBook, whose: Owner, facts: Facts, policy: Policy, now: float
) -> tuple[bool, Action | None]:
    """Whether this is a matter of spares at all, and what is to be done then."""
    if own.phase is Phase.LENT:
        return _lent(node, own, whose, facts)
    if whose is not Owner.SPARE or own.phase.out or find_fault(node, own, policy):
        return False, None
    if not own.validated_at or now - own.validated_at >= policy.burn_in_s:
        return True, Validate(node.name, boot=node.agent.boot) if node.connected and not node.busy else None
    return True, Turn(node.name, Phase.SPARE, "is a spare") if own.phase is not Phase.SPARE else None


def _lent(node: NodeFacts, own: NodeBook, whose: Owner, facts: Facts) -> tuple[bool, Action | None]:
    """Back among the spares when the job it was lent to has gone and it has nothing else to do.

    slurmctld drains it again when it is started anew or reads its files again, where it is a spare: it is given back at
    once, or its job would wait for it for ever, and a run would think ill of it.
    """
    waits = any(job.id == own.lent_to and not job.state.ended for job in facts.jobs)
    if waits and whose is Owner.SPARE:
        return True, Release(node.name, own.lent_to) if node.connected and node.slurm.responding else None
    if waits or node.busy or whose not in (Owner.NOBODY, Owner.SPARE):
        return False, None
    if whose is Owner.SPARE:  # slurmctld has read its files again, where it is one
        return True, Turn(node.name, Phase.SPARE, "is a spare again")
    return True, Hold(node.name)
