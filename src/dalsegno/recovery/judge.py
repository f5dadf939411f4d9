"""What is wrong with a node just now, by all that is known of it. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from dalsegno.containers.native import NO_CONTAINER
from dalsegno.health import Remedy, Verdict
from dalsegno.recovery.agent_view import Presence
from dalsegno.recovery.book import Book, NodeBook
from dalsegno.recovery.facts import BLACK_HOLE, GONE, NodeFacts, NodeFault, failures, fault_of, heaviest, is_plain
from dalsegno.recovery.phase import NodePhase
from dalsegno.recovery.policy import Policy
from dalsegno.recovery.reason import Subject, Topic
from dalsegno.slurm.facts import JobInfo, JobState

NETWORK = "network"  # the check of that name
_FAILED = (JobState.FAILED, JobState.NODE_FAIL, JobState.LAUNCH_FAILED, JobState.BOOT_FAIL)


@dataclass(frozen=True)
class Quick:
    """Jobs that failed on a node as soon as they had started. Proven: it is the node, and not whoever wrote them."""

    count: int = 0
    proven: bool = False

    @property
    def words(self) -> str:
        return f"{self.count} jobs failed here as soon as they had started"


NONE = Quick()


def find_fault(node: NodeFacts, own: NodeBook, policy: Policy, quick: Quick = NONE) -> NodeFault | None:
    """The heaviest fault for which something may be done; None if there is none, or only what somebody excused."""
    return heaviest(fault for fault in standing(node, own, policy, quick) if fault.key not in own.excuses)


def standing(node: NodeFacts, own: NodeBook, policy: Policy, quick: Quick = NONE) -> list[NodeFault]:
    """All that is wrong for which something may be done, excused or not.

    A node whose agent was never heard of is left alone: nobody could tell when it is well again.
    """
    return [fault for fault in _faults(node, own, policy, quick) if not fault.remedy < Remedy.DRAIN]


def is_over(node: NodeFacts, own: NodeBook, faults: Collection[NodeFault]) -> bool:
    """Nothing is left of what somebody excused: by the node's own word, and not because its checks say nothing."""
    checks = {key.partition("[")[0] for key in own.excuses}
    findings = node.agent.report.findings if node.agent.report and node.connected else ()
    unknown = any(each.check in checks and each.result.verdict is Verdict.UNKNOWN for each in findings)
    return bool(findings) and not unknown and not faults


def _faults(node: NodeFacts, own: NodeBook, policy: Policy, quick: Quick) -> Iterator[NodeFault]:
    if node.gone and own.seen and own.last_boot:
        yield NodeFault(GONE, policy.gone_remedy, f"neither its agent nor slurmd answers{_line(node)}", gone=True)
        return
    if not node.connected:  # what was said by one who is silent now may be long mended
        return
    yield from found(node, policy)
    if quick.proven and quick.count >= policy.quick_failures:
        yield NodeFault(BLACK_HOLE, Remedy.DRAIN, quick.words)


def found(node: NodeFacts, policy: Policy) -> list[NodeFault]:
    """What its own checks say, as far as they are heard."""
    findings = node.agent.report.findings if node.agent.report else ()
    faults = [fault_of(each) for each in failures(findings) if each.check not in policy.off]
    return [replace(fault, remedy=policy.remedy(fault)) for fault in faults]


@dataclass(frozen=True)
class Suspicion:
    """Something odd about a node that is no reason to act yet."""

    about: Subject
    text: str


def find_suspicion(node: NodeFacts, own: NodeBook, policy: Policy, quick: Quick = NONE) -> Suspicion | None:
    """Return what is odd about a node; one witness is not enough to act."""
    line = _line(node)
    if node.agent.presence is Presence.SILENT and own.seen:
        return Suspicion(Subject(Topic.AGENT_SILENT, bool(line)), f"its agent is silent{line}")
    if node.agent.presence is Presence.AGENT_DEAD:
        text = f"its agent is dead, the node itself answers: its health is not known{line}"
        return Suspicion(Subject(Topic.AGENT_DEAD, bool(line)), text)
    if quick.count >= policy.quick_failures:
        return Suspicion(Subject(Topic.QUICK_FAILURES, count=quick.count), f"{quick.words}, all of one user's")
    return None


