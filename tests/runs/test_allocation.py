"""The state machine of a run's nodes, by examples and then in any order of events."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dalsegno.containers.native import NO_CONTAINER
from dalsegno.runs.comment import JobRole
from dalsegno.runs.coordinator.generations.events import Cancelled, NodesOutOfService, NodesReclaimed, RunMoved
from dalsegno.runs.coordinator.nodes.allocation import ASK_AGAIN_S, LAST_MOMENT_S, NodeAllocation
from dalsegno.runs.coordinator.nodes.allocation_actions import (
    ARRIVAL_S,
    MAX_START_S,
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
    RunView,
    ShrinkJob,
    StartAgents,
    StopRun,
    SuspendRun,
    WriteNote,
)
from dalsegno.runs.coordinator.nodes.node_rules import LONG_S, MAX_TRIES
from dalsegno.slurm.facts import JobInfo, JobState, NodeFlag, NodeInfo, NodeState
from tests.conftest import LONG

VIEW = RunView(now=5000.0, clock=100.0, started=True)
IDLE = NodeInfo("n1", NodeState.IDLE, slurmd_started_at=10)
DOWN = replace(IDLE, state=NodeState.DOWN, reason="dalsegno:replace:gone neither answers")
DRAINED = replace(IDLE, flags=frozenset({NodeFlag.DRAIN}), reason="dalsegno:reboot:xid[79] off the bus")
ALIVE = ProbeResult()


def granted(job_id: int, *nodes: str, ends_at: int | None = None) -> JobInfo:
    return JobInfo(job_id, "train", "ada", JobState.RUNNING, nodes=nodes, ends_at=ends_at)


def holding(*nodes: str, spares: int = 0, own_job: int | None = None) -> NodeAllocation:
    """Return an allocation whose own job 7 was granted, on these nodes, without agents."""
    terms = AllocationTerms(len(nodes) - spares, spares, own_job, gone_s=3.0, log="/r/agents.log")
    allocation = NodeAllocation(terms)
    allocation.begin()
    allocation.job_granted(1, granted(7, *nodes), VIEW)
    return allocation


def seen(*present: str, **more: object) -> RunView:
    return replace(VIEW, present=frozenset(present), ready=present, **more)  # type: ignore[arg-type]


def of_kind(actions: list[Action], *kinds: type) -> list[Action]:
    return [action for action in actions if isinstance(action, kinds)]


# Agents


def test_every_node_of_a_granted_job_is_probed_and_then_gets_an_agent():
    allocation = NodeAllocation(AllocationTerms(max_nodes=2))
    assert of_kind(allocation.begin(), RequestJob) == [RequestJob(1, JobRole.MAIN)]
    assert allocation.check_agents(VIEW) == []
    actions = allocation.job_granted(1, granted(7, "n1", "n2"), VIEW)
    assert actions[1:] == [ApplyEvent(RunMoved()), CheckAgents()]
    assert allocation.check_agents(VIEW) == [ProbeNodes(1, ("n1", "n2"))]
    assert allocation.check_agents(VIEW) == [], "they are being probed"
    actions = allocation.nodes_probed(1, ("n1", "n2"), ALIVE, VIEW)
    assert of_kind(actions, StartAgents) == [StartAgents(1, 1, ("n1", "n2"))]
    assert allocation.check_agents(VIEW) == [], "their agents are on their way"


def test_node_that_does_not_answer_is_lost_and_released():
    allocation = holding("n1", "n2")
    allocation.check_agents(VIEW)
    actions = allocation.nodes_probed(1, ("n1", "n2"), ProbeResult(dead=("n2",)), VIEW)
    assert WriteNote("n2 does not answer; the run continues without it") in actions
    assert StartAgents(1, 1, ("n1",)) in actions and actions[-1] == ReleaseLostNodes()
    assert allocation.release_lost(VIEW) == [ShrinkJob(1, 7, ("n1",)), CheckAgents()]
    allocation.job_shrunk(1, ("n1",))
    assert of_kind(allocation.check_agents(VIEW), RequestJob) == [RequestJob(2, JobRole.JOIN, ("n2",), ("n1",))]


@pytest.mark.parametrize("why", ["lost", "excluded", "present", "closing"])
def test_no_agent_is_started_on_a_node_that_changed_during_its_probe(why: str):
    allocation, view = holding("n1"), VIEW
    allocation.check_agents(VIEW)
    if why == "lost":
        allocation.agent_lost("n1", silent=True, view=VIEW)
    elif why == "excluded":
        allocation.excluded.append("n1")
    else:
        view = seen("n1") if why == "present" else replace(VIEW, closing=True)
    assert of_kind(allocation.nodes_probed(1, ("n1",), ALIVE, view), StartAgents) == []


def test_agents_start_again_after_their_step_and_not_where_srun_could_not_reach():
    allocation = holding("n1", "n2")
    allocation.check_agents(VIEW)
    allocation.nodes_probed(1, ("n1", "n2"), ALIVE, VIEW)
    actions = allocation.step_ended(1, 1, {"n2": "Communication connection failure"}, VIEW)
    what = "Slurm cannot start anything on n2 (Communication connection failure); the run continues without it"
    assert actions == [WriteNote(what), ReleaseLostNodes()]
    assert allocation.check_agents(VIEW)[0] == ProbeNodes(1, ("n1",))


def test_job_whose_nodes_are_all_lost_is_released_and_the_next_one_requested():
    allocation = holding("n1")
    allocation.agent_lost("n1", silent=True, view=VIEW)
    actions = allocation.release_lost(VIEW)
    assert of_kind(actions, ReleaseJob, RequestJob) == [ReleaseJob(1), RequestJob(2, JobRole.NEXT, ("n1",))]


def test_agent_is_expected_for_a_while_after_its_srun_and_each_check():
    step = AgentStep(1, ("n1", "n2"), began=100.0)
    assert step.will_bring("n1", 100 + ARRIVAL_S - 1) and not step.will_bring("n1", 100 + ARRIVAL_S)
    step.looked["n1"] = 100 + ARRIVAL_S
    assert step.will_bring("n1", 101 + ARRIVAL_S) and not step.will_bring("n2", 101 + ARRIVAL_S)
    assert not step.will_bring("n3", 101)
    step.left.add("n1")
    assert not step.will_bring("n1", 101) and not step.is_slow("n1", 101)


def test_agent_is_not_expected_once_its_srun_has_ended():
    allocation = holding("n1")
    allocation.check_agents(VIEW)
    allocation.nodes_probed(1, ("n1",), ALIVE, VIEW)
    assert allocation.jobs.expected(VIEW) == {"n1"}
    assert allocation.step_ended(1, 1, {}, VIEW) == [CheckAgents(0.05)]
    assert allocation.jobs.expected(VIEW) == set()


def test_overdue_agent_may_be_slow_unless_its_step_was_adopted():
    step = AgentStep(1, ("n1",), began=100.0)
    assert step.is_slow("n1", 100 + MAX_START_S - 1) and not step.is_slow("n1", 100 + MAX_START_S)
    assert not AgentStep(1, ("n1",), began=100.0, adopted=True).is_slow("n1", 200)


def with_slow_agent() -> tuple[NodeAllocation, AgentStep]:
    allocation = holding("n1")
    step = AgentStep(1, ("n1",), began=VIEW.clock - 3 * LONG_S)
    allocation.jobs[0].steps.append(step)
    return allocation, step


def test_slow_agent_is_not_started_twice():
    """An example is an agent whose node imports a large image."""
    allocation, step = with_slow_agent()
    actions: list[Action] = []
    for _ in range(2 * MAX_TRIES):
        step.looked.clear()
        assert allocation.check_agents(VIEW) == [ProbeNodes(1, ("n1",))]
        actions += allocation.nodes_probed(1, ("n1",), ProbeResult(found=(IDLE,)), VIEW)
    assert allocation.lost_since == {} and step.will_bring("n1", VIEW.clock)
    what = "agents are slow to start on n1 (image import or prolog); see /r/agents.log"
    assert of_kind(actions, StartAgents, WriteNote) == [WriteNote(what)]


@pytest.mark.parametrize("why", ["its task has ended", "its slurmd was started since"])
def test_agent_that_will_not_come_is_started_again(why: str):
    allocation, _ = with_slow_agent()
    result = ProbeResult(found=(replace(IDLE, slurmd_started_at=int(VIEW.now)),))
    if why == "its task has ended":
        result = ProbeResult(found=(IDLE,), step_output={1: "srun: error: n1: task 0: Killed\n"})
    assert of_kind(allocation.nodes_probed(1, ("n1",), result, VIEW), StartAgents) == [StartAgents(1, 1, ("n1",))]


REFUSED = "dalsegno: {}: container[125]: image /fsx/a.sqsh: No such file or directory\n"


def tried_too_often(allocation: NodeAllocation, *refused: str) -> list[Action]:
    """Simulate a run of two nodes on which no agent starts. `refused` contains nodes that refused the container."""
    view, actions = replace(VIEW, started=False), list[Action]()
    result = ProbeResult(log="".join(REFUSED.format(node) for node in refused))
    for _ in range(MAX_TRIES + 1):
        for probe in of_kind(allocation.check_agents(view), ProbeNodes):
            actions += allocation.nodes_probed(1, probe.nodes, result, view)  # type: ignore[union-attr]
        for step in allocation.jobs.steps:
            actions += allocation.step_ended(1, step.number, {}, view)
    return of_kind(actions, WriteNote, StopRun)


def test_image_missing_on_all_nodes_ends_the_run_with_one_report():
    why = "the container could not be started on any node: image /fsx/a.sqsh: No such file or directory"
    assert tried_too_often(holding("n1", "n2"), "n1", "n2") == [StopRun(NO_CONTAINER, why)]


def test_image_missing_on_one_node_excludes_that_node():
    first, second, end = tried_too_often(holding("n1", "n2"), "n1")
    assert isinstance(first, WriteNote) and isinstance(second, WriteNote)
    assert first.text.startswith("agents on n1 end right after they start (image /fsx/a.sqsh: No such file")
    assert isinstance(end, StopRun) and end.code == 1, "nothing is known of the other node"


def test_image_that_started_before_does_not_end_the_run():
    allocation = holding("n1", "n2")
    allocation.agent_connected("n1", again=False, view=VIEW)
    assert [type(action) for action in tried_too_often(allocation, "n1", "n2")] == [WriteNote, WriteNote]


# Replacements


def test_replacement_is_requested_again_after_a_refusal_and_reported_once():
    allocation, notes = holding("n1", "n2"), list[Action]()
    allocation.agent_lost("n2", silent=True, view=VIEW)
    asked = []
    for half in range(80):
        view = seen("n1", clock=VIEW.clock + half / 2)
        for request in of_kind(allocation.check_agents(view), RequestJob):
            asked.append(half / 2)
            notes += allocation.job_refused(request.number, "busy", view)  # type: ignore[union-attr]
    assert asked == [0, 5, 15, 35] and allocation.refusals.why == "busy"
    assert of_kind(notes, WriteNote) == [WriteNote("Slurm has no node to replace a lost one: busy")]


def test_granted_node_that_the_run_has_already_is_released():
    allocation = holding("n1", "n2")
    allocation.agent_lost("n2", silent=True, view=VIEW)
    assert of_kind(allocation.check_agents(seen("n1")), RequestJob) == [RequestJob(2, JobRole.JOIN, ("n2",), ("n1",))]
    assert ReleaseJob(2) in allocation.job_granted(2, granted(8, "n1"), seen("n1"))
    assert [job.number for job in allocation.jobs] == [1]


def test_replacement_request_is_cancelled_when_the_node_recovers():
    allocation, view = holding("n1"), seen("n1")
    allocation.jobs.append(Job(JobRole.JOIN, 2))
    for state in (IDLE, DRAINED, DRAINED):
        actions = allocation.nodes_seen([state], view)
        assert of_kind(actions, ReleaseJob) == [], "the node is under repair, and a replacement is needed"
    assert of_kind(allocation.nodes_seen([IDLE], view), ReleaseJob) == [ReleaseJob(2)]
    assert len(allocation.jobs) == 1


def test_drained_node_is_left_once_another_is_ready_and_reported_to_the_controller():
    allocation = holding("n1", "n2", spares=1)
    assert allocation.nodes_seen([DRAINED], seen("n1", "n2"))[0] == ApplyEvent(NodesOutOfService(frozenset({"n1"})))
    assert of_kind(allocation.check_agents(seen("n1")), LeaveNode) == []
    (left,) = of_kind(allocation.check_agents(seen("n1", "n2")), LeaveNode)
    assert left == LeaveNode("n1", "drained for repair (reboot:xid[79] off the bus)")
    assert allocation.comments_due(seen("n1", "n2")) == [], "its agent has not ended yet"
    comment = CommentJob(1, 7, JobRole.MAIN, frozenset({"n1"}))
    assert allocation.comments_due(seen("n2")) == [comment]
    allocation.comment_set(1, comment.left)
    assert allocation.comments_due(seen("n2")) == []


def test_joined_job_becomes_the_own_one_if_that_is_over():
    allocation = holding("n1", "n2")
    allocation.agent_lost("n2", silent=True, view=VIEW)
    allocation.check_agents(seen("n1"))
    allocation.job_granted(2, granted(8, "n3"), seen("n1"))
    assert of_kind(allocation.job_over(1, 7, JobState.NODE_FAIL, VIEW), RequestJob) == []
    assert [(job.id, job.role) for job in allocation.jobs] == [(8, JobRole.MAIN)]


# Leaving


def test_run_leaves_its_nodes_only_for_its_own_job():
    """Slurm ends a cut-off agent when its node returns, which says nothing about the other nodes."""
    allocation = holding("n1", "n2")
    allocation.jobs.append(Job(JobRole.JOIN, 2, 8))
    assert allocation.leaving(8, "n2") == allocation.leaving(6, "n2") == []  # a job that joined, and a job that is over
    allocation.agent_lost("n1", silent=True, view=VIEW)
    allocation.nodes_seen([DOWN], VIEW)
    assert allocation.leaving(7, "n1") == []
    assert allocation.leaving(7, "n2") == [ApplyEvent(NodesReclaimed()), CheckJobs()]


def test_next_job_is_requested_once_and_starts_when_the_others_are_released():
    allocation, leaving = holding("n1"), replace(VIEW, closing=True)
    assert of_kind(allocation.jobs_checked(leaving), RequestJob) == [RequestJob(2, JobRole.NEXT)]
    assert allocation.jobs_checked(leaving) == []
    assert of_kind(allocation.move(leaving), ReleaseJob, RequestJob) == [ReleaseJob(1, code=0)]
    actions = allocation.job_granted(2, granted(8, "n2"), leaving)
    assert ApplyEvent(RunMoved()) in actions and allocation.jobs[0].role is JobRole.MAIN


def test_job_of_the_coordinator_is_requeued_before_its_time_is_over():
    allocation, leaving = NodeAllocation(AllocationTerms(1, own_job=7)), replace(VIEW, closing=True)
    assert allocation.begin()[0] == LoadJob(1, 7)
    allocation.job_granted(1, granted(7, "n1", ends_at=int(VIEW.now) + 60), VIEW)
    assert allocation.jobs_checked(leaving) == [MoveRun(60 - LAST_MOMENT_S)]
    assert allocation.move(leaving) == [RequeueOwnJob(7)]
    assert allocation.requeue_ended(True) == [SuspendRun("requeued")]
    assert allocation.requeue_ended(False) == [StopRun(1, "Slurm did not requeue the job")]
    assert allocation.release_all(0) == [EndSteps(1)]


def test_refused_next_job_is_requested_again_and_a_refused_first_job_ends_the_run():
    allocation = holding("n1")
    allocation.jobs_checked(replace(VIEW, closing=True))
    actions = allocation.job_refused(2, "busy", VIEW)
    assert actions[1:] == [WriteNote("Slurm refused: busy; retrying in 5 s"), RequestNext(ASK_AGAIN_S)]
    assert of_kind(allocation.next_due(VIEW), RequestJob) == [RequestJob(3, JobRole.NEXT)]
    assert allocation.next_due(VIEW) == [], "it was requested meanwhile"
    assert allocation.job_refused(3, "busy", VIEW)[1:] == [RequestNext(ASK_AGAIN_S)], "it was reported before"
    first = NodeAllocation(AllocationTerms(1))
    first.begin()
    assert of_kind(first.job_refused(1, "busy", VIEW), StopRun)


def test_cancelled_job_ends_the_run():
    actions = holding("n1").job_over(1, 7, JobState.CANCELLED, VIEW)
    assert ApplyEvent(Cancelled()) in actions and of_kind(actions, RequestJob) == []


def test_agents_are_recalled_at_the_end_also_to_nodes_that_were_lost():
    allocation = holding("n1", "n2", "n3")
    allocation.agent_lost("n1", silent=True, view=VIEW)
    view = seen("n3", closing=True, ending=True)
    bare = allocation.nodes_to_recall({"n1", "n2", "n3"}, view)
    assert bare == {1: ["n1", "n2"]}
    assert allocation.recall(bare, ["n2"], view) == [StartAgents(1, 1, ("n1",))]


# Any order of events

NODES = [f"n{number}" for number in range(5)]
nodes = st.sampled_from(NODES)
few_nodes = st.sets(nodes, max_size=1)
some_nodes = st.sets(nodes, max_size=3)


LATE_S = 20.0  # minimum time of a run, because shorter runs test little


class AnyOrderOfNodes(RuleBasedStateMachine):
    """Slurm grants, refuses and ends jobs, nodes die and return, agents come and go; probes and sruns take any time."""

    @initialize(size=st.integers(1, 3), spares=st.integers(0, 1), own=st.booleans())
    def begin(self, size: int, spares: int, own: bool) -> None:
        self.own = 1 if own else None
        self.allocation = NodeAllocation(AllocationTerms(size, spares, self.own, gone_s=3.0))
        self.clock = 0.0
        self.present: set[str] = set()
        self.dismissed: set[str] = set()  # agents that were ordered to end and still run
        self.leaving = self.ending = False
        self.waiting: dict[int, JobRole] = {}  # requests that Slurm has not answered
        self.held: dict[int, int] = {}  # jobs that Slurm has granted: number -> id
        self.steps: dict[int, tuple[int, tuple[str, ...]]] = {}
        self.probes: list[ProbeNodes] = []
        self.own_events: list[tuple[Action, Callable[[], list[Action]]]] = []  # events that the machine sent to itself
        self.ids = 100
        self.act(self.allocation.begin())

    @property
    def view(self) -> RunView:
        present = frozenset(self.present)
        closing = self.leaving or self.ending
        ready = tuple(sorted(self.present - self.dismissed))
        return RunView(1000 + self.clock, self.clock, present, ready, True, closing, self.ending)

    def act(self, actions: list[Action]) -> None:
        """Execute actions as the shell does, and check each."""
        for action in actions:
            if isinstance(action, RequestJob):
                self.request(action)
            elif isinstance(action, StartAgents):
                assert not self.leaving and not self.ending, "agents are started after the run has closed"
                self.start(action)
            elif isinstance(action, ProbeNodes):
                assert not {*action.nodes} & {node for probe in self.probes for node in probe.nodes}
                self.probes.append(action)
            elif isinstance(action, LoadJob):
                self.waiting[action.number] = JobRole.MAIN
            elif isinstance(action, ReleaseJob):
                assert self.held.get(action.number, 0) != self.own, "the coordinator would end with its job"
                self.drop(action.number)
            elif isinstance(action, EndSteps):
                assert self.ending and self.held.get(action.number, self.own) == self.own
                self.drop(action.number)
            elif isinstance(action, ShrinkJob):
                assert action.id != self.own and not self.busy(action.number) - {*action.nodes} and action.nodes
                self.allocation.job_shrunk(action.number, action.nodes)
            else:
                self.tell_run(action)

    def request(self, action: RequestJob) -> None:
        assert not self.ending, "a job is requested after the end"
        assert not {*action.suspects} & {*action.members}
        if action.role is JobRole.JOIN:
            assert not self.leaving and not self.waiting, "two requests at once"
            assert {*self.allocation.lost_since, *self.allocation.excluded} <= {*action.suspects}
        assert action.role not in self.waiting.values(), "two requests at once"
        self.waiting[action.number] = action.role

    def start(self, action: StartAgents) -> None:
        assert action.number in self.held
        avoid = {*self.allocation.lost_since, *self.allocation.excluded, *self.present}
        assert not {*action.nodes} & avoid, "agents are started on nodes that the run does not use"
        self.steps[action.step] = (action.number, action.nodes)

    def tell_run(self, action: Action) -> None:
        if isinstance(action, ApplyEvent):
            self.leaving = (self.leaving or isinstance(action.event, NodesReclaimed)) and not isinstance(
                action.event, RunMoved
            )
            self.ending = self.ending or isinstance(action.event, Cancelled)
        elif isinstance(action, StopRun | SuspendRun):
            self.ending = True
        elif isinstance(action, LeaveNode):
            assert action.node in self.present - self.dismissed
            self.dismissed.add(action.node)
        elif isinstance(action, CommentJob):
            self.allocation.comment_set(action.number, action.left)
        else:
            self.keep_own_event(action)

    def keep_own_event(self, action: Action) -> None:
        """Keep an event that the machine sent to itself, which may be delivered at any later time."""
        events: dict[type, Callable[[], list[Action]]] = {
            CheckAgents: lambda: self.allocation.check_agents(self.view),
            ReleaseLostNodes: lambda: self.allocation.release_lost(self.view),
            ReportLeftNodes: lambda: self.allocation.comments_due(self.view),
            CheckJobs: lambda: self.allocation.jobs_checked(self.view),
            RequestNext: lambda: self.allocation.next_due(self.view),
            MoveRun: lambda: self.allocation.move(self.view),
            RequeueOwnJob: lambda: self.allocation.requeue_ended(True),
        }
        if type(action) in events and all(type(kept) is not type(action) for kept, _ in self.own_events):
            self.own_events.append((action, events[type(action)]))

    def drop(self, number: int) -> None:
        """Remove a job from Slurm, and with it its steps."""
        self.waiting.pop(number, None)
        self.held.pop(number, None)
        self.steps = {step: each for step, each in self.steps.items() if each[0] != number}

    def busy(self, number: int) -> set[str]:
        return {node for job, each in self.steps.values() if job == number for node in each}

    # Slurm

    @precondition(lambda self: self.waiting)
    @rule(names=st.permutations(NODES), index=st.integers(0, 9))
    def grant(self, names: list[str], index: int) -> None:
        number = sorted(self.waiting)[index % len(self.waiting)]
        role = self.waiting.pop(number)
        terms = self.allocation.terms
        count = 1 if role is JobRole.JOIN else min(len(NODES), terms.max_nodes + terms.spares)
        self.ids += 1
        self.held[number] = self.own if self.own and role is JobRole.MAIN else self.ids
        info = granted(self.held[number], *names[:count], ends_at=10_000)
        self.act(self.allocation.job_granted(number, info, self.view))

    @precondition(lambda self: any(role is not JobRole.MAIN for role in self.waiting.values()))
    @rule(data=st.data())
    def refuse(self, data: st.DataObject) -> None:
        later = [number for number, role in self.waiting.items() if role is not JobRole.MAIN]
        number = data.draw(st.sampled_from(later))
        del self.waiting[number]
        self.act(self.allocation.job_refused(number, "busy", self.view))

    @precondition(lambda self: self.held)
    @rule(state=st.sampled_from([JobState.NODE_FAIL, JobState.TIMEOUT, JobState.PREEMPTED]), data=st.data())
    def end_job(self, state: JobState, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.held)))
        job_id = self.held[number]
        self.drop(number)
        self.act(self.allocation.job_over(number, job_id, state, self.view))

    @rule(down=some_nodes, drained=some_nodes, restarted=some_nodes)
    def look_at_nodes(self, down: set[str], drained: set[str], restarted: set[str]) -> None:
        states = [
            replace(DOWN if name in down else DRAINED if name in drained else IDLE, name=name)
            for name in self.allocation.watched
        ]
        now = int(1000 + self.clock)
        states = [replace(each, slurmd_started_at=now) if each.name in restarted else each for each in states]
        self.act(self.allocation.nodes_seen(states, self.view))

    # Nodes and agents

    @precondition(lambda self: self.probes)
    @rule(dead=few_nodes, index=st.integers(0, 9))
    def finish_probe(self, dead: set[str], index: int) -> None:
        probe = self.probes.pop(index % len(self.probes))
        result = ProbeResult(dead=tuple(dead & {*probe.nodes}))
        self.act(self.allocation.nodes_probed(probe.number, probe.nodes, result, self.view))

    @precondition(lambda self: self.steps)
    @rule(missed=few_nodes, data=st.data())
    def end_step(self, missed: set[str], data: st.DataObject) -> None:
        step = data.draw(st.sampled_from(sorted(self.steps)))
        number, names = self.steps.pop(step)
        for node in self.present & {*names}:
            self.lose(node, silent=False)
        self.act(self.allocation.step_ended(number, step, dict.fromkeys(missed & {*names}, "why"), self.view))

    @precondition(lambda self: self.steps)
    @rule(again=st.booleans(), data=st.data())
    def come(self, again: bool, data: st.DataObject) -> None:
        coming = {node for _, names in self.steps.values() for node in names} - self.present
        if coming:
            self.admit(data.draw(st.sampled_from(sorted(coming))), again)

    def admit(self, node: str, again: bool) -> None:
        admitted, actions = self.allocation.agent_connected(node, again, self.view)
        if admitted and node not in self.allocation.excluded:
            self.present.add(node)
            self.allocation.agent_ready(node)
        self.act(actions)

    @precondition(lambda self: self.present)
    @rule(silent=st.booleans(), data=st.data())
    def lose_agent(self, silent: bool, data: st.DataObject) -> None:
        self.lose(data.draw(st.sampled_from(sorted(self.present))), silent)

    def lose(self, node: str, silent: bool) -> None:
        self.present.discard(node)
        self.dismissed.discard(node)
        self.allocation.agent_lost(node, silent, self.view)

    @precondition(lambda self: self.dismissed)
    @rule()
    def end_dismissed_agents(self) -> None:
        for node in sorted(self.dismissed):
            self.lose(node, silent=False)

    @rule(node=nodes)
    def exclude(self, node: str) -> None:
        self.dismissed |= {node} & self.present
        self.allocation.excluded.append(node)

    # The run

    @rule(seconds=st.sampled_from([0.5, 6.0, 30.0]))
    def tick(self, seconds: float) -> None:
        self.clock += seconds
        self.act(self.allocation.check_agents(self.view))

    @precondition(lambda self: self.own_events)
    @rule(index=st.integers(0, 9))
    def pass_own_event(self, index: int) -> None:
        self.act(self.own_events.pop(index % len(self.own_events))[1]())

    @precondition(lambda self: self.held and self.clock > LATE_S)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.act(self.allocation.leaving(data.draw(st.sampled_from([0, *self.held.values()])), ""))

    @precondition(lambda self: self.leaving)
    @rule()
    def move(self) -> None:
        self.act(self.allocation.move(self.view))

    @precondition(lambda self: self.clock > LATE_S)
    @rule()
    def end_run(self) -> None:
        self.ending = True

    @precondition(lambda self: self.present)
    @rule(index=st.integers(0, 9))
    def lose_host(self, index: int) -> None:
        """Lose a host, which its srun does not notice, and let Slurm mark it down."""
        node = sorted(self.present)[index % len(self.present)]
        self.lose(node, silent=True)
        self.look_at_nodes({node}, set(), set())
        while self.own_events:
            self.pass_own_event(0)

    @rule(names=st.permutations(NODES))
    def all_goes_well(self, names: list[str]) -> None:
        """Let Slurm grant a request, and let agents connect from all nodes."""
        if self.waiting:
            self.grant(names, 0)
        self.tick(0.5)
        while self.probes:
            self.finish_probe(set(), 0)
        for node in sorted({node for _, nodes in self.steps.values() for node in nodes} - self.present):
            self.admit(node, again=False)

    # Invariants

    @invariant()
    def it_knows_what_slurm_has(self) -> None:
        assert {job.number for job in self.allocation.jobs} == {*self.waiting, *self.held}
        assert {step.number for step in self.allocation.jobs.steps} == {*self.steps}

    @invariant()
    def missing_nodes_are_requested(self) -> None:
        """Check that a run that is too small waits for a node, or asks for one as soon as it may."""
        if self.leaving or self.ending or not self.allocation.jobs.has_nodes:
            return
        self.act(self.allocation.check_agents(self.view))
        terms = self.allocation.terms
        if len(self.allocation.coming(self.view)) < terms.max_nodes + terms.spares and not self.waiting:
            assert self.allocation.refusals.why, "nobody asks for the missing node"

    @invariant()
    def run_that_continues_has_or_requests_a_job(self) -> None:
        if self.own is None and not self.ending:
            retries = [event for event, _ in self.own_events if isinstance(event, RequestNext)]
            assert self.waiting or self.held or retries, "the run waits for nothing"

    def teardown(self) -> None:
        """End the run. Everything that it holds must be released, and nothing more requested."""
        if not hasattr(self, "allocation"):
            return
        self.ending = True
        self.act(self.allocation.release_all(0))
        for probe in self.probes:
            self.act(self.allocation.nodes_probed(probe.number, probe.nodes, ALIVE, self.view))
        while self.own_events:
            self.act(self.own_events.pop()[1]())
        for late in (self.allocation.move, self.allocation.next_due, self.allocation.jobs_checked):
            self.act(late(self.view))
        assert not (self.held or self.waiting or self.steps or self.allocation.jobs), "something is left in Slurm"


TestAnyOrderOfNodes = AnyOrderOfNodes.TestCase
TestAnyOrderOfNodes.settings = settings(max_examples=500 if LONG else 25, stateful_step_count=50)
