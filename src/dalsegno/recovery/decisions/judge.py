"""Judge which faults a node has now, from everything that is known about it. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from dalsegno.containers.native import NO_CONTAINER
from dalsegno.health import Remedy, Verdict
from dalsegno.recovery.decisions.facts import (
    BLACK_HOLE,
    CORRUPTION,
    GONE,
    NodeFacts,
    NodeFault,
    failures,
    fault_of,
    heaviest,
    is_plain,
)
from dalsegno.recovery.decisions.phase import NodePhase
from dalsegno.recovery.decisions.policy import Policy
from dalsegno.recovery.decisions.reason import Subject, Topic
from dalsegno.recovery.decisions.records import NodeRecord, NodeRecords
from dalsegno.slurm.facts import JobInfo, JobState
from dalsegno.wire.liveness import Presence

NETWORK = "network"  # the health check of the network
_FAILED = (JobState.FAILED, JobState.NODE_FAIL, JobState.LAUNCH_FAILED, JobState.BOOT_FAIL)


@dataclass(frozen=True)
class EarlyFailures:
    """Jobs that failed on a node right after their start. `proven`: the cause is the node, not the jobs."""

    count: int = 0
    proven: bool = False

    @property
    def summary(self) -> str:
        return f"{self.count} jobs failed here right after they started"


NONE = EarlyFailures()


def find_fault(node: NodeFacts, own: NodeRecord, policy: Policy, quick: EarlyFailures = NONE) -> NodeFault | None:
    """Return the heaviest fault that justifies an action; None if there is none, or all are accepted."""
    return heaviest(fault for fault in current_faults(node, own, policy, quick) if fault.key not in own.excuses)


def current_faults(node: NodeFacts, own: NodeRecord, policy: Policy, quick: EarlyFailures = NONE) -> list[NodeFault]:
    """Return all faults that justify an action, accepted or not.

    A node whose agent never connected has none: it could not be confirmed that a repair has helped.
    """
    return [fault for fault in _faults(node, own, policy, quick) if not fault.remedy < Remedy.DRAIN]


def is_over(node: NodeFacts, own: NodeRecord, faults: Collection[NodeFault], agents: bool = True) -> bool:
    """Return whether the node's own report shows that all accepted faults are over.

    While the result of a check is unknown, its fault is not over. Without node agents there are no reports, and Slurm's
    state decides.
    """
    if not agents:
        return node.connected and not faults
    checks = {key.partition("[")[0] for key in own.excuses}
    findings = node.agent.report.findings if node.agent.report and node.connected else ()
    unknown = any(each.check in checks and each.result.verdict is Verdict.UNKNOWN for each in findings)
    return bool(findings) and not unknown and not faults


def _faults(node: NodeFacts, own: NodeRecord, policy: Policy, quick: EarlyFailures) -> Iterator[NodeFault]:
    if node.gone and own.seen and own.last_boot:
        silent = "neither its agent nor slurmd answers" if policy.agents else "slurmd answers neither Slurm nor a probe"
        yield NodeFault(GONE, policy.gone_remedy, f"{silent}{_network_warning(node)}", gone=True)
        return
    if not node.connected:  # a fault that a silent agent reported earlier may have been repaired
        return
    yield from reported_faults(node, policy)
    if node.wrong_result and _trusts_run(node, policy):
        yield NodeFault(CORRUPTION, Remedy.DRAIN, node.wrong_result)
    if quick.proven and quick.count >= policy.quick_failures:
        yield NodeFault(BLACK_HOLE, Remedy.DRAIN, quick.summary)


def _trusts_run(node: NodeFacts, policy: Policy) -> bool:
    """Return whether a run's report justifies a drain.

    A report by root or the cluster's owner does. A report by another user does only if the cluster file allows it.
    """
    return CORRUPTION not in policy.off and (node.reported_by_owner or CORRUPTION in policy.on)


def reported_faults(node: NodeFacts, policy: Policy) -> list[NodeFault]:
    """Return the faults that the node's own checks report. A notice of the cloud hides all others: nothing is repaired
    on an instance that the cloud provider ends."""
    findings = node.agent.report.findings if node.agent.report else ()
    faults = [fault_of(each) for each in failures(findings) if each.check not in policy.off]
    faults = [fault for fault in faults if fault.notice] or faults
    return [replace(fault, remedy=policy.remedy(fault)) for fault in faults]


@dataclass(frozen=True)
class Suspicion:
    """An irregularity of a node that does not justify an action."""

    about: Subject
    text: str


def find_suspicion(node: NodeFacts, own: NodeRecord, policy: Policy, quick: EarlyFailures = NONE) -> Suspicion | None:
    """Return an irregularity that justifies no action, because only one source shows it; None if there is none."""
    line = _network_warning(node)
    if node.agent.presence is Presence.SILENT and own.seen:
        return Suspicion(Subject(Topic.AGENT_SILENT, bool(line)), f"its agent is silent{line}")
    if node.agent.presence is Presence.AGENT_DEAD:
        text = f"its agent is dead but the node answers: its health is unknown{line}"
        return Suspicion(Subject(Topic.AGENT_DEAD, bool(line)), text)
    if node.wrong_result and CORRUPTION not in policy.off:
        return Suspicion(Subject(Topic.CORRUPTION), f"a run reports {node.wrong_result}")
    if quick.count >= policy.quick_failures:
        return Suspicion(Subject(Topic.QUICK_FAILURES, count=quick.count), f"{quick.summary}, all of one user")
    return None


def is_reported(about: Subject, own: NodeRecord) -> bool:
    """Return whether a remark with this subject would repeat the last one.

    After a remark with a network warning, any further remark on the same topic counts as a repetition.
    """
    return about == own.about or (about.topic is own.about.topic and own.about.network)


def count_relapse(own: NodeRecord, policy: Policy, now: float) -> int:
    """Return the number of suspicions in a row, including a new one."""
    if own.phase is not NodePhase.IN_SERVICE:
        return own.relapses
    return own.relapses + 1 if own.relapses and now - own.entered < policy.relapse_s else 1


def is_steady(node: NodeFacts, own: NodeRecord, policy: Policy, now: float) -> bool:
    """Return whether the suspicion of a node that shows no fault now can end.

    Its agent must have been connected for some time; without a connected agent, there is no wait. The time grows with
    each relapse, because agents on a network that loses packets fall silent every few seconds.
    """
    steady_s = policy.steady_s[min(max(own.relapses, 1), len(policy.steady_s)) - 1]
    return not node.connected or now - node.agent.since >= steady_s


def _network_warning(node: NodeFacts) -> str:
    """Return the network warning in the last report; "" if there is none. The warning names the symptom, not the
    cause."""
    findings = node.agent.report.findings if node.agent.report else ()
    bad = [each.result for each in findings if each.check == NETWORK and each.result.verdict is Verdict.WARNED]
    return "".join(f"; before that, {result.text}" for result in bad)


Kind = tuple[int | None, str]  # uid and name of a job


def quick_failures(
    jobs: Iterable[JobInfo], records: NodeRecords, policy: Policy, now: float
) -> dict[str, EarlyFailures]:
    """Return, for each node, how many jobs failed there right after their start.

    Failures before the node's last validation or last successful job do not count. Jobs of the same user and name that
    fail on several nodes do not count either, because the cause is not the node.

    Failures of several users' jobs prove that the node is faulty. Failures of one user's jobs do not, because the user
    may repeat a mistake. They are proof only if the cluster has no jobs of other users and a job of the same name has
    succeeded. Otherwise a user could get shared nodes drained by choosing job names.
    """
    jobs = list(jobs)
    well = _last_success(jobs, policy)
    where: dict[Kind, list[str]] = {}
    for job in jobs:
        if _failed_quickly(job, policy) and (job.started_at or now) > well.get(job.nodes[0], 0):
            since = max(now - policy.quick_window_s, records.get(job.nodes[0]).validated_at)
            if job.ends_at is not None and job.ends_at >= since:
                where.setdefault((job.uid, job.name), []).append(job.nodes[0])
    alone = len({job.uid for job in jobs}) == 1
    fine = {(job.uid, job.name) for job in jobs if alone and _succeeded(job, policy)}
    failed: dict[str, list[Kind]] = {}
    for kind, nodes in where.items():
        if len(set(nodes)) == 1:
            failed.setdefault(nodes[0], []).extend([kind] * len(nodes))
    return {node: EarlyFailures(len(kinds), _proves(kinds, fine)) for node, kinds in failed.items()}


def _proves(kinds: Collection[Kind], fine: Collection[Kind]) -> bool:
    return len({user for user, _ in kinds}) > 1 or not set(fine).isdisjoint(kinds)


def _failed_quickly(job: JobInfo, policy: Policy) -> bool:
    """Return whether a job failed right after its start and counts as evidence.

    Jobs of runs do not count: a run ends its jobs itself, tries each node several times, and leaves bad ones.

    Jobs whose container could not be started do not count either: the image may be missing, or the options wrong. A
    user whose jobs exit with NO_CONTAINER on purpose excludes only these jobs.
    """
    failed = job.state in _FAILED and job.exit_code != NO_CONTAINER
    return failed and is_plain(job) and len(job.nodes) == 1 and job.elapsed_s <= policy.quick_s


def _succeeded(job: JobInfo, policy: Policy) -> bool:
    return bool(job.nodes) and (job.state is JobState.COMPLETED or job.elapsed_s > policy.quick_s)


def _last_success(jobs: Iterable[JobInfo], policy: Policy) -> dict[str, int]:
    """Return, by node, when the last successful job started there."""
    well: dict[str, int] = {}
    for job in jobs:
        if _succeeded(job, policy):
            well.update({node: max(well.get(node, 0), job.started_at or 0) for node in job.nodes})
    return well