def is_told(about: Subject, own: NodeBook) -> bool:
    """Whether it was said already. How many packets were lost this time is no news."""
    return about == own.about or (about.topic is own.about.topic and own.about.network)


def count_relapse(own: NodeBook, policy: Policy, now: float) -> int:
    """Which suspicion in a row this is, for a node of which something is odd now."""
    if own.phase is not NodePhase.IN_SERVICE:
        return own.relapses
    return own.relapses + 1 if own.relapses and now - own.entered < policy.relapse_s else 1


def is_steady(node: NodeFacts, own: NodeBook, policy: Policy, now: float) -> bool:
    """Not only just heard again: on a line that loses packets agents fall silent every few seconds. The oftener it has
    relapsed, the longer it must be well."""
    steady_s = policy.steady_s[min(max(own.relapses, 1), len(policy.steady_s)) - 1]
    return not node.connected or now - node.agent.since >= steady_s


def _line(node: NodeFacts) -> str:
    """What its last report said of the network: that, and not why, which may be the other end's doing."""
    findings = node.agent.report.findings if node.agent.report else ()
    bad = [each.result for each in findings if each.check == NETWORK and each.result.verdict is Verdict.WARNED]
    return "".join(f"; before that, {result.text}" for result in bad)


Kind = tuple[int | None, str]  # jobs of one user and one name


def quick_failures(jobs: Iterable[JobInfo], book: Book, policy: Policy, now: float) -> dict[str, Quick]:
    """By node, since it was last validated or a job did well there.

    A job that fails everywhere says nothing of a node. Slips on somebody's command line come one after the other where
    Slurm puts them each time: they prove nothing, unless others fail there too. That jobs of the same name do well
    elsewhere is proof only where one user has all jobs: a name is what its user wrote, and would drain others' nodes.
    """
    jobs = list(jobs)
    well = _last_well(jobs, policy)
    where: dict[Kind, list[str]] = {}
    for job in jobs:
        if _failed_quickly(job, policy) and (job.started_at or now) > well.get(job.nodes[0], 0):
            since = max(now - policy.quick_window_s, book.of(job.nodes[0]).validated_at)
            if job.ends_at is not None and job.ends_at >= since:
                where.setdefault((job.uid, job.name), []).append(job.nodes[0])
    alone = len({job.uid for job in jobs}) == 1
    fine = {(job.uid, job.name) for job in jobs if alone and _does_well(job, policy)}
    failed: dict[str, list[Kind]] = {}
    for kind, nodes in where.items():
        if len(set(nodes)) == 1:
            failed.setdefault(nodes[0], []).extend([kind] * len(nodes))
    return {node: Quick(len(kinds), _proves(kinds, fine)) for node, kinds in failed.items()}


def _proves(kinds: Collection[Kind], fine: Collection[Kind]) -> bool:
    return len({user for user, _ in kinds}) > 1 or not set(fine).isdisjoint(kinds)


def _failed_quickly(job: JobInfo, policy: Policy) -> bool:
    """A run's are no witnesses: it ends its jobs itself, tries each node several times, and leaves those it must.

    Nor is a job whose container was not to be had: by an image that is missing, or a slip in its options. Whoever ends
    with that code by themselves keeps their own jobs out of the count, and nobody else's.
    """
    failed = job.state in _FAILED and job.exit_code != NO_CONTAINER
    return failed and is_plain(job) and len(job.nodes) == 1 and job.elapsed_s <= policy.quick_s


def _does_well(job: JobInfo, policy: Policy) -> bool:
    return bool(job.nodes) and (job.state is JobState.COMPLETED or job.elapsed_s > policy.quick_s)


def _last_well(jobs: Iterable[JobInfo], policy: Policy) -> dict[str, int]:
    """By node, when the last job started there that did well."""
    well: dict[str, int] = {}
    for job in jobs:
        if _does_well(job, policy):
            well.update({node: max(well.get(node, 0), job.started_at or 0) for node in job.nodes})
    return well
