"""Tests of what each fault of a drill cost, computed from recorded times."""

from __future__ import annotations

from dalsegno.drill.impacts import Drill, DrillMark, DrillMarkKind, FaultImpact, Recovery, TrainedStep, TrainingStop


def steps(*each: tuple[float, int, int]) -> tuple[TrainedStep, ...]:
    """Return steps from time, number and generation."""
    return tuple(TrainedStep(at, step, 1.0, generation) for at, step, generation in each)


def drill(
    impacts: tuple[FaultImpact, ...], marks: tuple[DrillMark, ...] = (), done: tuple[TrainedStep, ...] = ()
) -> Drill:
    return Drill(1, ("n1", "n2"), 0.0, 100.0, impacts, marks, done)


def test_a_power_cut_is_timed_until_the_node_returns():
    impact = FaultImpact(1, "power-off", "n1", 10.0)
    marks = (
        DrillMark(11.2, DrillMarkKind.KNOWN, "n1"),
        DrillMark(11.5, DrillMarkKind.DRAINED, "n1"),
        DrillMark(24.0, DrillMarkKind.RETURNED, "n1"),
    )
    done = steps((9.0, 0, 1), (9.9, 1, 1), (12.0, 1, 2), (12.2, 2, 2))
    (found,) = drill((impact,), marks, done).recoveries
    assert found == Recovery(impact, 11.2 - 10, 1.5, 2.0, 14.0, steps_lost=1)


def test_earlier_marks_and_those_of_other_nodes_do_not_count():
    impact = FaultImpact(1, "power-off", "n1", 10.0)
    marks = (DrillMark(9.0, DrillMarkKind.KNOWN, "n1"), DrillMark(11.0, DrillMarkKind.KNOWN, "n2"))
    assert drill((impact,), marks).recoveries == (Recovery(impact),)


def test_marks_after_the_next_fault_of_a_node_belong_to_that_fault():
    first, second = FaultImpact(1, "power-off", "n1", 10.0), FaultImpact(2, "power-off", "n1", 50.0)
    marks = (DrillMark(51.0, DrillMarkKind.KNOWN, "n1"),)
    assert [each.known_s for each in drill((first, second), marks).recoveries] == [None, 1.0]


def test_a_fault_without_repair_takes_no_marks_from_the_one_before():
    first, second = (
        FaultImpact(1, "slurmd-dead", "n1", 10.0),
        FaultImpact(2, "agent-dead", "n1", 15.0, stops=False, needs_repair=False),
    )
    marks = (DrillMark(12.0, DrillMarkKind.DRAINED, "n1"), DrillMark(30.0, DrillMarkKind.RETURNED, "n1"))
    assert [each.returned_s for each in drill((first, second), marks).recoveries] == [20.0, None]


def test_a_return_before_the_drain_is_not_its_return():
    impact = FaultImpact(1, "xid", "n1", 10.0, stops=False)
    marks = (
        DrillMark(10.1, DrillMarkKind.RETURNED, "n1"),
        DrillMark(11.0, DrillMarkKind.DRAINED, "n1"),
        DrillMark(20.0, DrillMarkKind.RETURNED, "n1"),
    )
    (found,) = drill((impact,), marks).recoveries
    assert (found.drained_s, found.returned_s, found.resumed_s) == (1.0, 10.0, None)


def test_training_has_resumed_with_the_first_step_of_a_later_generation():
    impact = FaultImpact(1, "power-off", "n1", 10.0)
    done = steps((9.0, 5, 1), (13.0, 6, 2))
    assert drill((impact,), (), done).recoveries[0].resumed_s == 3.0


def test_time_in_which_the_old_generation_trains_is_not_a_stop():
    impact = FaultImpact(1, "xid 79", "n1", 10.0)
    done = steps((9.0, 5, 1), (11.0, 6, 1), (14.0, 7, 1), (15.5, 8, 2))
    assert drill((impact,), (), done).recoveries[0].resumed_s == 1.5


def test_a_drained_fault_counts_as_known():
    impact = FaultImpact(1, "xid 79", "n1", 10.0)
    assert drill((impact,), (DrillMark(12.0, DrillMarkKind.DRAINED, "n1"),)).recoveries[0].known_s == 2.0


