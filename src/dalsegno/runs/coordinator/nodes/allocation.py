"""The state machine of a run's nodes: events in, actions out, and no I/O, so that any sequence can be tested.

A run holds Slurm jobs: its own (MAIN), the one in which it will continue (NEXT), and one-node jobs that replace lost
nodes (JOIN). Every node without an agent is probed; if it answers, an agent is started there. A node that does not
answer, or on which no agent starts, is lost. It is released, and used again only after Slurm reports that it is back.
Each method handles one event. It gets the state of the run and the time as arguments, and returns actions to be
executed in order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from dalsegno.containers.native import NO_CONTAINER
from dalsegno.runs.comment import JobRole
from dalsegno.runs.coordinator.generations.events import Cancelled, NodesOutOfService, NodesReclaimed, RunMoved
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
    ProbeNodes,
    ProbeResult,
    ReleaseJob,
    ReleaseLostNodes,
    ReportLeftNodes,
    RequestJob,
    RequestNext,
    RequeueOwnJob,
    RunJobs,
    RunView,
    SaveState,
    ShrinkJob,
    StartAgents,
    StopRun,
    SuspendRun,
    WidenNext,
    WriteJournal,
    WriteNote,
)
from dalsegno.runs.coordinator.nodes.departure import Departures
from dalsegno.runs.coordinator.nodes.node_rules import (
    Refusals,
    Tries,
    container_faults,
    describe_slow,
    drained_for_repair,
    nodes_to_leave,
    out_of_service,
    startup_failure,
    still_starting,
    usable_again,
)
from dalsegno.runs.journal import RunEvent
from dalsegno.runs.status import RunCause
from dalsegno.slurm.facts import JobInfo, JobState, NodeInfo
from dalsegno.slurm.parse.srun import ended_on
from dalsegno.wire.cloud_notice import CloudNotice

ASK_AGAIN_S = 5.0
SETTLE_S = 0.05  # pause between the end of a step and the next check
LAST_MOMENT_S = 10.0  # how long before the end of its job a run must leave its nodes


class NodeAllocation:
    """The jobs, nodes and agents that a run has, is getting, or has lost."""

    def __init__(self, terms: AllocationTerms) -> None:
        self.terms = terms
        self.jobs = RunJobs()
        self.excluded: list[str] = []
        self.lost_since: dict[str, float] = {}  # node that is lost or left for repair -> since when
        self.unhealthy: frozenset[str] = frozenset()
        self._down: frozenset[str] = frozenset()
        self._vacating: dict[str, str] = {}  # node drained for repair -> reason
        self._departures = Departures(terms)
        self._were_out: set[str] = set()  # lost nodes that Slurm reported out of service at or after their loss
        self.refusals, self._next_refusals = Refusals(), Refusals()  # refusals of one-node jobs, and of the next job
        self._tries, self._some_connected = Tries(), False  # _some_connected: whether any agent ever connected
        self._probed, self._reported_slow = set[str](), set[str]()  # nodes being probed, and nodes reported as slow
        self._last_job = self._last_step = 0

    # The run's jobs

    def begin(self) -> list[Action]:
        job, own = self._add(JobRole.MAIN, self.terms.own_job), self.terms.own_job
        if own is not None:
            return [LoadJob(job.number, own), SaveState()]
        return [RequestJob(job.number, job.role, (*self.excluded, *self.lost_since)), SaveState()]

    def _request_next(self, view: RunView) -> list[Action]:
        """Request the next job. Exclude nodes that a cloud will reclaim, even if they are still in service in Slurm."""
        taken = self._departures.still_in_service(view.now)
        request = RequestJob(self._add(JobRole.NEXT).number, JobRole.NEXT, (*self.excluded, *self.lost_since, *taken))
        return [request, SaveState(), *([WidenNext(max(taken.values()) - view.now)] if taken else ())]

    def widen_next(self, view: RunView) -> list[Action]:
        """If the next job still waits, request it again, so that it can use nodes that have been replaced."""
        waiting = [job for job in self.jobs if job.role is JobRole.NEXT and not job.nodes]
        return [*self._release(waiting), *self._request_next(view)] if waiting and not view.ending else []

    def _add(self, role: JobRole, job_id: int | None = None) -> Job:
        self._last_job += 1
        self.jobs.append(Job(role, self._last_job, job_id))
        return self.jobs[-1]

    def adopt(self, jobs: Iterable[Job]) -> None:
        """Take over the jobs of a previous coordinator."""
        self.jobs += jobs
        self._last_job = max((job.number for job in self.jobs), default=0)
        self._last_step = max((step.number for step in self.jobs.steps), default=0)

    def job_granted(self, number: int, info: JobInfo, view: RunView) -> list[Action]:
        job = self.jobs.find(number)
        if job is None:
            return []
        job.id, job.nodes, job.ends_at = info.id, info.nodes, info.ends_at
        self.refusals.over()
        self._next_refusals.over()
        what = {"job": job.id, "nodes": list(job.nodes), "role": job.role.value}
        actions: list[Action] = [WriteJournal(RunEvent.GRANTED, what)]
        if job.role is JobRole.NEXT or (job.role is JobRole.MAIN and not job.adopted):
            job.role = JobRole.MAIN
            actions.append(ApplyEvent(RunMoved()))
        elif job.role is JobRole.JOIN and not job.adopted and self._has_agent(job, view):
            # Where jobs can share nodes, Slurm may grant a node that the run already has. Such a job is released.
            actions += self._release([job])
        return [*actions, CheckAgents()]

    def _has_agent(self, job: Job, view: RunView) -> bool:
        others = (node for each in self.jobs if each is not job for node in each.nodes)
        return not {*view.present, *self.lost_since, *others}.isdisjoint(job.nodes)

    def job_changed(self, number: int, info: JobInfo) -> None:
        if (job := self.jobs.find(number)) is not None:
            job.nodes, job.ends_at = info.nodes, info.ends_at

    def job_refused(self, number: int, why: str, view: RunView) -> list[Action]:
        job = self.jobs.find(number)
        if job is None:
            return []
        self.jobs.remove(job)
        journal = WriteJournal(RunEvent.REFUSED, {"role": job.role.value, "why": why})
        if job.role is JobRole.JOIN:  # report a refusal only once, even if the request is repeated
            news = self.refusals.refused(why, self._not_to_join(view), view.clock)
            return [journal, WriteNote(f"Slurm has no node to replace a lost one: {why}")] if news else []
        if job.role is JobRole.MAIN:
            return [journal, StopRun(1, f"Slurm refused: {why}", RunCause.REFUSED)]
        is_new = self._next_refusals.refused(why, (), view.clock)
        note = [WriteNote(f"Slurm refused: {why}; retrying in {ASK_AGAIN_S:.0f} s")] if is_new else []
        return [journal, *note, RequestNext(ASK_AGAIN_S)]

    def next_due(self, view: RunView) -> list[Action]:
        return [] if view.ending or self.jobs.has(JobRole.NEXT) else self._request_next(view)

    def job_over(self, number: int, job_id: int | None, state: JobState, view: RunView) -> list[Action]:
        job = self.jobs.find(number)
        if job is None:
            return []
        job.id = job_id
        self.jobs.remove(job)
        return self._over(job, state, view)

    def _over(self, job: Job, state: JobState, view: RunView) -> list[Action]:
        """Handle the end of a job. If the user cancelled it, end the run. Otherwise request another job if needed."""
        what = {"job": job.id, "role": job.role.value, "state": state.value}
        actions: list[Action] = [WriteJournal(RunEvent.JOB_OVER, what)]
        if job.role is not JobRole.JOIN and state is JobState.CANCELLED:
            actions.append(ApplyEvent(Cancelled()))
        elif self.terms.own_job is not None or view.ending or job.role is JobRole.JOIN:
            pass  # do not request another job: the run has one, or is ending, or the coordinator runs inside this job
        elif (view.closing or not self.jobs.promote_join()) and not self.jobs.has(JobRole.NEXT):
            actions += self._release(self.jobs.waiting_joins)  # the next job starts only after all others have ended
            actions += self._request_next(view)
        return [*actions, SaveState()]

    def _ask_for_missing(self, view: RunView) -> list[Action]:
        """Request a one-node job if a node is missing and the run's own job has been granted."""
        there = self.coming(view)
        # A spare that has taken a rank no longer counts as a spare. Nodes are requested one at a time, so that no two
        # requests get the same node.
        missing = len(there) < self.terms.max_nodes + self.terms.spares
        may_ask = (
            self.jobs.has_nodes and not self.jobs.waits and self.refusals.may_ask(self._not_to_join(view), view.clock)
        )
        if not (missing and may_ask):
            return []
        job = self._add(JobRole.JOIN)
        return [RequestJob(job.number, job.role, self._suspects, tuple(sorted(there))), SaveState()]

    @property
    def _suspects(self) -> tuple[str, ...]:
        return (*self.excluded, *self.lost_since, *self._vacating, *self._departures.read_by_agents)

    def _not_to_join(self, view: RunView) -> set[str]:
        return {*self._suspects, *self.coming(view)}

    # Agents on the run's nodes

    def check_agents(self, view: RunView) -> list[Action]:
        """Leave drained nodes, probe nodes without an agent, and request a one-node job if a node is missing."""
        if view.closing:
            return []
        actions = self._leave_drained(view)
        for job in self.jobs:
            without_agent = self.jobs.nodes_without_agent(job, view, {*self.lost_since, *self.excluded, *self._probed})
            if without_agent:
                self._probed.update(without_agent)
                actions.append(ProbeNodes(job.number, tuple(without_agent)))
        return [*actions, *self._ask_for_missing(view)]

    def nodes_probed(self, number: int, nodes: Collection[str], result: ProbeResult, view: RunView) -> list[Action]:
        """Start agents on the nodes that answered; the others are lost. Agents that may still connect get more time."""
        self._probed.difference_update(nodes)
        job = self.jobs.find(number)
        if view.closing or job is None:
            return []
        without_agent = [
            node
            for node in self.jobs.nodes_without_agent(job, view, {*self.lost_since, *self.excluded})
            if node in nodes
        ]
        dead = [node for node in without_agent if node in result.dead]
        actions: list[Action] = [self._lose(node, f"{node} does not answer", view) for node in dead]
        slow, notes = self._wait_for_slow([node for node in without_agent if node not in dead], result, view)
        start, lost = self._count_tries([node for node in without_agent if node not in (*dead, *slow)], result, view)
        actions += [*notes, *lost]
        if any(isinstance(action, StopRun) for action in lost):
            return actions
        actions += [self._start(job, group, view) for group in self._tries.group_by_srun(start)]
        return [*actions, SaveState(), *([ReleaseLostNodes()] if dead or lost else ())]

    def _wait_for_slow(
        self, nodes: Collection[str], result: ProbeResult, view: RunView
    ) -> tuple[list[str], list[Action]]:
        """Return the nodes whose slow agents get more time, and a note. A node that has rebooted gets no more time."""
        ages_s: dict[str, float] = {}
        for step in self.jobs.steps:
            # Agents that have ended are not slow: add their nodes to `left`.
            step.left |= ended_on(result.step_output.get(step.number, "")) & {*nodes}
            late = [node for node in nodes if step.is_slow(node, view.clock)]
            ages_s.update({node: max(view.clock - step.began, ages_s.get(node, 0.0)) for node in late})
        waits = still_starting(ages_s, result.found, view.now)
        for step in self.jobs.steps:
            step.looked.update(dict.fromkeys({*waits} & {*step.nodes}, view.clock))
        said = describe_slow(ages_s, waits, self._reported_slow, self.terms.log)
        return waits, [WriteNote(said)] if said else []

    def _count_tries(self, nodes: Iterable[str], result: ProbeResult, view: RunView) -> tuple[list[str], list[Action]]:
        """Return the nodes on which to start an agent now, and the actions for nodes where that failed too often."""
        start: list[str] = []
        actions: list[Action] = []
        ours = self.jobs.nodes
        some_started = self._some_connected or view.started
        for node in nodes:
            if self._tries.count_try(node):
                start.append(node)
                continue
            if not some_started and (faults := container_faults(result.log, ours)):
                what = f"the container could not be started on any node: {'; '.join(faults)}"
                return [], [*actions, StopRun(NO_CONTAINER, what)]
            why = startup_failure(result.log, node)
            actions.append(self._lose(node, f"agents on {node} end right after they start{why}", view))
            if not some_started and {*ours} <= self.lost_since.keys():  # all nodes failed, so no node is the cause
                what = f"the run's agents end right after they start on every node{why}; see {self.terms.log}"
                return [], [*actions, StopRun(1, what)]
        return start, actions

    def _start(self, job: Job, nodes: tuple[str, ...], view: RunView) -> Action:
        self._last_step += 1
        job.steps.append(AgentStep(self._last_step, nodes, view.clock))
        return StartAgents(job.number, self._last_step, nodes)

    def step_ended(self, number: int, step: int, missed: Mapping[str, str], view: RunView) -> list[Action]:
        """Start agents again after a step has ended. The nodes in `missed`, which srun could not reach, are lost."""
        job = self.jobs.find(number)
        ended = next((each for each in job.steps if each.number == step), None) if job else None
        if job is None or ended is None:
            return []
        job.steps.remove(ended)
        if not missed:
            return [CheckAgents(SETTLE_S)]
        self._tries.forget(*ended.nodes)
        lost = [
            self._lose(node, f"Slurm cannot start anything on {node} ({why})", view) for node, why in missed.items()
        ]
        return [*lost, ReleaseLostNodes()]

    def agent_connected(self, node: str, again: bool, view: RunView) -> tuple[bool, list[Action]]:
        """Return whether the agent is accepted, and the actions that follow.

        A node that returns while it is down in Slurm is refused, because it is under repair or belongs to another job.
        """
        self._some_connected = True
        if again and node in self._down:
            return False, self.leave_for_repair(node, view)
        self.lost_since.pop(node, None)
        return True, []

    def agent_ready(self, node: str) -> None:
        self._tries.forget(node)

    def agent_lost(self, node: str, silent: bool, view: RunView) -> None:
        for step in self.jobs.steps:
            step.left.add(node)
        if silent:
            # The loss is dated before its detection, because the node may have rebooted in that time.
            self.lost_since[node] = view.now - self.terms.gone_s

    # Lost nodes, and nodes to leave

    def nodes_seen(self, nodes: Sequence[NodeInfo], view: RunView) -> list[Action]:
        """Update the `watched` nodes from Slurm's report: healthy, down, drained for repair, or back."""
        self.unhealthy = frozenset(node.name for node in nodes if node.draining or node.down)
        self._down = frozenset(node.name for node in nodes if node.down)
        before, self._vacating = set(self._vacating), drained_for_repair(nodes)
        self._were_out = {*self._were_out, *out_of_service(nodes)} & set(self.lost_since)
        back = usable_again(self.lost_since, nodes, view.now, self._were_out - self._departures.read_by_agents)
        for name in back:
            del self.lost_since[name]
        self._tries.forget(*back)
        self._departures.forget(back)
        stays = (before - set(self._vacating)) & view.present  # nodes that recovered before the run left them
        # Pending requests still exclude nodes that have returned, or ask for replacements that are no longer needed.
        released = self._release(self.jobs.waiting_joins) if back or stays else []
        news = self._departures.nodes_seen(nodes, view.now)
        return [ApplyEvent(NodesOutOfService(self.unhealthy)), *released, *news, ReleaseLostNodes(), ReportLeftNodes()]

    def notice_read(self, node: str, notice: CloudNotice, view: RunView) -> list[Action]:
        return self._departures.notice_read(node, notice, view.now)

    def _lose(self, node: str, why: str, view: RunView) -> Action:
        self._leave(node, view)
        return WriteNote(f"{why}; the run continues without it")

    def _leave(self, node: str, view: RunView) -> None:
        self.lost_since[node] = view.now
        self._tries.forget(node)

    def release_lost(self, view: RunView) -> list[Action]:
        """Release lost nodes. Keep the nodes of a running step, because releasing them would kill the step."""
        actions: list[Action] = []
        for job in [job for job in self.jobs if job.nodes and job.id != self.terms.own_job and not view.closing]:
            busy = {node for step in job.steps for node in step.nodes}
            stay = tuple(node for node in job.nodes if node in busy or node not in self.lost_since)
            if not stay and not job.steps:
                actions += [*self._release([job]), *self._over(job, JobState.NODE_FAIL, view)]
            elif stay and stay != job.nodes and job.id is not None:
                actions.append(ShrinkJob(job.number, job.id, stay))
        return [*actions, CheckAgents()]

    def job_shrunk(self, number: int, nodes: Collection[str]) -> None:
        if (job := self.jobs.find(number)) is not None:
            job.nodes = tuple(node for node in job.nodes if node in nodes)

    def leave_for_repair(self, node: str, view: RunView) -> list[Action]:
        self._leave(node, view)
        self._were_out.add(node)
        return [ReportLeftNodes()]

    def _leave_drained(self, view: RunView) -> list[Action]:
        """Leave nodes that a cloud will reclaim, and nodes drained for repair that the run does not need."""
        actions = self._departures.leave(view)
        ready = [node for node in view.ready if node not in self._departures.notices]
        for node in nodes_to_leave(self._vacating, ready, self.terms.max_nodes):
            self._leave(node, view)
            actions += [LeaveNode(node, f"drained for repair ({self._vacating[node]})"), ReportLeftNodes()]
        return actions

    def comments_due(self, view: RunView) -> list[Action]:
        left = {*self._vacating} & {*self.lost_since} - view.present
        due = [(job, frozenset(left & {*job.nodes})) for job in self.jobs if job.nodes]
        return [CommentJob(job.number, job.id, job.role, left) for job, left in due if job.id and left != job.left]

    def comment_set(self, number: int, left: frozenset[str]) -> None:
        if (job := self.jobs.find(number)) is not None:
            job.left = left

    # Moving to the next job, and the end

    def leaving(self, job_id: int, node: str) -> list[Action]:
        """Begin to leave the nodes before Slurm reports the reason, because workers that save quickly may end first.

        Ignore a signal from a one-node job, because the run loses only that node. Ignore a signal from a node that is
        down, because when such a node returns, Slurm ends processes that are left from an earlier job.
        """
        of_the_run = [job.id for job in self.jobs if job.role is not JobRole.JOIN]
        if node in self._down or (job_id and job_id not in of_the_run):
            return []
        return [ApplyEvent(NodesReclaimed()), CheckJobs()]

    def jobs_checked(self, view: RunView) -> list[Action]:
        """Request the next job. In a batch step, requeue the coordinator's job before its time limit."""
        if view.ending or not view.closing:
            return []
        if self.terms.own_job is None:
            return self.next_due(view)
        ends_at = next((job.ends_at for job in self.jobs if job.id == self.terms.own_job), None)
        return [] if ends_at is None else [MoveRun(max(0.0, ends_at - LAST_MOMENT_S - view.now))]

    def move(self, view: RunView) -> list[Action]:
        """Release the jobs so that the next one starts. In a batch step, requeue the coordinator's own job instead."""
        if view.ending:
            return []
        if self.terms.own_job is not None:
            return [RequeueOwnJob(self.terms.own_job)]
        released = self._release([job for job in self.jobs if job.role is not JobRole.NEXT], code=0)
        return [*released, *(() if self.jobs else self._request_next(view)), SaveState()]

    def requeue_ended(self, done: bool) -> list[Action]:
        return [SuspendRun("requeued") if done else StopRun(1, "Slurm did not requeue the job")]

    def nodes_to_recall(self, nodes: Collection[str], view: RunView) -> dict[int, list[str]]:
        """Return, by job number, which of `nodes` have no agent. Agents are started there at the end, to clean up."""
        return self.jobs.all_without_agent(nodes, view, self.excluded)

    def recall(self, nodes: Mapping[int, Collection[str]], dead: Collection[str], view: RunView) -> list[Action]:
        alive = [(job, tuple(node for node in nodes.get(job.number, ()) if node not in dead)) for job in self.jobs]
        return [self._start(job, each, view) for job, each in alive if each]

    def release_all(self, code: int | None = None) -> list[Action]:
        return self._release(self.jobs, code)

    def _release(self, jobs: Iterable[Job], code: int | None = None) -> list[Action]:
        """Release these jobs. End only the steps of the coordinator's own job, which ends with the coordinator."""
        actions: list[Action] = []
        for job in list(jobs):
            self.jobs.remove(job)
            own = job.id is not None and job.id == self.terms.own_job
            actions.append(EndSteps(job.number) if own else ReleaseJob(job.number, code))
        return actions

    # Queries from the coordinator

    def coming(self, view: RunView) -> set[str]:
        """Return the nodes whose agents are connected or starting, except nodes that the run is leaving."""
        return {*view.present, *self._probed, *self.jobs.expected(view)} - {*self._suspects}

    @property
    def watched(self) -> list[str]:
        """The nodes to query in Slurm: the run's nodes and lost nodes."""
        return sorted({*self.lost_since, *self.jobs.nodes})
