"""What each fault of a drill cost, from what was noted when."""

from __future__ import annotations

from dalsegno.drill.story import DRAINED, KNOWN, RETURNED, Blow, Drill, DrillMark, Recovery, TrainedStep, TrainingStop


def steps(*each: tuple[float, int, int]) -> tuple[TrainedStep, ...]:
    """Time, number, generation."""
    return tuple(TrainedStep(at, step, 1.0, generation) for at, step, generation in each)


def drill(blows: tuple[Blow, ...], marks: tuple[DrillMark, ...] = (), done: tuple[TrainedStep, ...] = ()) -> Drill:
    return Drill(1, ("n1", "n2"), 0.0, 100.0, blows, marks, done)


def test_a_power_cut_is_timed_from_the_cut_to_the_node_s_return():
    blow = Blow(1, "power-off", "n1", 10.0)
    marks = (DrillMark(11.2, KNOWN, "n1"), DrillMark(11.5, DRAINED, "n1"), DrillMark(24.0, RETURNED, "n1"))
    done = steps((9.0, 0, 1), (9.9, 1, 1), (12.0, 1, 2), (12.2, 2, 2))
    (found,) = drill((blow,), marks, done).recoveries
    assert found == Recovery(blow, 11.2 - 10, 1.5, 2.0, 14.0, steps_lost=1)


def test_what_happened_to_other_nodes_or_before_is_not_its_doing():
    blow = Blow(1, "power-off", "n1", 10.0)
    marks = (DrillMark(9.0, KNOWN, "n1"), DrillMark(11.0, KNOWN, "n2"))
    assert drill((blow,), marks).recoveries == (Recovery(blow),)


def test_what_the_next_fault_of_the_same_node_brings_about_is_its_own():
    first, second = Blow(1, "power-off", "n1", 10.0), Blow(2, "power-off", "n1", 50.0)
    marks = (DrillMark(51.0, KNOWN, "n1"),)
    assert [each.known_s for each in drill((first, second), marks).recoveries] == [None, 1.0]


def test_a_blow_that_needs_no_mending_takes_nothing_from_the_one_before():
    first, second = Blow(1, "slurmd-dead", "n1", 10.0), Blow(2, "agent-dead", "n1", 15.0, stops=False, heals=False)
    marks = (DrillMark(12.0, DRAINED, "n1"), DrillMark(30.0, RETURNED, "n1"))
    assert [each.returned_s for each in drill((first, second), marks).recoveries] == [20.0, None]


def test_a_return_before_the_drain_is_not_its_return():
    blow = Blow(1, "xid", "n1", 10.0, stops=False)
    marks = (DrillMark(10.1, RETURNED, "n1"), DrillMark(11.0, DRAINED, "n1"), DrillMark(20.0, RETURNED, "n1"))
    (found,) = drill((blow,), marks).recoveries
    assert (found.drained_s, found.returned_s, found.resumed_s) == (1.0, 10.0, None)


def test_training_goes_on_when_a_later_generation_has_done_a_step():
    blow = Blow(1, "power-off", "n1", 10.0)
    done = steps((9.0, 5, 1), (13.0, 6, 2))
    assert drill((blow,), (), done).recoveries[0].resumed_s == 3.0


def test_while_the_old_generation_trains_on_nothing_stands_still():
    blow = Blow(1, "xid 79", "n1", 10.0)
    done = steps((9.0, 5, 1), (11.0, 6, 1), (14.0, 7, 1), (15.5, 8, 2))
    assert drill((blow,), (), done).recoveries[0].resumed_s == 1.5


def test_what_is_drained_is_known():
    blow = Blow(1, "xid 79", "n1", 10.0)
    assert drill((blow,), (DrillMark(12.0, DRAINED, "n1"),)).recoveries[0].known_s == 2.0


def test_steps_that_were_done_again_are_lost_and_counted_once():
    done = steps((1, 0, 1), (2, 1, 1), (3, 2, 1), (6, 1, 2), (7, 2, 2), (8, 3, 2))
    blows = (Blow(1, "worker-kill", "n1", 4.0), Blow(2, "worker-kill", "n1", 7.5))
    found = drill(blows, (), done)
    assert found.steps_lost == 2
    assert [each.steps_lost for each in found.recoveries] == [2, 0]


