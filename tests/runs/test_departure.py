"""Tests of when and how a run leaves nodes that its cloud takes back."""

from dataclasses import replace

import pytest

from dalsegno.runs.comment import JobRole
from dalsegno.runs.coordinator.generations.events import NodesReclaimed, NodesTaken
from dalsegno.runs.coordinator.nodes.allocation_actions import (
    ApplyEvent,
    CheckJobs,
    ReleaseJob,
    RequestJob,
    WidenNext,
    WriteJournal,
)
from dalsegno.runs.coordinator.nodes.departure import AVOID_S, LAST_S, SAVE_S, Departure, plan_departure
from dalsegno.runs.journal import RunEvent
from dalsegno.slurm.facts import NodeFlag
from dalsegno.wire.cloud_notice import SPOT_S, CloudNotice, NoticeKind
from tests.runs.test_allocation import IDLE, VIEW, granted, holding, of_kind, seen

NOW = VIEW.now
NOTICE = CloudNotice(NoticeKind.SPOT, NOW + 100)
TAKEN = replace(
    IDLE,
    name="n2",
    flags=frozenset({NodeFlag.DRAIN}),
    reason=f"dalsegno:drain:cloud-notice[{NOTICE.code}] {NOTICE.summary}",
)


def test_run_moves_at_once_if_other_nodes_are_ready():
    found = plan_departure({"n2": NOW + 100}, ["n1", "n2", "n3"], least=2, wanted=2, now=NOW)
    assert found == Departure(("n2",), 100 - LAST_S)


def test_run_trains_on_while_there_is_time_and_no_other_node():
    assert plan_departure({"n2": NOW + SAVE_S + 1}, ["n1", "n2"], least=2, wanted=2, now=NOW) is None


def test_run_without_other_nodes_saves_in_time_and_releases_its_nodes():
    found = plan_departure({"n2": NOW + SAVE_S}, ["n1", "n2"], least=2, wanted=2, now=NOW)
    assert found == Departure(("n2",), SAVE_S - LAST_S, reclaim=True)


def test_elastic_run_continues_with_fewer_nodes():
    found = plan_departure({"n2": NOW + 30}, ["n1", "n2"], least=1, wanted=2, now=NOW)
    assert found == Departure(("n2",), 30 - LAST_S)


def test_run_whose_nodes_are_all_taken_releases_them_even_if_it_is_elastic():
    until = {"n1": NOW + 30, "n2": NOW + 30}
    found = plan_departure(until, ["n1", "n2"], least=1, wanted=2, now=NOW)
    assert found is not None and found.reclaim and found.nodes == ("n1", "n2")


def test_job_ends_with_the_node_of_its_coordinator():
    nodes = ["n1", "n2", "n3"]
    assert plan_departure({"n1": NOW + 100}, nodes, least=2, wanted=2, now=NOW, home="n1") is None
    found = plan_departure({"n1": NOW + 20}, nodes, least=2, wanted=2, now=NOW, home="n1")
    assert found is not None and found.reclaim


def test_deadline_in_the_past_leaves_a_moment_to_save():
    found = plan_departure({"n2": NOW - 500}, ["n1", "n2", "n3"], least=2, wanted=2, now=NOW)
    assert found is not None and 0 < found.save_s < LAST_S


def test_nodes_of_others_and_lost_nodes_are_ignored():
    assert plan_departure({"n9": NOW}, ["n1", "n2"], least=2, wanted=2, now=NOW) is None


# Through the allocation


def test_notice_in_a_drain_reason_makes_the_run_save_before_it_leaves():
    allocation = holding("n1", "n2", "n3", spares=1)
    view = seen("n1", "n2", "n3")
    actions = allocation.nodes_seen([TAKEN], view)
    what = {"node": "n2", "kind": "spot", "deadline": NOTICE.deadline}
    assert WriteJournal(RunEvent.NOTICE, what) in actions
    (leave,) = of_kind(allocation.check_agents(view), ApplyEvent)
    why = CloudNotice(NoticeKind.SPOT, NOTICE.deadline).summary
    assert leave == ApplyEvent(NodesTaken({"n2": why}, 100 - LAST_S))
    assert of_kind(allocation.check_agents(view), ApplyEvent) == [], "it is reported once"
    assert of_kind(allocation.nodes_seen([TAKEN], view), WriteJournal) == []


