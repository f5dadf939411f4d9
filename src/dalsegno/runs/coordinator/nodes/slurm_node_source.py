"""The node source for Slurm. It executes the actions of `NodeAllocation` and passes events to it."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence

from dalsegno.errors import DalsegnoError
from dalsegno.runs.comment import left_comment
from dalsegno.runs.coordinator.agents.liveness import unreachable
from dalsegno.runs.coordinator.nodes.allocation import NodeAllocation
from dalsegno.runs.coordinator.nodes.allocation_actions import (
    Action,
    AgentStep,
    AllocationTerms,
    ApplyEvent,
    CheckAgents,
    CheckJobs,
    CommentJob,
    EndSteps,
    Job,
    LeaveNode,
    LoadJob,
    MoveRun,
    OwnEvent,
    ProbeNodes,
    ProbeResult,
    ReleaseJob,
    ReleaseLostNodes,
    ReportLeftNodes,
    RequestJob,
    RequestNext,
    RequeueOwnJob,
    RunAction,
    RunView,
    SaveState,
    ShrinkJob,
    SlurmAction,
    StartAgents,
    StopRun,
    SuspendRun,
    WidenNext,
    WriteJournal,
    WriteNote,
)
from dalsegno.runs.coordinator.nodes.node_rules import ask_again_s
from dalsegno.runs.coordinator.nodes.node_source import RunControl
from dalsegno.runs.coordinator.nodes.slurm_jobs import SlurmJobs, read_since
from dalsegno.runs.coordinator.saved_state import SavedJob, SavedStep
from dalsegno.runs.coordinator.site import CoordinatorSite
from dalsegno.slurm.facts import JobInfo, JobState, NodeInfo
from dalsegno.system.children import start_ticks
from dalsegno.wire.cloud_notice import CloudNotice


class SlurmNodeSource:
    """Keeps agents running on as many nodes as the run needs and Slurm grants."""

    def __init__(self, site: CoordinatorSite, coordinator: RunControl) -> None:
        self.site, self.coordinator = site, coordinator
        shape, log = site.shape, str(site.folder.agents_log)
        terms = AllocationTerms(
            shape.max_nodes,
            site.spares,
            site.own_job,
            site.timing.gone_s,
            log,
            shape.min_nodes,
            home_node(site.own_job),
        )
        self.allocation = NodeAllocation(terms)
        self._jobs = SlurmJobs(site, self)

    @property
    def _view(self) -> RunView:
        at = self.coordinator
        return RunView(
            time.time(), time.monotonic(), at.present, at.run.ready, at.run.generation > 0, at.closing, at.ending
        )

    # Executing actions

    def _execute(self, actions: Iterable[Action]) -> None:
        """Execute actions. Slow ones continue in the background."""
        for action in actions:
            work = self._start(action)
            if work is not None:
                self.run_in_background(work)

    async def _complete(self, actions: Iterable[Action]) -> None:
        """Execute actions one after another. Wait for each to complete."""
        for action in actions:
            work = self._start(action)
            if work is not None:
                await work

    def _start(self, action: Action) -> Awaitable[None] | None:
        if isinstance(action, RunAction):
            self._tell_run(action)
            return None
        return self._follow(action) if isinstance(action, OwnEvent) else self._ask(action)

    def _tell_run(self, action: RunAction) -> None:
        match action:
            case ApplyEvent(event):
                self.coordinator.apply(event)
            case LeaveNode(node, why):
                self.coordinator.continue_without(node, why)
            case StopRun(code, why, about):
                self.coordinator.stop(code, why, about)
            case SuspendRun(why):
                self.coordinator.suspend(why)
            case WriteNote(text):
                self.coordinator.note(text)
            case WriteJournal(event, what):
                self.coordinator.journal(event, **what)
            case SaveState():
                self.coordinator.save_state()

    def _ask(self, action: SlurmAction) -> Awaitable[None] | None:
        """Start an action on Slurm, unless its job has been released already."""
        jobs, slurm = self._jobs, self._jobs.slurm
        match action:
            case RequestJob(number, role, suspects, members):
                if self.allocation.jobs.find(number) is not None:
                    jobs.request(number, role, suspects, members)
            case StartAgents(number, step, nodes):
                jobs.start_agents(number, step, nodes)
            case LoadJob(number, job_id):
                return jobs.load(number, job_id)
            case ProbeNodes(number, nodes):
                return self._probe(number, nodes)
            case ReleaseJob(number, code):
                return jobs.release(number, code)
            case EndSteps(number):
                return jobs.release(number)
            case ShrinkJob(number, job_id, nodes):
                return _if_done(slurm.shrink(job_id, nodes), lambda: self.allocation.job_shrunk(number, nodes))
            case CommentJob(number, job_id, role, left):
                call = slurm.comment(job_id, left_comment(role, left))
                return _if_done(call, lambda: self.allocation.comment_set(number, left))
            case CheckJobs():
                return self._check_jobs()
            case RequeueOwnJob(job_id):
                return self._requeue(job_id)
        return None

    def _follow(self, event: OwnEvent) -> Awaitable[None] | None:
        """Deliver an event that the state machine sent to itself, now or after its delay."""
        match event:
            case CheckAgents(0.0):
                self.check_agents()
            case CheckAgents(after_s):
                _later(after_s, self.check_agents)
            case RequestNext(after_s):
                _later(after_s, lambda: self._execute(self.allocation.next_due(self._view)))
            case WidenNext(after_s):
                _later(after_s, lambda: self._execute(self.allocation.widen_next(self._view)))
            case MoveRun(after_s):
                _later(after_s, lambda: self.run_in_background(self.move()))
            case ReleaseLostNodes():
                return self._complete(self.allocation.release_lost(self._view))
            case ReportLeftNodes():
                return self._complete(self.allocation.comments_due(self._view))
        return None

    async def _probe(self, number: int, nodes: Sequence[str]) -> None:
        found = await self._look_at(nodes) or ()
        dead = await unreachable(found, self._jobs.slurm.slurmd_port)
        log = read_since(self.site.folder.agents_log, 0)
        result = ProbeResult(tuple(found), tuple(dead), self._jobs.step_output(nodes), log)
        self._execute(self.allocation.nodes_probed(number, nodes, result, self._view))

    async def _look_at(self, nodes: Sequence[str]) -> list[NodeInfo] | None:
        """Return the state of these nodes in Slurm; None if Slurm does not respond."""
        try:
            return await asyncio.to_thread(self.site.slurm.nodes, nodes)
        except DalsegnoError:
            return None

    async def _check_jobs(self) -> None:
        await self._jobs.check()
        self._execute(self.allocation.jobs_checked(self._view))

    async def _requeue(self, job_id: int) -> None:
        self._execute(self.allocation.requeue_ended(await self._jobs.slurm.requeue(job_id)))

    def run_in_background(self, work: Awaitable[None]) -> None:
        self.coordinator.run_in_background(work)

    # Events about jobs

    def job_granted(self, number: int, info: JobInfo) -> None:
        self._execute(self.allocation.job_granted(number, info, self._view))

    def job_changed(self, number: int, info: JobInfo) -> None:
        self.allocation.job_changed(number, info)

    def job_refused(self, number: int, why: str) -> None:
        self._execute(self.allocation.job_refused(number, why, self._view))

    def job_over(self, number: int, job_id: int | None, state: JobState) -> None:
        self._execute(self.allocation.job_over(number, job_id, state, self._view))

    def step_ended(self, number: int, step: int, missed: Mapping[str, str]) -> None:
        self._execute(self.allocation.step_ended(number, step, missed, self._view))

    # Events from the run

    def begin(self) -> None:
        self._execute(self.allocation.begin())

    def check_agents(self) -> None:
        self._execute(self.allocation.check_agents(self._view))

    async def ask_slurm(self) -> None:
        await self._jobs.check()
        names = [] if self.coordinator.closing else self.allocation.watched
        nodes = await self._look_at(names) if names else []
        if nodes is not None:  # None means that Slurm does not respond, so the state of the nodes is unknown
            await self._complete(self.allocation.nodes_seen(nodes, self._view))

    @property
    def ask_again_s(self) -> float:
        return ask_again_s(self.allocation.lost_since.values(), time.time())

    def exclude(self, node: str) -> None:
        self.allocation.excluded.append(node)

    def leave_for_repair(self, node: str) -> None:
        self._execute(self.allocation.leave_for_repair(node, self._view))

    def notice_read(self, node: str, notice: CloudNotice) -> None:
        self._execute(self.allocation.notice_read(node, notice, self._view))

    def agent_connected(self, node: str, again: bool) -> bool:
        admitted, actions = self.allocation.agent_connected(node, again, self._view)
        self._execute(actions)
        return admitted

    def agent_ready(self, node: str) -> None:
        self.allocation.agent_ready(node)

    def agent_lost(self, node: str, silent: bool) -> None:
        self.allocation.agent_lost(node, silent, self._view)

    def leaving(self, job: int, node: str = "") -> None:
        self._execute(self.allocation.leaving(job, node))

    async def move(self) -> None:
        """Check the jobs once more, then release them. If the user has cancelled one, the run ends instead."""
        await self._jobs.check()
        await self._complete(self.allocation.move(self._view))

    async def recall_agents(self, nodes: Collection[str]) -> set[str]:
        view = self._view  # read once, because agents disconnect during the following actions
        without_agent = self.allocation.nodes_to_recall(nodes, view)
        asked = sorted({node for each in without_agent.values() for node in each})
        found = await self._look_at(asked) if asked else ()
        dead = await unreachable(found or (), self._jobs.slurm.slurmd_port)
        self._execute(self.allocation.recall(without_agent, dead, view))
        return self.allocation.jobs.expected(view) & set(nodes)

    async def release_all(self, code: int | None = None) -> None:
        await self._complete(self.allocation.release_all(code))
        await self._jobs.sweep()

    # State for the next coordinator

    def saved(self) -> tuple[SavedJob, ...]:
        return self._jobs.saved({job.number: job.role for job in self.allocation.jobs})

    async def adopt(
        self, saved: Sequence[SavedJob], excluded: Collection[str] = (), lost_since: Mapping[str, float] | None = None
    ) -> bool:
        """Adopt saved jobs. Return False if there are none, or if the batch job was requeued and its steps ended."""
        self.allocation.excluded, self.allocation.lost_since = list(excluded), dict(lost_since or {})
        own = self.site.own_job
        ours = own is None or any(job.job == own and any(map(_is_alive, job.steps)) for job in saved)
        if not (ours and saved):
            return False
        clock, steps = time.monotonic(), self._jobs.adopt(saved)
        self.allocation.adopt(_adopted(each, steps[each.number], clock) for each in saved)
        self._jobs.examine(saved)
        return True

    @property
    def excluded(self) -> Collection[str]:
        return self.allocation.excluded

    @property
    def lost_since(self) -> Mapping[str, float]:
        return self.allocation.lost_since

    @property
    def unhealthy(self) -> frozenset[str]:
        return self.allocation.unhealthy

    @property
    def jobs(self) -> tuple[int, ...]:
        return self._jobs.ids

    @property
    def has_nodes(self) -> bool:
        return self.allocation.jobs.has_nodes

    @property
    def waits(self) -> bool:
        return self.allocation.jobs.waits

    @property
    def coming(self) -> frozenset[str]:
        return frozenset(self.allocation.coming(self._view))

    @property
    def refused(self) -> str:
        return self.allocation.refusals.why


def home_node(own_job: int | None) -> str:
    """Return the node of the batch step that this coordinator runs in; "" on the head node."""
    return os.environ.get("SLURMD_NODENAME", "") if own_job is not None else ""


def _later(after_s: float, call: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_later(after_s, call)


async def _if_done(call: Awaitable[bool], then: Callable[[], None]) -> None:
    if await call:
        then()


def _adopted(saved: SavedJob, steps: Mapping[int, tuple[str, ...]], clock: float) -> Job:
    running = [AgentStep(number, nodes, clock, adopted=True) for number, nodes in steps.items()]
    return Job(saved.role, saved.number, saved.job, steps=running, adopted=saved.asking is None)


def _is_alive(step: SavedStep) -> bool:
    return start_ticks(step.process.pid) == step.process.start