def test_it_is_survived_only_when_nothing_is_wrong():
    base = drill(())
    assert base.survived
    for wrong in ({"exit_code": 1}, {"orphans": 1}, {"exact": False}):
        assert not Drill(1, (), 0.0, 1.0, (), (), (), **wrong).survived  # type: ignore[arg-type]


def test_two_faults_of_one_node_have_the_return_that_mended_both():
    """slurmd dies, and before anything came of it the line is cut: the node is replaced once."""
    first, second = Blow(1, "slurmd-dead", "n1", 10.0, stops=False), Blow(2, "net-cut", "n1", 13.0)
    marks = (DrillMark(12.0, KNOWN, "n1"), DrillMark(14.0, DRAINED, "n1"), DrillMark(30.0, RETURNED, "n1"))
    one, two = drill((first, second), marks).recoveries
    assert (one.known_s, one.drained_s, one.returned_s) == (2.0, 4.0, 20.0)
    assert (two.known_s, two.drained_s, two.returned_s) == (1.0, 1.0, 17.0)


def test_a_fault_that_hits_a_node_which_is_drained_already_comes_back_with_it():
    first, second = Blow(1, "xid 79", "n1", 10.0), Blow(2, "slurmd-dead", "n1", 12.0, stops=False)
    marks = (DrillMark(11.0, DRAINED, "n1"), DrillMark(30.0, RETURNED, "n1"))
    assert [each.returned_s for each in drill((first, second), marks).recoveries] == [20.0, 18.0]
    mended = (*marks[:1], DrillMark(11.5, RETURNED, "n1"))
    assert drill((first, second), mended).recoveries[1].drained_s is None, "mended before, and not seen since"


def test_a_stop_that_no_fault_has_in_its_line_is_told_apart():
    blow = Blow(1, "net-cut", "n1", 10.0)
    done = steps((9.0, 5, 1), (13.0, 6, 2), (20.0, 9, 2), (29.5, 10, 3), (30.0, 11, 3))
    found = drill((blow,), (DrillMark(21.0, KNOWN, "n1", "the run misses it"),), done)
    assert found.recoveries[0].resumed_s == 3.0
    assert found.more_stops == (TrainingStop(blow, 10.0, 9.5, "n1: the run misses it"),)
    assert drill((blow,), (), done[:3]).more_stops == ()


def test_such_a_stop_is_told_with_the_fault_of_the_node_that_was_taken_and_not_with_the_last_one():
    first, last = Blow(1, "slurmd-dead", "n1", 10.0, stops=False), Blow(2, "agent-dead", "n2", 15.0, False, False)
    done = steps((9.0, 5, 1), (16.0, 9, 1), (20.0, 10, 2))
    (stop,) = drill((first, last), (DrillMark(15.5, DRAINED, "n1"),), done).more_stops
    assert stop == TrainingStop(first, 6.0, 4.0)
    assert drill((first, last), (), done).more_stops == (TrainingStop(last, 1.0, 4.0),), "nobody knows better"


def test_a_run_that_trains_on_to_its_end_has_not_stopped():
    """The controller may not mend the node now, and left it in service."""
    blow = Blow(1, "xid 79", "n1", 10.0)
    assert not drill((blow,), (), steps((9.0, 5, 1), (10.2, 6, 1), (12.0, 7, 1))).recoveries[0].stopped
    assert drill((blow,), (), steps((9.0, 5, 1), (10.2, 6, 1))).recoveries[0].stopped, "that one was under way"
    assert drill((blow,), (), steps((9.0, 5, 1), (11.0, 6, 1), (14.0, 7, 2))).recoveries[0].stopped


def test_nothing_is_told_of_the_time_in_which_nothing_came():
    blow = Blow(1, "xid 79", "n1", 10.0)
    assert drill((blow,), (DrillMark(12.0, KNOWN, "n1"),), steps((30.0, 1, 1))).told_until == 30.0
    assert drill(()).told_until == 100.0
