"""A run leaves the nodes of its job, which are wanted back, and goes on in the next one, or in this one requeued."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from dalsegno.hostlist import compress
from dalsegno.runs.comment import OURS, JobRole
from dalsegno.runs.coordinator.events import Leaving
from dalsegno.runs.coordinator.site import ASK_SLURM_S, CoordinatorSite
from dalsegno.runs.coordinator.slurm_jobs import SlurmJobs
from dalsegno.runs.coordinator.staff import Boss
from dalsegno.slurm.facts import NodeInfo
from dalsegno.slurm.parse.messages import SlurmRefusal, parse_refusal
from dalsegno.slurm.render import SPARE_REASON

LAST_MOMENT_S = 10.0  # before the end of its job, a run that has not left by then is taken off it


class Departure:
    """`ask_for_next` has Slurm asked for the job in which the run goes on."""

    def __init__(self, site: CoordinatorSite, boss: Boss, jobs: SlurmJobs, ask_for_next: Callable[[], None]) -> None:
        self._site, self._boss, self._jobs, self._ask_for_next = site, boss, jobs, ask_for_next

    def announced(self, job: int) -> None:
        """At once: workers that save quickly end before Slurm has told what this is about.

        A node that joined is only lost when its own job has to go.
        """
        of_the_run = [each.id for each in self._jobs.jobs if each.role is not JobRole.JOIN]
        if job and job not in of_the_run:
            return
        self._boss.apply(Leaving())
        self._boss.soon(self._leave())

    async def _leave(self) -> None:
        """An agent was signalled: the time is nearly up, we are preempted, or the user has cancelled. Slurm knows."""
        await self._jobs.check()
        if self._boss.ending:
            return
        if self._site.own_job is not None:
            self._leave_in_time(self._site.own_job)
        elif not any(job.role is JobRole.NEXT for job in self._jobs.jobs):
            self._ask_for_next()

    def _leave_in_time(self, own: int) -> None:
        """What does not save goes on from where it last did: in the job's next life, before this one is out of time."""
        ends_at = next((job.ends_at for job in self._jobs.jobs if job.id == own), None)
        if ends_at is not None:
            left_s = max(0.0, ends_at - LAST_MOMENT_S - time.time())
            asyncio.get_running_loop().call_later(left_s, lambda: self._boss.soon(self.move()))

    async def move(self) -> None:
        """The next job starts when none of ours is left; the one whose batch step we live in is queued again.

        But first Slurm is asked once more: a user who has cancelled the job wants none of it.
        """
        await self._jobs.check()
        if self._boss.ending:
            return
        if self._site.own_job is not None:
            if await self._jobs.slurm.requeue(self._site.own_job):
                self._boss.rest("waits in the queue again")
            else:
                self._boss.stop(1, "Slurm does not queue its job again")
            return
        await self._jobs.give_back([job for job in self._jobs.jobs if job.role is not JobRole.NEXT], code=0)
        if not self._jobs.jobs:
            self._ask_for_next()
        self._boss.keep()


# ---- Nodes on which no agent could be started: how often it is tried, and when a node is trusted again. Pure.


MOST_TRIES = 5  # of one node, in a row, without its agent having become ready
ALONE_FROM = 3  # from this try on a node has an srun of its own: the fault may be another's
SOON_S, LATELY_S = 1.0, 60.0  # how often we ask for one that was given up so lately
FORGIVEN_S = 600.0  # given up so long ago, and Slurm has nothing against it: it is tried again


@dataclass
class Tries:
    """To start an agent, by node."""

    _count: dict[str, int] = field(default_factory=dict)

    def once_more(self, node: str) -> bool:
        """Count it; False if it has been tried too often."""
        self._count[node] = self._count.get(node, 0) + 1
        return self._count[node] <= MOST_TRIES

    def forget(self, *nodes: str) -> None:
        for node in nodes:
            self._count.pop(node, None)

    def together(self, nodes: Iterable[str]) -> list[tuple[str, ...]]:
        """Whom one srun is to start: all of them, but for those with which that has gone wrong before."""
        alone = [node for node in nodes if self._count.get(node, 0) >= ALONE_FROM]
        others = tuple(node for node in nodes if node not in alone)
        return [*([others] if others else []), *((node,) for node in alone)]


