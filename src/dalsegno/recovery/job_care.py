"""Jobs that nobody but Slurm looks after, on nodes that fail them. Runs look after themselves. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from dalsegno.recovery.actions import Action, Expedite, Note, Requeue
from dalsegno.recovery.book import NodeBook
from dalsegno.recovery.facts import NodeFacts, is_plain
from dalsegno.recovery.phase import Phase
from dalsegno.recovery.policy import Policy
from dalsegno.slurm.facts import JobInfo, JobState
from dalsegno.slurm.parse.pending import PendingReason, parse_pending

AGAIN_S = 3.0  # Slurm holds a requeued job back for a while, whatever it is told: it is told until it starts


def care_for_jobs(node: NodeFacts, own: NodeBook, jobs: Iterable[JobInfo], policy: Policy, now: float) -> Action | None:
    return _after_loss(own, jobs, now) or _before_its_end(node, own, policy)


def _after_loss(own: NodeBook, jobs: Iterable[JobInfo], now: float) -> Action | None:
    """Slurm requeues what may be requeued, and has it wait for two minutes."""
    if not own.victims:
        return None
    known = {job.id: job for job in jobs}
    for each in own.victims:
        job = known.get(each)
        if job is None:
            return Note(own.node, f"job {each} is over", settles=(each,))
        if job.state.ended:
            text = f"job {each} has ended with its node ({job.state.value}): it may not be requeued, and is left alone"
            return Note(own.node, text, settles=(each,))
        if job.state is JobState.RUNNING and (own.node not in job.nodes or not own.phase.out):
            return Note(own.node, f"job {each} runs again on {', '.join(job.nodes)}", settles=(each,))
        held = job.state is JobState.PENDING and parse_pending(job.reason) is PendingReason.BEGIN_TIME
        if held and now - own.told_at >= AGAIN_S:
            return Expedite(own.node, each)
    return None


def _before_its_end(node: NodeFacts, own: NodeBook, policy: Policy) -> Action | None:
    """A live node on which no job can go on: what may start anew does; the others are waited for."""
    doomed = own.fault and {own.fault.key, own.fault.check} & policy.doomed
    if own.phase is not Phase.DRAINED or not doomed:
        return None
    for job in node.jobs:
        known = job.id in own.victims or job.id in own.left
        if is_plain(job) and job.batch_host and job.state is JobState.RUNNING and not known:
            return Requeue(node.name, job.id)
    return None
