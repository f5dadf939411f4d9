"""Agents on Slurm nodes: the run's own allocation, more steps in it, one-node jobs to replace losses, the next job."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Collection, Iterable, Sequence

from dalsegno.containers.native import NO_CONTAINER
from dalsegno.errors import DalsegnoError
from dalsegno.runs.comment import JobRole, left_comment
from dalsegno.runs.coordinator.events import Cancelled, Doubted, RunMoved
from dalsegno.runs.coordinator.liveness import unreachable
from dalsegno.runs.coordinator.node_loss import (
    Departure,
    Refusals,
    Tries,
    ask_again_s,
    describe_slow,
    drained_for_repair,
    nodes_to_leave,
    out_of_service,
    still_starting,
    usable_again,
)
from dalsegno.runs.coordinator.node_source import RunControl
from dalsegno.runs.coordinator.saved_state import SavedJob, SavedStep
from dalsegno.runs.coordinator.site import CoordinatorSite
from dalsegno.runs.coordinator.slurm_jobs import AgentStep, Job, SlurmJobs
from dalsegno.runs.journal import RunEvent
from dalsegno.runs.status import RunCause
from dalsegno.slurm.facts import JobState, NodeInfo
from dalsegno.system.children import start_ticks

ASK_AGAIN_S = 5.0


class SlurmNodeSource:
    """Keeps as many agents as the run wants, as far as Slurm grants nodes."""

    def __init__(self, site: CoordinatorSite, coordinator: RunControl) -> None:
        self.site, self.coordinator = site, coordinator
        self.excluded: list[str] = []
        self.silent: dict[str, float] = {}  # lost silently, and when; their hosts are assumed dead
        self.unhealthy: frozenset[str] = frozenset()
        self._down: frozenset[str] = frozenset()
        self._vacating: dict[str, str] = {}  # nodes drained for repair, and why
        self._were_out: set[str] = set()  # lost nodes that Slurm has had out of service since
        self._tries = Tries()
        self._refusals = Refusals()  # of nodes beyond the run's own job
        self._some_connected = False  # whether any agent ever connected
        self._called: set[str] = set()  # nodes that are being probed
        self._reported_slow: set[str] = set()
        self._jobs = SlurmJobs(site, self)
        self._departure = Departure(site, coordinator, self._jobs, lambda: self.begin(JobRole.NEXT))

    # Requests

    def begin(self, role: JobRole = JobRole.MAIN) -> None:
        if self.site.own_job is not None:
            self._jobs.add_own(role, self.site.own_job)
        else:
            self._jobs.request(role, suspects=self._suspects)
        self.coordinator.save_state()

    @property
    def _suspects(self) -> list[str]:
        return [*self.excluded, *self.silent, *self._vacating]

    def job_granted(self, job: Job) -> None:
        self._refusals.over()
        self.coordinator.journal(RunEvent.GRANTED, job=job.id, nodes=list(job.nodes), role=job.role.value)
        if job.role is JobRole.NEXT or (job.role is JobRole.MAIN and not job.adopted):
            job.role = JobRole.MAIN
            self.coordinator.apply(RunMoved())
        elif job.role is JobRole.JOIN and not job.adopted and self._has_agent(job):
            # where nodes are shared, Slurm may grant one that the run has already
            self.run_in_background(self._jobs.release([job]))
        self.check_agents()

    def _has_agent(self, job: Job) -> bool:
        there = {
            *self.coordinator.present,
            *self.silent,
            *(node for each in self._jobs.jobs if each is not job for node in each.nodes),
        }
        return any(node in there for node in job.nodes)

    def job_refused(self, job: Job, why: str) -> None:
        if job.role is JobRole.JOIN:
            self._join_refused(why)
            return
        self.coordinator.journal(RunEvent.REFUSED, role=job.role.value, why=why)
        if job.role is JobRole.MAIN:
            self.coordinator.stop(1, f"Slurm refused: {why}", RunCause.REFUSED)
        else:
            self.coordinator.note(f"Slurm refused: {why}; retrying in {ASK_AGAIN_S:.0f} s")
            asyncio.get_running_loop().call_later(ASK_AGAIN_S, self._begin_again)

    def _join_refused(self, why: str) -> None:
        """Report a refusal once, however often the request is repeated."""
        if self._refusals.refused(why, self._not_to_join, time.monotonic()):
            self.coordinator.journal(RunEvent.REFUSED, role=JobRole.JOIN.value, why=why)
            self.coordinator.note(f"Slurm has no node to replace a lost one: {why}")

    def _begin_again(self) -> None:
        if not self.coordinator.ending:
            self.begin(JobRole.NEXT)

    def job_over(self, job: Job, state: JobState) -> None:
        """End the run if its user cancelled the job; continue in another job after preemption or the time limit."""
        self.coordinator.journal(RunEvent.JOB_OVER, job=job.id, role=job.role.value, state=state.value)
        if job.role is not JobRole.JOIN and state is JobState.CANCELLED:
            self.coordinator.apply(Cancelled())
        elif self.site.own_job is not None or self.coordinator.ending:
            pass  # the coordinator ends with its own job
        elif (
            job.role is not JobRole.JOIN
            and not self._promote()
            and not any(each.role is JobRole.NEXT for each in self._jobs.jobs)
        ):
            self.run_in_background(
                self._jobs.release(self._waiting_joins)
            )  # the next job starts only when no other is left
            self.begin(JobRole.NEXT)
        self.coordinator.save_state()

    @property
    def _waiting_joins(self) -> list[Job]:
        return [job for job in self._jobs.jobs if job.role is JobRole.JOIN and not job.nodes]

    def _promote(self) -> bool:
        """Make the oldest job that joined the run's own, if the run has lost all nodes of that one."""
        joined = [each for each in self._jobs.jobs if each.role is JobRole.JOIN and each.nodes]
        if self.coordinator.closing or not joined:
            return False
        joined[0].role = JobRole.MAIN
        return True

    def step_ended(self, job: Job, step: AgentStep) -> None:
        """Start agents again where a step ended. A node that srun cannot reach ends the step on all its nodes."""
        missed = self._jobs.not_reached(job, step)
        if not missed:
            asyncio.get_running_loop().call_later(0.05, self.check_agents)
            return
        self._tries.forget(*step.nodes)
        for node, why in missed.items():
            self._mark_lost(node, f"Slurm cannot start anything on {node} ({why})")
        self.run_in_background(self._release_lost())

    def _mark_lost(self, node: str, why: str) -> None:
        self.coordinator.note(f"{why}; the run continues without it")
        self.silent[node] = time.time()
        self._tries.forget(node)

    async def _release_lost(self) -> None:
        """Release lost nodes, so that Slurm can repair them or give them to other jobs."""
        for job in [job for job in self._jobs.jobs if job.nodes and job.id != self.site.own_job]:
            if self.coordinator.closing or job not in self._jobs.jobs:
                continue
            if job.steps or any(node not in self.silent for node in job.nodes):
                await self._jobs.release_nodes(job, self.silent)
            else:
                await self._jobs.release([job])
                self.job_over(job, JobState.NODE_FAIL)
        self.check_agents()

    # Agents

    def check_agents(self) -> None:
        """Start agents on all nodes of the run that lack one, and request one-node jobs for missing nodes."""
        if self.coordinator.closing:
            return
        self._leave_drained()
        present = self.coordinator.present
        for job in [job for job in self._jobs.jobs if job.asking is None]:
            bare = self._jobs.unstaffed(job, present, {*self.silent, *self._called, *self.excluded})
            slow = self._jobs.slow_agents(bare)
            nodes = [node for node in bare if node in slow or self._may_staff(node)]
            if nodes:
                self._called.update(nodes)
                self.run_in_background(self._staff(job, nodes))
        self._ask_for_missing(present)

    async def _staff(self, job: Job, nodes: Sequence[str]) -> None:
        """Start agents on those nodes that respond."""
        found = await self._look_at(nodes)
        dead = await unreachable(found or (), self._jobs.slurm.slurmd_port)
        self._called.difference_update(nodes)
        if self.coordinator.closing or job not in self._jobs.jobs:
            return
        for node in dead:
            self._mark_lost(node, f"{node} does not answer")
        slow = self._wait_for_slow([node for node in nodes if node not in dead], found or ())
        for group in self._tries.group_by_srun([node for node in nodes if node not in (*dead, *slow)]):
            self._jobs.start_agents(job, group)
        self.coordinator.save_state()
        if dead:
            await self._release_lost()

    def _wait_for_slow(self, nodes: Iterable[str], found: Iterable[NodeInfo]) -> list[str]:
        ages_s = self._jobs.slow_agents([node for node in nodes if node not in self.excluded])
        waits = still_starting(ages_s, found, time.time())
        self._jobs.extend_wait(waits)
        if said := describe_slow(ages_s, waits, self._reported_slow, self.site.folder.agents_log):
            self.coordinator.note(said)
        return waits

    def _may_staff(self, node: str) -> bool:
        if self.coordinator.closing:
            return False
        if self._tries.count_try(node):
            return True
        if faults := [] if self._some_started else self._jobs.container_faults():
            self.coordinator.stop(NO_CONTAINER, f"the container could not be started on any node: {'; '.join(faults)}")
            return False
        why = self._jobs.startup_failure(node)
        self._mark_lost(node, f"agents on {node} end right after they start{why}")
        if self._none_started:
            self.coordinator.stop(
                1, f"the run's agents end right after they start on every node{why}; see {self.site.folder.agents_log}"
            )
        else:
            self.run_in_background(self._release_lost())
        return False

    @property
    def _none_started(self) -> bool:
        """Whether no agent ever came up on any node: then the nodes are not at fault."""
        nodes = {node for job in self._jobs.jobs for node in job.nodes}
        return not self._some_started and nodes <= set(self.silent)

    @property
    def _some_started(self) -> bool:
        return self._some_connected or bool(self.coordinator.run.generation)

    def _ask_for_missing(self, present: frozenset[str]) -> None:
        """Request a replacement for a missing node, once the run's own allocation is granted."""
        if (
            self.coordinator.closing
            or not self.has_nodes
            or any(job.role is not JobRole.JOIN and not job.nodes for job in self._jobs.jobs)
        ):
            return
        there = self._available(present)
        may_ask = not self.waits and self._refusals.may_ask(self._not_to_join, time.monotonic())
        # A spare that has taken a rank is no longer a spare.
        wanted = self.coordinator.run.shape.max_nodes + self.site.spares
        if len(there) < wanted and may_ask:  # one at a time, so that no two requests get the same node
            self._jobs.request(JobRole.JOIN, suspects=self._suspects, members=sorted(there))
            self.coordinator.save_state()

    def _available(self, present: frozenset[str]) -> set[str]:
        return {*present, *self._called, *self._jobs.expected(present)} - {*self.excluded, *self._vacating}

    @property
    def _not_to_join(self) -> set[str]:
        return {*self._suspects, *self._available(self.coordinator.present)}

    def agent_came(self, node: str, again: bool) -> bool:
        """Refuse a node that Slurm has taken from the job since: it is under repair, or belongs to another job."""
        self._some_connected = True
        if again and node in self._down:
            self.leave_for_repair(node)
            return False
        self.silent.pop(node, None)
        return True

    def agent_ready(self, node: str) -> None:
        self._tries.forget(node)

    def agent_lost(self, node: str, silent: bool) -> None:
        self._jobs.agent_left(node)
        if silent:
            self.silent[node] = time.time() - self.site.timing.gone_s  # it may have booted before the loss was detected

    async def ask_slurm(self) -> None:
        await self._jobs.check()
        nodes = await self._look_at_nodes()
        if nodes is None:
            return  # no response tells nothing about the nodes
        self.unhealthy = frozenset(node.name for node in nodes if node.draining or node.down)
        self._down = frozenset(node.name for node in nodes if node.down)
        self.coordinator.apply(Doubted(self.unhealthy))
        before, self._vacating = set(self._vacating), drained_for_repair(nodes)
        self._were_out = {*self._were_out, *out_of_service(nodes)} & set(self.silent)
        back = usable_again(self.silent, nodes, time.time(), self._were_out)
        for name in back:
            del self.silent[name]
        self._tries.forget(*back)
        stays = (before - set(self._vacating)) & self.coordinator.present  # healthy again before the run had left it
        if back or stays:  # waiting requests exclude that node, or are no longer needed
            await self._jobs.release(self._waiting_joins)
        await self._release_lost()
        await self._update_comments()

    @property
    def ask_again_s(self) -> float:
        return ask_again_s(self.silent.values(), time.time())

    async def _look_at_nodes(self) -> list[NodeInfo] | None:
        names = {*self.silent, *(node for job in self._jobs.jobs for node in job.nodes)}
        return [] if not names or self.coordinator.closing else await self._look_at(sorted(names))

    async def _look_at(self, nodes: Sequence[str]) -> list[NodeInfo] | None:
        try:
            return await asyncio.to_thread(self.site.slurm.nodes, nodes)
        except DalsegnoError:
            return None

    # Leaving nodes

    def leave_for_repair(self, node: str) -> None:
        self.silent[node] = time.time()
        self._were_out.add(node)
        self._tries.forget(node)
        self.run_in_background(self._update_comments())

    def _leave_drained(self) -> None:
        """Leave nodes drained for repair and end their agents."""
        run = self.coordinator.run
        for node in nodes_to_leave(self._vacating, frozenset(run.ready), run.shape.max_nodes):
            self.silent[node] = time.time()
            self._tries.forget(node)
            self.coordinator.continue_without(node, f"drained for repair ({self._vacating[node]})")
            self.run_in_background(self._update_comments())

    async def _update_comments(self) -> None:
        for job in [job for job in self._jobs.jobs if job.id is not None and job.nodes]:
            left = frozenset(self._vacating) & set(job.nodes) & set(self.silent) - self.coordinator.present
            if left != job.left and await self._jobs.slurm.comment(job.id or 0, left_comment(job.role, left)):
                job.left = left

    def leaving(self, job: int, node: str = "") -> None:
        if node not in self._down:  # a recovered node ends what the job left there; the job may be over already
            self._departure.announced(job)

    async def move(self) -> None:
        await self._departure.move()

    async def recall_agents(self, nodes: Collection[str]) -> set[str]:
        present = self.coordinator.present  # before agents are started: present ones end meanwhile
        jobs = [job for job in self._jobs.jobs if job.asking is None]
        bare = {job.id: set(self._jobs.unstaffed(job, present, self.excluded)) & set(nodes) for job in jobs}
        asked = sorted(set[str]().union(*bare.values()))
        found = await self._look_at(asked) if asked else ()
        dead = await unreachable(found or (), self._jobs.slurm.slurmd_port)
        for job in [job for job in jobs if job in self._jobs.jobs]:  # it may have been released meanwhile
            self._jobs.start_agents(job, sorted(bare[job.id] - set(dead)))
        return self._jobs.expected(present) & set(nodes)

    async def release_all(self, code: int | None = None) -> None:
        await self._jobs.release(self._jobs.jobs, code)
        await self._jobs.sweep()

    def run_in_background(self, work: Awaitable[None]) -> None:
        self.coordinator.run_in_background(work)

    # State for a successor

    def saved(self) -> tuple[SavedJob, ...]:
        return self._jobs.saved()

    async def adopt(self, saved: tuple[SavedJob, ...]) -> bool:
        """Adopt saved jobs. A requeued job has none of the steps it had before."""
        own = self.site.own_job
        ours = own is None or any(job.job == own and any(map(_is_alive, job.steps)) for job in saved)
        if ours and saved:
            await self._jobs.adopt(saved)
        return ours and bool(saved)

    @property
    def jobs(self) -> tuple[int, ...]:
        return tuple(job.id for job in self._jobs.jobs if job.id is not None)

    @property
    def has_nodes(self) -> bool:
        return any(job.nodes for job in self._jobs.jobs)

    @property
    def waits(self) -> bool:
        return any(not job.nodes for job in self._jobs.jobs)

    @property
    def coming(self) -> frozenset[str]:
        return frozenset(self._available(self.coordinator.present))

    @property
    def refused(self) -> str:
        return self._refusals.why


def _is_alive(step: SavedStep) -> bool:
    return start_ticks(step.process.pid) == step.process.start
