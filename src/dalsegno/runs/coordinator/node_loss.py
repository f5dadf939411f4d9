"""Losing nodes: a run leaves the nodes of its job and continues in the next job, or in this one after a requeue."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from dalsegno.hostlist import compress
from dalsegno.runs.comment import OURS, JobRole
from dalsegno.runs.coordinator.events import Leaving
from dalsegno.runs.coordinator.node_source import RunControl
from dalsegno.runs.coordinator.site import ASK_SLURM_S, CoordinatorSite
from dalsegno.runs.coordinator.slurm_jobs import SlurmJobs
from dalsegno.slurm.facts import NodeInfo
from dalsegno.slurm.parse.messages import SlurmRefusal, parse_refusal
from dalsegno.slurm.render import SPARE_REASON

LAST_MOMENT_S = 10.0  # a run still on its nodes so long before the end of its job is taken off them


class Departure:
    """Moves a run off its nodes. `ask_for_next` requests the job in which the run continues."""

    def __init__(
        self, site: CoordinatorSite, coordinator: RunControl, jobs: SlurmJobs, ask_for_next: Callable[[], None]
    ) -> None:
        self._site, self._coordinator, self._jobs, self._ask_for_next = site, coordinator, jobs, ask_for_next

    def announced(self, job: int) -> None:
        """Start leaving at once: workers that save quickly end before Slurm has answered what this is about.

        When a job that joined has to end, only its node is lost.
        """
        of_the_run = [each.id for each in self._jobs.jobs if each.role is not JobRole.JOIN]
        if job and job not in of_the_run:
            return
        self._coordinator.apply(Leaving())
        self._coordinator.run_in_background(self._leave())

    async def _leave(self) -> None:
        """Find out from Slurm why an agent was signalled (time limit, preemption, cancellation), then prepare the next
        job."""
        await self._jobs.check()
        if self._coordinator.ending:
            return
        if self._site.own_job is not None:
            self._leave_in_time(self._site.own_job)
        elif not any(job.role is JobRole.NEXT for job in self._jobs.jobs):
            self._ask_for_next()

    def _leave_in_time(self, own: int) -> None:
        """Requeue before the job is out of time. Workers that do not save resume from their last save."""
        ends_at = next((job.ends_at for job in self._jobs.jobs if job.id == own), None)
        if ends_at is not None:
            left_s = max(0.0, ends_at - LAST_MOMENT_S - time.time())
            asyncio.get_running_loop().call_later(left_s, lambda: self._coordinator.run_in_background(self.move()))

    async def move(self) -> None:
        """Release the jobs, so that the next one starts; requeue the job whose batch step runs the coordinator.

        Slurm is asked once more before that: a user who cancelled the job wants no further one.
        """
        await self._jobs.check()
        if self._coordinator.ending:
            return
        if self._site.own_job is not None:
            if await self._jobs.slurm.requeue(self._site.own_job):
                self._coordinator.suspend("requeued")
            else:
                self._coordinator.stop(1, "Slurm did not requeue the job")
            return
        await self._jobs.release([job for job in self._jobs.jobs if job.role is not JobRole.NEXT], code=0)
        if not self._jobs.jobs:
            self._ask_for_next()
        self._coordinator.save_state()


# Nodes on which no agent starts. Pure.


MOST_TRIES = 5  # to start an agent on one node, in a row
ALONE_FROM = 3  # from this try on a node gets an srun of its own: another node may be at fault
SOON_S, LATELY_S = 1.0, 60.0  # polling interval while a node was lost so recently
FORGIVEN_S = 600.0  # a node lost so long ago that Slurm has in service is tried again


@dataclass
class Tries:
    """Counts failed starts of agents, by node."""

    _count: dict[str, int] = field(default_factory=dict)

    def count_try(self, node: str) -> bool:
        """Count a try; return False if there were too many."""
        self._count[node] = self._count.get(node, 0) + 1
        return self._count[node] <= MOST_TRIES

    def forget(self, *nodes: str) -> None:
        for node in nodes:
            self._count.pop(node, None)

    def group_by_srun(self, nodes: Iterable[str]) -> list[tuple[str, ...]]:
        """Group nodes by srun: all in one, except those whose starts failed before, which get one each."""
        alone = [node for node in nodes if self._count.get(node, 0) >= ALONE_FROM]
        others = tuple(node for node in nodes if node not in alone)
        return [*([others] if others else []), *((node,) for node in alone)]


def usable_again(
    lost_at: Mapping[str, float], nodes: Iterable[NodeInfo], now: float, were_out: Collection[str] = ()
) -> list[str]:
    """Return the lost nodes that may be used again, given when each was lost.

    These are nodes whose slurmd was started since (rebuilt or rebooted), nodes that were out of service and are healthy
    again (repaired without a restart of slurmd: a cable, a GPU reset), and nodes lost long ago that Slurm has in
    service.
    """
    known = {node.name: node for node in nodes}
    return [
        name
        for name, at in lost_at.items()
        if name in known and (_is_back(known[name], at, now) or (name in were_out and _is_good(known[name])))
    ]


def out_of_service(nodes: Iterable[NodeInfo]) -> set[str]:
    """Return the nodes that are down or drained, except spares."""
    return {node.name for node in nodes if node.down or (node.draining and node.reason != SPARE_REASON)}


def ask_again_s(lost_at: Iterable[float], now: float) -> float:
    """Return the seconds until the next query of Slurm: few while a node may be back soon."""
    return SOON_S if any(now - at < LATELY_S for at in lost_at) else ASK_SLURM_S


def _is_back(node: NodeInfo, lost_at: float, now: float) -> bool:
    started = node.slurmd_started_at or 0  # in whole seconds
    return started >= math.floor(lost_at) or (now - lost_at > FORGIVEN_S and node.in_service)


def _is_good(node: NodeInfo) -> bool:
    return node.in_service or (node.responding and node.reason == SPARE_REASON)


# Nodes that the controller has drained for repair: a run leaves them once it has others. Pure.


def drained_for_repair(nodes: Iterable[NodeInfo]) -> dict[str, str]:
    """Return the nodes that the controller has drained, and why. On other drained nodes work may continue."""
    drained = [node for node in nodes if node.draining and node.reason.startswith(OURS)]
    return {node.name: node.reason.removeprefix(OURS) for node in drained if node.reason != SPARE_REASON}


def nodes_to_leave(vacating: Mapping[str, str], ready: Collection[str], wanted: int) -> list[str]:
    """Return those nodes in `vacating` that the run can do without, keeping as many nodes as it wants."""
    here = sorted(set(vacating) & set(ready))
    return here[: max(0, len(ready) - wanted)]


# Repeating refused requests. Pure.


AGAIN_S, LONGEST_S = 5.0, 60.0
# No existing node could be granted: each further request would only add a failed job to Slurm's accounting.
AGAIN_IN_VAIN_S, LONGEST_IN_VAIN_S = 60.0, 900.0


@dataclass
class Refusals:
    """Refusals in a row. A request that may use one more node than the last is a different request."""

    count: int = 0
    why: str = ""  # "" if there is none
    _without: frozenset[str] = frozenset()
    _not_before: float = 0.0

    def refused(self, why: str, without: Collection[str], now: float) -> bool:
        """Record a refusal and return whether its reason is new."""
        news = why != self.why
        self.count, self.why, self._without = self.count + 1, why, frozenset(without)
        in_vain = parse_refusal(why) is SlurmRefusal.NO_SUCH_NODES
        first_s, longest_s = (AGAIN_IN_VAIN_S, LONGEST_IN_VAIN_S) if in_vain else (AGAIN_S, LONGEST_S)
        self._not_before = now + min(first_s * 2 ** min(self.count - 1, 20), longest_s)
        return news

    def may_ask(self, without: Collection[str], now: float) -> bool:
        return not self.why or now >= self._not_before or not self._without <= set(without)

    def over(self) -> None:
        self.count, self.why = 0, ""


# Agents that are slow to start, because of an image import or a long prolog. Pure.


LONG_S = 60.0  # slower starts are reported


def still_starting(ages_s: Mapping[str, float], nodes: Iterable[NodeInfo], now: float) -> list[str]:
    """Return the nodes that have not restarted since the start began, so that their agents may still come."""
    started = {node.name: node.slurmd_started_at or 0 for node in nodes}  # in whole seconds
    return [node for node, age_s in ages_s.items() if math.floor(now - age_s) > started.get(node, 0)]


def describe_slow(ages_s: Mapping[str, float], waits: Collection[str], reported: set[str], log: object) -> str:
    """Return a note on slow nodes, once for each; "" for none."""
    new = sorted(node for node in waits if ages_s[node] >= LONG_S and node not in reported)
    reported.update(new)
    return f"agents are slow to start on {compress(new)} (image import or prolog); see {log}" if new else ""