def test_repeated_steps_are_lost_and_counted_once():
    done = steps((1, 0, 1), (2, 1, 1), (3, 2, 1), (6, 1, 2), (7, 2, 2), (8, 3, 2))
    impacts = (FaultImpact(1, "worker-kill", "n1", 4.0), FaultImpact(2, "worker-kill", "n1", 7.5))
    found = drill(impacts, (), done)
    assert found.steps_lost == 2
    assert [each.steps_lost for each in found.recoveries] == [2, 0]


def test_a_drill_is_survived_only_without_any_failure():
    base = drill(())
    assert base.survived
    for wrong in ({"exit_code": 1}, {"orphans": 1}, {"exact": False}):
        assert not Drill(1, (), 0.0, 1.0, (), (), (), **wrong).survived  # type: ignore[arg-type]


def test_two_faults_of_one_node_share_the_return_that_repaired_both():
    """slurmd dies, and the network is cut before the node is drained. The node is replaced only once."""
    first, second = FaultImpact(1, "slurmd-dead", "n1", 10.0, stops=False), FaultImpact(2, "net-cut", "n1", 13.0)
    marks = (
        DrillMark(12.0, DrillMarkKind.KNOWN, "n1"),
        DrillMark(14.0, DrillMarkKind.DRAINED, "n1"),
        DrillMark(30.0, DrillMarkKind.RETURNED, "n1"),
    )
    one, two = drill((first, second), marks).recoveries
    assert (one.known_s, one.drained_s, one.returned_s) == (2.0, 4.0, 20.0)
    assert (two.known_s, two.drained_s, two.returned_s) == (1.0, 1.0, 17.0)


def test_a_fault_of_a_drained_node_shares_its_return():
    first, second = FaultImpact(1, "xid 79", "n1", 10.0), FaultImpact(2, "slurmd-dead", "n1", 12.0, stops=False)
    marks = (DrillMark(11.0, DrillMarkKind.DRAINED, "n1"), DrillMark(30.0, DrillMarkKind.RETURNED, "n1"))
    assert [each.returned_s for each in drill((first, second), marks).recoveries] == [20.0, 18.0]
    repaired = (*marks[:1], DrillMark(11.5, DrillMarkKind.RETURNED, "n1"))
    assert drill((first, second), repaired).recoveries[1].drained_s is None, "repaired before, and not drained since"


def test_a_stop_that_is_not_the_direct_effect_of_a_fault_is_listed():
    impact = FaultImpact(1, "net-cut", "n1", 10.0)
    done = steps((9.0, 5, 1), (13.0, 6, 2), (20.0, 9, 2), (29.5, 10, 3), (30.0, 11, 3))
    found = drill((impact,), (DrillMark(21.0, DrillMarkKind.KNOWN, "n1", "lost by the run"),), done)
    assert found.recoveries[0].resumed_s == 3.0
    assert found.more_stops == (TrainingStop(impact, 10.0, 9.5, "n1: lost by the run"),)
    assert drill((impact,), (), done[:3]).more_stops == ()


def test_a_further_stop_is_attributed_to_the_fault_of_the_drained_node():
    first, last = (
        FaultImpact(1, "slurmd-dead", "n1", 10.0, stops=False),
        FaultImpact(2, "agent-dead", "n2", 15.0, False, False),
    )
    done = steps((9.0, 5, 1), (16.0, 9, 1), (20.0, 10, 2))
    (stop,) = drill((first, last), (DrillMark(15.5, DrillMarkKind.DRAINED, "n1"),), done).more_stops
    assert stop == TrainingStop(first, 6.0, 4.0)
    assert drill((first, last), (), done).more_stops == (TrainingStop(last, 1.0, 4.0),), (
        "without a drain, the last fault"
    )


def test_a_run_that_trains_until_its_end_has_not_stopped():
    """The controller may not repair the node now and has left it in service."""
    impact = FaultImpact(1, "xid 79", "n1", 10.0)
    assert not drill((impact,), (), steps((9.0, 5, 1), (10.2, 6, 1), (12.0, 7, 1))).recoveries[0].stopped
    assert drill((impact,), (), steps((9.0, 5, 1), (10.2, 6, 1))).recoveries[0].stopped, "that step was in progress"
    assert drill((impact,), (), steps((9.0, 5, 1), (11.0, 6, 1), (14.0, 7, 2))).recoveries[0].stopped


def test_the_timeline_ends_with_the_last_event():
    impact = FaultImpact(1, "xid 79", "n1", 10.0)
    assert drill((impact,), (DrillMark(12.0, DrillMarkKind.KNOWN, "n1"),), steps((30.0, 1, 1))).last_event_at == 30.0
    assert drill(()).last_event_at == 100.0