def test_run_asks_for_another_node_while_it_still_trains_on_the_taken_one():
    allocation = holding("n1", "n2")
    allocation.nodes_seen([TAKEN], seen("n1", "n2"))
    actions = allocation.check_agents(seen("n1", "n2"))
    assert of_kind(actions, ApplyEvent) == []
    assert of_kind(actions, RequestJob) == [RequestJob(2, JobRole.JOIN, ("n2",), ("n1",))]
    late = seen("n1", "n2", now=NOW + 50)
    assert of_kind(allocation.check_agents(late), ApplyEvent, CheckJobs) == [
        ApplyEvent(NodesReclaimed(50 - LAST_S)),
        CheckJobs(),
    ]


def test_notice_that_an_agent_reads_counts_although_slurm_shows_the_node_in_service():
    allocation = holding("n1", "n2", "n3", spares=1)
    view = seen("n1", "n2", "n3")
    assert of_kind(allocation.notice_read("n2", NOTICE, view), WriteJournal)
    assert allocation.notice_read("n2", NOTICE, view) == [], "it is reported once"
    (leave,) = of_kind(allocation.check_agents(view), ApplyEvent)
    assert isinstance(leave, ApplyEvent) and isinstance(leave.event, NodesTaken)
    allocation.leave_for_repair("n2", view)
    without, in_service = seen("n1", "n3"), replace(IDLE, name="n2")
    allocation.nodes_seen([in_service], without)
    assert "n2" in allocation.lost_since, "its machine is not used again"
    allocation.nodes_seen([replace(in_service, slurmd_started_at=int(NOW) + 300)], without)
    assert "n2" not in allocation.lost_since, "the cloud has given it another machine"


def test_next_job_avoids_a_node_that_slurm_has_in_service_until_it_is_gone():
    allocation = holding("n1", "n2")
    allocation.notice_read("n2", NOTICE, seen("n1", "n2"))
    leaving = replace(VIEW, closing=True)
    asked, saved, widen = allocation.jobs_checked(leaving)
    assert asked == RequestJob(2, JobRole.NEXT, ("n2",)) and widen == WidenNext(100.0)
    gone = replace(leaving, now=NOW + 101)
    assert allocation.widen_next(gone) == [ReleaseJob(2), RequestJob(3, JobRole.NEXT), saved]
    assert of_kind(allocation.job_granted(3, granted(8, "n1", "n2"), gone), RequestJob) == []
    assert allocation.widen_next(gone) == [], "the job has started"


@pytest.mark.parametrize(("kind", "first_s"), [(NoticeKind.SPOT, SPOT_S), (NoticeKind.CAPACITY_BLOCK, 5000.0)])
def test_wrong_clock_of_the_head_does_not_give_a_spot_instance_more_time(kind: NoticeKind, first_s: float):
    allocation = holding("n1", "n2")
    allocation.notice_read("n2", CloudNotice(kind, NOW + 5000), seen("n1", "n2"))
    before, after = (seen("n1", "n2", now=NOW + first_s - SAVE_S + extra) for extra in (-1, 0))
    assert of_kind(allocation.check_agents(before), ApplyEvent) == []
    assert of_kind(allocation.check_agents(after), ApplyEvent) != []


def test_next_job_avoids_a_node_whose_machine_outlives_the_deadline():
    """With a controller that only observes, Slurm has the node in service until the cloud has taken the machine."""
    allocation = holding("n1", "n2")
    allocation.notice_read("n2", CloudNotice(NoticeKind.CAPACITY_BLOCK, NOW - 5), seen("n1", "n2"))
    asked, _, widen = allocation.jobs_checked(replace(VIEW, closing=True))
    assert asked == RequestJob(2, JobRole.NEXT, ("n2",)) and widen == WidenNext(AVOID_S)


def test_run_leaves_once_if_the_controller_drains_the_node_later():
    allocation = holding("n1", "n2", "n3", spares=1)
    view, end = seen("n1", "n2", "n3"), CloudNotice(NoticeKind.CAPACITY_BLOCK, NOW + 600)
    assert of_kind(allocation.notice_read("n2", end, view), WriteJournal)
    assert len(of_kind(allocation.check_agents(view), ApplyEvent)) == 1
    drained = replace(TAKEN, reason=f"dalsegno:drain:cloud-notice[{end.code}] {end.summary}")
    assert of_kind(allocation.nodes_seen([drained], view), WriteJournal) == [], "it is reported once"
    assert of_kind(allocation.check_agents(view), ApplyEvent) == [], "the run already leaves"