def trusted_again(
    given_up: Mapping[str, float], nodes: Iterable[NodeInfo], now: float, were_out: Collection[str] = ()
) -> list[str]:
    """Of nodes given up at these times, those whose slurmd was started since (rebuilt, or booted again), those that
    were out of service and are good again (somebody has looked at them: a cable was out, GPUs were reset; no slurmd is
    started for that), and those of long ago that Slurm has in service."""
    known = {node.name: node for node in nodes}
    return [
        name
        for name, at in given_up.items()
        if name in known and (_is_back(known[name], at, now) or (name in were_out and _is_good(known[name])))
    ]


def out_of_service(nodes: Iterable[NodeInfo]) -> set[str]:
    """Those that are down or drained; a spare is not."""
    return {node.name for node in nodes if node.down or (node.draining and node.reason != SPARE_REASON)}


def ask_again_s(given_up: Iterable[float], now: float) -> float:
    """When to ask Slurm next how these are: often while one may be back in a moment."""
    return SOON_S if any(now - at < LATELY_S for at in given_up) else ASK_SLURM_S


def _is_back(node: NodeInfo, given_up_at: float, now: float) -> bool:
    started = node.slurmd_started_at or 0  # in whole seconds
    return started >= math.floor(given_up_at) or (now - given_up_at > FORGIVEN_S and node.in_service)


def _is_good(node: NodeInfo) -> bool:
    return node.in_service or (node.responding and node.reason == SPARE_REASON)


# ---- Nodes that the cluster's controller has drained to mend them: a run leaves them once it has others. Pure.


def to_be_mended(nodes: Iterable[NodeInfo]) -> dict[str, str]:
    """The controller's drains, and what for. Somebody else's say: take nothing new, and what runs may run on."""
    drained = [node for node in nodes if node.draining and node.reason.startswith(OURS)]
    return {node.name: node.reason.removeprefix(OURS) for node in drained if node.reason != SPARE_REASON}


def may_be_left(vacating: Mapping[str, str], ready: Collection[str], wanted: int) -> list[str]:
    """As many of them as the run can spare: it needs so many nodes."""
    here = sorted(set(vacating) & set(ready))
    return here[: max(0, len(ready) - wanted)]


# ---- When to ask Slurm for a node again that it has refused. Pure.


AGAIN_S, LONGEST_S = 5.0, 60.0
# No node there is could be given: every further question would only be one more failed job in Slurm's books.
AGAIN_IN_VAIN_S, LONGEST_IN_VAIN_S = 60.0, 900.0


@dataclass
class Refusals:
    """In a row, and of what: one that is allowed a node more than the last is another question."""

    count: int = 0
    why: str = ""  # "" while there is none
    _without: frozenset[str] = frozenset()
    _not_before: float = 0.0

    def refused(self, why: str, without: Collection[str], now: float) -> bool:
        """Whether that is news."""
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


# ---- Agents that take long to start: an image is imported first, or a prolog tries everything. Pure.


LONG_S = 60.0  # what takes longer is told


def still_starting(ages_s: Mapping[str, float], nodes: Iterable[NodeInfo], now: float) -> list[str]:
    """Of nodes on which something was begun so long ago, those that still may come to it."""
    started = {node.name: node.slurmd_started_at or 0 for node in nodes}  # in whole seconds
    return [node for node, age_s in ages_s.items() if math.floor(now - age_s) > started.get(node, 0)]


def tell_slow(ages_s: Mapping[str, float], waits: Collection[str], told: set[str], log: object) -> str:
    """What to say of those that are waited for, once of each; "" for nothing."""
    new = sorted(node for node in waits if ages_s[node] >= LONG_S and node not in told)
    told.update(new)
    return f"agents take long to start on {compress(new)}, for an image or a prolog; {log} may say more" if new else ""
