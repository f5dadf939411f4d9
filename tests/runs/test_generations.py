"""The state machine of a run, by examples and then in any order of events."""

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule

from dalsegno.runs.coordinator.generations.causes import Failure, read_failure
from dalsegno.runs.coordinator.generations.events import (
    AgentGone,
    AgentJoined,
    Cancelled,
    Event,
    Exclude,
    Finish,
    GatherTimeout,
    GenerationStopped,
    Hung,
    NodesOutOfService,
    NodesReclaimed,
    NodesTaken,
    OpenStore,
    Order,
    PauseOver,
    ReleaseNodes,
    RunMoved,
    SaveGeneration,
    SaveOverdue,
    Start,
    StopGeneration,
    StoreOpened,
    Wait,
    WorkerEnded,
)
from dalsegno.runs.coordinator.generations.generations import FORGIVEN_S, GenerationPhase, Run, advance
from dalsegno.runs.coordinator.generations.group import Shape, form_group
from dalsegno.runs.status import RunCause

TWO = Shape(2, 2, 1)


def play(run: Run, *events: Event) -> tuple[Run, list[Order]]:
    orders: list[Order] = []
    for event in events:
        run, more = advance(run, event)
        orders += more
    return run, orders


def running(shape: Shape = TWO, *agents: str, **more: object) -> Run:
    names = agents or ("a", "b")
    run, _ = play(Run(shape, **more), *(AgentJoined(agent) for agent in names), StoreOpened(names[0], 1, 5000))  # type: ignore[arg-type]
    assert run.phase is GenerationPhase.RUNNING
    return run


def fault(
    message: str = "ValueError: bad batch", rank: int = 1, node: str = "b", code: int = 1, line: int = 7
) -> Failure:
    text = f'Traceback (most recent call last):\n  File "/home/ada/train.py", line {line}, in step\n{message}'
    return read_failure(rank, node, code, text if code > 0 else "")


def test_members_keep_their_ranks_and_free_ranks_go_to_nodes_in_service_first():
    run, orders = play(
        running(TWO, "a", "b"),
        AgentJoined("c"),
        AgentJoined("d"),
        NodesOutOfService(frozenset({"a", "c"})),
        AgentGone("b"),
    )
    assert orders == [StopGeneration("a", 1)] and run.phase is GenerationPhase.STOPPING
    run, _ = play(run, GenerationStopped("a", 1))
    assert run.group is not None and run.group.agents == ("a", "d")
    run, _ = play(run, StoreOpened("a", 2, 5000), AgentGone("d"), GenerationStopped("a", 2))
    assert run.group is not None and run.group.agents == ("a", "c"), "if there is no other node"


NOISE = "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:4211"


def ended(run: Run, failure: Failure, age_s: float = 60.0) -> WorkerEnded:
    return WorkerEnded(failure.node, run.generation, failure.rank, failure.code, failure, age_s)


def all_stopped(run: Run, **failures: tuple[Failure, ...]) -> list[Event]:
    return [GenerationStopped(agent, run.generation, failures.get(agent, ())) for agent in sorted(run.waiting_for)]


def fail(run: Run, failure: Failure, age_s: float = 60.0) -> tuple[Run, list[Order]]:
    """Let one generation fail and stop; return the orders that follow."""
    run, _ = play(run, ended(run, failure, age_s))
    return play(run, *all_stopped(run))


def restart(run: Run, failure: Failure, age_s: float = 60.0) -> Run:
    """Let one generation fail, and return the run with the next one running."""
    run, _ = fail(run, failure, age_s)
    run, _ = play(run, *([PauseOver()] if run.pausing else []))
    run, _ = play(run, StoreOpened("a", run.generation, 1))
    assert run.phase is GenerationPhase.RUNNING
    return run


def test_generation_forms_with_all_agents_and_starts_when_its_store_is_open():
    run, orders = play(Run(TWO), AgentJoined("a"))
    assert orders == []
    run, orders = play(run, AgentJoined("b"))
    assert orders == [OpenStore("a", 1)]
    _, orders = play(run, StoreOpened("a", 1, 4321))
    assert [(order.agent, order.store_port) for order in orders if isinstance(order, Start)] == [
        ("a", 4321),
        ("b", 4321),
    ]


def test_run_succeeds_when_all_workers_are_done():
    run, orders = play(
        running(),
        WorkerEnded("a", 1, 0, 0),
        WorkerEnded("b", 1, 1, 0),
        GenerationStopped("a", 1),
        GenerationStopped("b", 1),
    )
    assert (run.phase, orders[-1]) == (GenerationPhase.ENDED, Finish(0))


def test_dead_worker_ends_the_generation_everywhere_and_the_next_one_forms():
    run, orders = play(running(), WorkerEnded("b", 1, 1, -9))
    assert orders == [StopGeneration("a", 1), StopGeneration("b", 1)]
    run, orders = play(run, GenerationStopped("a", 1))
    assert orders == []
    run, orders = play(run, GenerationStopped("b", 1))
    assert orders == [OpenStore("a", 2)] and run.restarts == 1


def test_run_ends_with_the_workers_code_after_too_many_failures():
    _, orders = play(
        running(max_restarts=0), WorkerEnded("b", 1, 1, 3), GenerationStopped("a", 1), GenerationStopped("b", 1)
    )
    why = "rank 1 on b ended with exit code 3, and no restart was requested"
    assert orders[-1] == Finish(3, read_failure(1, "b", 3), why)
    _, orders = play(
        running(max_restarts=0), WorkerEnded("b", 1, 1, -9), GenerationStopped("a", 1), GenerationStopped("b", 1)
    )
    why = "rank 1 on b was ended by SIGKILL, and no restart was requested"
    assert orders[-1] == Finish(137, read_failure(1, "b", -9), why)


@pytest.mark.parametrize(("most", "said"), [(1, "1 restart"), (2, "2 restarts")])
def test_repeated_kills_end_the_run_when_its_restarts_are_used_up(most: int, said: str):
    run = running(max_restarts=most)
    for _ in range(most):
        run = restart(run, fault(code=-9))
    run, orders = fail(run, fault(code=-9))
    assert orders == [Finish(137, fault(code=-9), f"rank 1 on b was ended by SIGKILL, after {said}")]


def test_same_traceback_twice_in_a_row_ends_the_run():
    run = restart(running(), fault("ValueError: bad batch 17", rank=0, node="a"))
    again = fault("ValueError: bad batch 91", rank=1, node="b")
    run, orders = fail(run, again)
    why = "rank 1 on b failed: ValueError: bad batch 91, the same failure as before; restarting would not help"
    assert (run.phase, orders) == (GenerationPhase.ENDED, [Finish(1, again, why)])


def test_different_traceback_is_a_different_fault():
    run = restart(running(), fault(line=7))
    run, orders = fail(run, fault(line=8))
    assert orders == [OpenStore("a", 3)]


def test_errors_about_lost_peers_are_not_the_cause():
    run = running(max_restarts=0)
    real = fault(rank=0, node="a")
    run, _ = play(run, ended(run, fault(NOISE)), ended(run, real))
    _, orders = play(run, *all_stopped(run))
    assert isinstance(orders[0], Finish) and orders[0].cause == real


def test_cause_may_arrive_with_the_stop_report():
    run = running(max_restarts=0)
    real = fault(rank=0, node="a")
    run, _ = play(run, ended(run, fault(NOISE)))
    _, orders = play(run, *all_stopped(run, a=(real,)))
    assert isinstance(orders[0], Finish) and orders[0].cause == real


def test_repeated_noise_is_not_a_bug():
    run = running(max_restarts=5)
    for _ in range(4):
        run = restart(run, fault(NOISE))
    assert run.restarts == 4


def test_script_can_refuse_a_restart():
    run, orders = fail(running(), fault(code=93))
    assert (run.phase, orders[0].code if isinstance(orders[0], Finish) else orders) == (GenerationPhase.ENDED, 93)


def test_script_can_refuse_a_restart_while_leaving():
    run = running()
    run, orders = play(run, NodesReclaimed(), ended(run, fault(code=93)), WorkerEnded("a", 1, 0, 75))
    _, more = play(run, *all_stopped(run))
    assert [order.code for order in [*orders, *more] if isinstance(order, Finish)] == [93]


def test_run_ends_as_saved_when_all_workers_saved():
    run, orders = play(running(), WorkerEnded("a", 1, 0, 75), WorkerEnded("b", 1, 1, 75))
    run, orders = play(run, *all_stopped(run))
    assert orders == [Finish(75)]


def test_run_ends_as_saved_when_one_worker_saved():
    run, _ = play(running(), WorkerEnded("a", 1, 0, 75), WorkerEnded("b", 1, 1, 0))
    assert play(run, *all_stopped(run))[1] == [Finish(75)]


def test_errors_about_a_lost_node_cost_no_restart():
    run = running(TWO, "a", "b", "spare", max_restarts=0)
    run, _ = play(run, AgentGone("a"), ended(run, fault(NOISE)))
    run, orders = play(run, *all_stopped(run))
    assert (orders, run.restarts, run.lost_member) == ([OpenStore("spare", 2)], 0, False)


def test_error_before_the_detected_loss_costs_no_restart():
    run = running(TWO, "a", "b", "spare", max_restarts=0)
    run, _ = play(run, ended(run, fault(NOISE)), AgentGone("a"))
    run, orders = play(run, *all_stopped(run))
    assert (orders, run.restarts) == ([OpenStore("spare", 2)], 0)


def test_real_fault_beside_a_lost_node_costs_a_restart():
    run = running(TWO, "a", "b", "spare")
    run, _ = play(run, AgentGone("a"), ended(run, fault()))
    run, _ = play(run, *all_stopped(run))
    assert run.restarts == 1


def test_loss_of_a_spare_excuses_no_failure():
    run = running(TWO, "a", "b", "spare")
    run, _ = play(run, ended(run, fault(NOISE)), AgentGone("spare"))
    run, _ = play(run, *all_stopped(run))
    assert run.restarts == 1


def test_errors_while_a_run_grows_cost_no_restart():
    run = running(Shape(1, 3, 1), "a", "b", "c", max_restarts=0)
    run, _ = play(run, AgentGone("c"))
    run, _ = play(run, *all_stopped(run))
    run, _ = play(run, StoreOpened("a", 2, 1), AgentJoined("d"), ended(run, fault(NOISE)))
    run, orders = play(run, *all_stopped(run))
    assert (orders, run.restarts) == ([OpenStore("a", 3)], 0)


def test_second_immediate_failure_causes_a_pause():
    run = restart(running(), fault(line=1), age_s=2.0)
    run, orders = fail(run, fault(line=2), age_s=2.0)
    assert (run.phase, orders) == (GenerationPhase.GATHERING, [Wait(1.0)])
    run, orders = play(run, AgentJoined("c"), AgentGone("c"), AgentJoined("d"), GatherTimeout())
    assert orders == [], "nothing forms during the pause"
    assert play(run, PauseOver())[1] == [OpenStore("a", 3)]


def test_late_failure_is_not_an_immediate_one():
    run = restart(running(), fault(line=1), age_s=300.0)
    assert fail(run, fault(line=2), age_s=2.0)[1] == [OpenStore("a", 3)]


def test_killed_worker_is_replaced_without_a_pause():
    run = restart(running(), fault(code=-9), age_s=1.0)
    assert fail(run, fault(code=-9), age_s=1.0)[1] == [OpenStore("a", 3)]


def test_long_generation_restores_the_restart_budget():
    run = running(max_restarts=1)
    for _ in range(5):
        run = restart(run, fault(code=-9), age_s=FORGIVEN_S)
    assert (run.restarts, run.spent) == (5, 1)
    assert isinstance(fail(run, fault(code=-9), age_s=FORGIVEN_S - 1)[1][0], Finish)


def test_node_is_excluded_after_two_crashes_in_a_row():
    run = restart(running(TWO, "a", "b", "spare"), fault(code=-11))
    run, orders = fail(run, fault(code=-11))
    assert orders == [Exclude("b"), OpenStore("a", 3)]
    assert run.group is not None and run.group.agents == ("a", "spare") and "b" not in run.ready


def test_node_out_of_service_is_excluded_until_it_is_repaired():
    run, orders = fail(running(TWO, "a", "b", "spare"), replace(fault(code=-9), healthy=False))
    (left,) = [order for order in orders if isinstance(order, Exclude)]
    assert (left.agent, left.until_repaired) == ("b", True) and "b" not in run.ready


@pytest.mark.parametrize("first", [fault(code=-9), fault(code=-11, node="a", rank=0), fault(NOISE)])
def test_node_is_not_excluded_for_lesser_failures(first: Failure):
    run = restart(running(TWO, "a", "b", "spare"), first)
    assert fail(run, fault(code=-11))[1] == [OpenStore("a", 3)]


def test_leaving_waits_for_all_workers_then_releases_the_nodes():
    run, orders = play(running(), NodesReclaimed(), WorkerEnded("a", 1, 0, 75))
    assert orders == []
    run, orders = play(run, WorkerEnded("b", 1, 1, -15))
    assert orders == [StopGeneration("a", 1), StopGeneration("b", 1)]
    run, orders = play(run, *all_stopped(run))
    assert (run.phase, run.restarts, orders) == (GenerationPhase.GATHERING, 0, [ReleaseNodes()])


@pytest.mark.parametrize("codes", [(-15, 0), (0, -15), (1, 0), (75, 0), (0, 143)])
def test_leaving_with_unfinished_workers_is_not_success(codes: tuple[int, int]):
    run = running()
    run, _ = play(run, NodesReclaimed(), *(WorkerEnded("ab"[rank], 1, rank, code) for rank, code in enumerate(codes)))
    assert play(run, *all_stopped(run))[1] == [ReleaseNodes()]


def test_run_that_finishes_while_leaving_is_done():
    run, _ = play(running(), NodesReclaimed(), WorkerEnded("a", 1, 0, 0), WorkerEnded("b", 1, 1, 0))
    assert play(run, *all_stopped(run))[1] == [Finish(0)]


def test_agents_that_end_before_their_workers_release_the_nodes_too():
    run, orders = play(running(), NodesReclaimed(), AgentGone("a"))
    assert orders == [StopGeneration("b", 1)]
    assert play(run, AgentGone("b"))[1] == [ReleaseNodes()]


def test_leaving_without_a_signal_of_slurm_orders_the_workers_to_save():
    run, orders = play(running(), NodesReclaimed(save_s=20.0))
    assert orders == [SaveGeneration(("a", "b"), 1, 20.0)]
    assert play(run, SaveOverdue(1))[1] == [StopGeneration("a", 1), StopGeneration("b", 1)]


TAKEN = NodesTaken({"b": "the cloud takes it"}, 20.0)
LEAVE_B = Exclude("b", "the cloud takes it", until_repaired=True)


def test_workers_save_before_the_run_leaves_a_node_and_the_spare_takes_its_rank():
    run, orders = play(running(TWO, "a", "b", "spare"), TAKEN)
    assert orders == [SaveGeneration(("a", "b"), 1, 20.0)] and run.phase is GenerationPhase.RUNNING
    assert play(run, TAKEN)[1] == [], "they get the order once"
    run, orders = play(run, WorkerEnded("a", 1, 0, 75), WorkerEnded("b", 1, 1, 75))
    assert orders == [StopGeneration("a", 1), StopGeneration("b", 1)]
    run, orders = play(run, *all_stopped(run))
    assert orders == [LEAVE_B, OpenStore("a", 2)]
    assert run.group is not None and run.group.agents == ("a", "spare")
    assert (run.restarts, run.spent, dict(run.taken)) == (0, 0, {})


def test_workers_that_do_not_save_in_time_are_stopped_and_the_run_moves():
    run, orders = play(running(TWO, "a", "b", "spare"), TAKEN, SaveOverdue(1))
    assert orders[1:] == [StopGeneration("a", 1), StopGeneration("b", 1)]
    assert play(run, *all_stopped(run))[1] == [LEAVE_B, OpenStore("a", 2)]


def test_time_to_save_has_no_effect_after_the_move():
    run, _ = play(running(TWO, "a", "b", "spare"), TAKEN, SaveOverdue(1))
    run, _ = play(run, *all_stopped(run), StoreOpened("a", 2, 5000))
    assert play(run, SaveOverdue(1), SaveOverdue(2))[1] == []


def test_run_that_finishes_while_it_should_save_is_done():
    run, _ = play(running(TWO, "a", "b", "spare"), TAKEN, WorkerEnded("a", 1, 0, 0), WorkerEnded("b", 1, 1, 0))
    assert play(run, *all_stopped(run))[1] == [Finish(0)]


def test_spare_that_is_taken_is_left_without_a_save():
    run, orders = play(running(TWO, "a", "b", "spare"), NodesTaken({"spare": "the cloud takes it"}, 20.0))
    assert orders == [Exclude("spare", "the cloud takes it", until_repaired=True)]
    assert run.phase is GenerationPhase.RUNNING and run.ready == ("a", "b")


def test_node_that_is_taken_while_a_generation_stops_does_not_join_the_next_one():
    run, orders = play(running(TWO, "a", "b", "spare"), ended(running(), fault(code=-9)), TAKEN)
    assert orders == [StopGeneration("a", 1), StopGeneration("b", 1)]
    run, orders = play(run, *all_stopped(run))
    assert orders == [LEAVE_B, OpenStore("a", 2)]


def test_run_that_loses_all_nodes_while_it_saves_releases_them():
    run, orders = play(running(TWO, "a", "b", "spare"), TAKEN, NodesReclaimed(save_s=5.0))
    assert orders == [SaveGeneration(("a", "b"), 1, 20.0)], "they save already"
    run, _ = play(run, WorkerEnded("a", 1, 0, 75), WorkerEnded("b", 1, 1, 75))
    assert play(run, *all_stopped(run))[1] == [ReleaseNodes()]


def test_generations_continue_in_another_job_after_a_move():
    run, _ = play(running(), NodesReclaimed(), WorkerEnded("a", 1, 0, 75), WorkerEnded("b", 1, 1, 75))
    run, _ = play(run, *all_stopped(run), AgentGone("a"), AgentGone("b"))
    run, orders = play(run, AgentJoined("x"), AgentJoined("y"))
    assert orders == [], "only after the move"
    run, orders = play(run, RunMoved())
    assert (orders, run.generation) == ([OpenStore("x", 2)], 2)


def test_leaving_while_a_generation_forms_cancels_it():
    run, orders = play(
        Run(TWO),
        AgentJoined("a"),
        AgentJoined("b"),
        NodesReclaimed(),
        GenerationStopped("a", 1),
        GenerationStopped("b", 1),
    )
    assert orders == [OpenStore("a", 1), StopGeneration("a", 1), StopGeneration("b", 1), ReleaseNodes()]
    assert play(run, StoreOpened("a", 1, 1)) == (run, [])


def test_leaving_while_nothing_runs_releases_at_once():
    assert play(Run(TWO), AgentJoined("a"), NodesReclaimed())[1] == [ReleaseNodes()]


def test_second_order_to_leave_has_no_effect():
    _, orders = play(Run(TWO), AgentJoined("a"), NodesReclaimed(), NodesReclaimed())
    assert orders == [ReleaseNodes()]


def test_fault_before_a_move_does_not_count_after_it():
    run = running()
    run, _ = play(run, ended(run, fault()), NodesReclaimed())
    run, _ = play(
        run,
        *all_stopped(run),
        AgentGone("a"),
        AgentGone("b"),
        AgentJoined("x"),
        AgentJoined("y"),
        AgentJoined("z"),
        RunMoved(),
    )
    run, _ = play(run, StoreOpened("x", 2, 1), AgentGone("y"))
    run, orders = play(run, *all_stopped(run))
    assert (orders, run.restarts) == ([OpenStore("x", 3)], 0)


def test_hanging_run_restarts():
    run, orders = play(running(), Hung(1, "no step for 600 s"))
    assert orders == [StopGeneration("a", 1), StopGeneration("b", 1)]
    run, orders = play(run, *all_stopped(run))
    assert (orders, run.restarts) == ([OpenStore("a", 2)], 1)
    assert run.last is not None and run.last.sentence() == "rank 0 on a ended: no step for 600 s"


def test_run_that_hangs_every_time_ends():
    run = running(max_restarts=2)
    for _ in range(2):
        run, _ = play(run, Hung(run.generation, "no step for 60 s"))
        run, _ = play(run, *all_stopped(run))
        run, _ = play(run, StoreOpened("a", run.generation, 1))
    run, _ = play(run, Hung(run.generation, "no step for 60 s"))
    assert [type(order) for order in play(run, *all_stopped(run))[1]] == [Finish]


def test_hang_of_an_old_generation_is_ignored():
    run = restart(running(), fault())
    assert play(run, Hung(1, "no step")) == (run, [])


CANCELLED = Finish(143, why="cancelled", about=RunCause.CANCELLED)


def test_run_can_be_cancelled_while_gathering():
    assert play(Run(TWO), AgentJoined("a"), Cancelled())[1] == [CANCELLED]


def test_run_can_be_cancelled_while_its_store_opens():
    run, orders = play(Run(TWO), AgentJoined("a"), AgentJoined("b"), Cancelled())
    assert orders[1:] == [StopGeneration("a", 1), StopGeneration("b", 1)]
    assert play(run, *all_stopped(run))[1] == [CANCELLED]


def test_run_can_be_cancelled_while_a_generation_stops():
    run = running()
    run, _ = play(run, ended(run, fault()), Cancelled())
    assert play(run, *all_stopped(run))[1] == [CANCELLED]


def test_run_can_be_cancelled_during_a_pause():
    run = restart(running(), fault(line=1), age_s=1.0)
    run, _ = fail(run, fault(line=2), age_s=1.0)
    assert run.pausing and play(run, Cancelled())[1] == [CANCELLED]


def test_run_can_be_cancelled_while_leaving():
    run, _ = play(running(), NodesReclaimed(), Cancelled())
    assert play(run, *all_stopped(run))[1] == [CANCELLED]


def test_ended_run_ignores_events():
    run, _ = play(Run(TWO), Cancelled())
    for event in (
        AgentJoined("a"),
        AgentGone("a"),
        Cancelled(),
        NodesReclaimed(),
        RunMoved(),
        PauseOver(),
        GatherTimeout(),
        Hung(0, ""),
    ):
        assert advance(run, event) == (run, [])


def test_spare_takes_the_rank_of_a_lost_node_without_a_restart():
    run = running(TWO, "a", "b", "spare")
    run, orders = play(run, AgentGone("a"), GenerationStopped("b", 1))
    assert orders == [StopGeneration("b", 1), OpenStore("spare", 2)]
    assert run.group is not None and run.group.agents == ("spare", "b") and run.restarts == 0


def test_lost_node_without_a_spare_waits_for_one_that_joins():
    run, orders = play(running(), AgentGone("b"), GenerationStopped("a", 1))
    assert (run.phase, orders) == (GenerationPhase.GATHERING, [StopGeneration("a", 1)])
    run, orders = play(run, AgentJoined("c"))
    assert orders == [OpenStore("a", 2)]


def test_elastic_run_continues_smaller_and_grows_back():
    run = running(Shape(1, 2, 1))
    run, _ = play(run, AgentGone("b"), GenerationStopped("a", 1), StoreOpened("a", 2, 1))
    assert run.group is not None and run.group.world_size == 1
    run, orders = play(run, AgentJoined("c"))
    assert orders == [StopGeneration("a", 2)]
    run, _ = play(run, GenerationStopped("a", 2), StoreOpened("a", 3, 1))
    assert run.group is not None and run.group.agents == ("a", "c")


def test_elastic_run_starts_small_only_after_the_wait():
    run, orders = play(Run(Shape(1, 2, 1)), AgentJoined("a"))
    assert orders == []
    _, orders = play(run, GatherTimeout())
    assert orders == [OpenStore("a", 1)]


def test_elastic_run_that_lost_all_agents_waits_for_all_again():
    run, _ = play(running(Shape(1, 2, 1)), AgentGone("a"), AgentGone("b"))
    run, orders = play(run, AgentJoined("c"))
    assert orders == [], "one of two has returned, and the other may follow"
    run, orders = play(run, AgentJoined("d"))
    assert orders == [OpenStore("c", 2)]


def test_messages_about_an_old_generation_are_ignored():
    run, _ = play(
        running(),
        WorkerEnded("b", 1, 1, 1),
        GenerationStopped("a", 1),
        GenerationStopped("b", 1),
        StoreOpened("a", 2, 1),
    )
    assert play(run, WorkerEnded("a", 1, 0, 1), GenerationStopped("a", 1), StoreOpened("a", 1, 7)) == (run, [])


def test_cancelled_run_stops_everything_and_ends():
    _, orders = play(running(), Cancelled(), GenerationStopped("a", 1), GenerationStopped("b", 1))
    assert orders == [StopGeneration("a", 1), StopGeneration("b", 1), CANCELLED]


def test_node_lost_while_the_store_opens_is_replaced():
    _, orders = play(
        Run(TWO), AgentJoined("a"), AgentJoined("b"), AgentJoined("c"), AgentGone("a"), GenerationStopped("b", 1)
    )
    assert orders[-1] == OpenStore("c", 2)


def test_survivors_keep_their_ranks_and_a_smaller_group_fills_gaps():
    group = form_group(2, Shape(1, 3, 2), ["c", "a", "x"], before=["a", "b", "c"])
    assert group is not None and [(p.agent, p.first_rank) for p in group.places] == [("a", 0), ("x", 2), ("c", 4)]
    smaller = form_group(2, Shape(1, 3, 2), ["c", "a"], before=["a", "b", "c"])
    assert smaller is not None and smaller.agents == ("a", "c") and smaller.world_size == 4


class AnyOrder(RuleBasedStateMachine):
    """Agents that execute orders late, die at any moment, and join. The machine must keep its invariants."""

    agents = Bundle("agents")

    @initialize(least=st.integers(1, 3), more=st.integers(0, 2), nproc=st.integers(1, 2))
    def begin(self, least: int, more: int, nproc: int) -> None:
        self.run = Run(Shape(least, least + more, nproc), max_restarts=5)
        self.count = 0
        self.alive: set[str] = set()
        self.cold: set[str] = set()  # alive but without a warm parent
        self.workers: dict[str, int] = {}  # agent -> generation of its workers
        self.inbox: list[OpenStore | Start | StopGeneration] = []
        self.released = False
        self.finished = 0

    def tell(self, event: Event) -> None:
        before = self.run.generation
        self.run, orders = advance(self.run, event)
        assert before <= self.run.generation <= before + 1
        self.inbox += [order for order in orders if isinstance(order, OpenStore | Start | StopGeneration)]
        self.finished += sum(isinstance(order, Finish) for order in orders)
        for order in orders:
            if isinstance(order, ReleaseNodes):
                assert not self.workers.keys() & set(self.run.ready), "released while something ran"
                self.released = True
            elif isinstance(order, Exclude):
                self.leave(order.agent)

    def leave(self, agent: str) -> None:
        self.alive.discard(agent)
        self.cold.discard(agent)
        self.workers.pop(agent, None)

    @rule(target=agents)
    def join(self) -> str:
        self.count += 1
        agent = f"n{self.count}"
        self.alive.add(agent)
        self.tell(AgentJoined(agent))
        return agent

    @rule(agent=agents)
    def die(self, agent: str) -> None:
        self.leave(agent)
        self.tell(AgentGone(agent))

    @rule(agent=agents)
    def join_again(self, agent: str) -> None:
        if agent in self.alive - self.cold:
            self.tell(AgentJoined(agent))

    @rule(agent=agents)
    def grow_cold(self, agent: str) -> None:
        """Kill an agent's warm parent, and with it its workers. The agent stays."""
        if agent in self.alive:
            self.workers.pop(agent, None)
            self.cold.add(agent)
            self.inbox = [order for order in self.inbox if order.agent != agent]
            self.tell(AgentGone(agent))

    @precondition(lambda self: bool(self.cold))
    @rule(data=st.data())
    def grow_warm(self, data: st.DataObject) -> None:
        agent = data.draw(st.sampled_from(sorted(self.cold)))
        self.cold.discard(agent)
        self.tell(AgentJoined(agent))

    @precondition(lambda self: bool(self.inbox))
    @rule(data=st.data())
    def obey(self, data: st.DataObject) -> None:
        """Let an agent execute its next order. Orders to different agents may interleave."""
        agent = data.draw(st.sampled_from(self.inbox)).agent
        self.obey_next(next(order for order in self.inbox if order.agent == agent))

    def obey_next(self, order: OpenStore | Start | StopGeneration) -> None:
        self.inbox.remove(order)
        if order.agent not in self.alive:
            return
        if isinstance(order, OpenStore):
            self.tell(StoreOpened(order.agent, order.generation, 1000 + order.generation))
        elif isinstance(order, Start):
            assert order.agent not in self.workers, "started before the old workers were stopped"
            self.workers[order.agent] = order.group.generation
        else:
            self.workers.pop(order.agent, None)
            failing = (fault(rank=0, node=order.agent),) if order.generation % 3 == 0 else ()
            self.tell(GenerationStopped(order.agent, order.generation, failing))

    @precondition(lambda self: bool(self.workers))
    @rule(
        data=st.data(),
        code=st.sampled_from([0, 0, 0, 1, 1, 75, 93, -9, -11]),
        message=st.sampled_from(["ValueError: bad batch", "OSError: disk", NOISE]),
        age_s=st.sampled_from([1.0, 60.0, 2 * FORGIVEN_S]),
    )
    def worker_ends(self, data: st.DataObject, code: int, message: str, age_s: float) -> None:
        agent = data.draw(st.sampled_from(sorted(self.workers)))
        group = self.run.group
        if group is None or agent not in group.agents or self.workers[agent] != group.generation:
            return
        first = next(place.first_rank for place in group.places if place.agent == agent)
        rank = first + data.draw(st.integers(0, group.nproc_per_node - 1))
        self.tell(ended(self.run, fault(message, rank, agent, code), age_s))

    @precondition(lambda self: not self.run.leaving)
    @rule()
    def leave_the_nodes(self) -> None:
        self.tell(NodesReclaimed())

    @rule(agent=agents)
    def cloud_takes(self, agent: str) -> None:
        self.tell(NodesTaken({agent: "taken"}, 5.0))

    @rule(late=st.booleans())
    def save_is_overdue(self, late: bool) -> None:
        self.tell(SaveOverdue(self.run.generation - late))

    @precondition(lambda self: self.released)
    @rule()
    def move(self) -> None:
        self.released = False
        self.tell(RunMoved())

    @rule(late=st.booleans())
    def hang(self, late: bool) -> None:
        self.tell(Hung(self.run.generation - late, "no step for 600 s"))

    @precondition(lambda self: self.run.pausing)
    @rule()
    def wait(self) -> None:
        self.tell(PauseOver())

    @rule()
    def give_up_waiting(self) -> None:
        self.tell(GatherTimeout())

    @invariant()
    def one_generation_at_a_time(self) -> None:
        assert len(set(self.workers.values())) <= 1

    @invariant()
    def ranks_are_dense(self) -> None:
        group = self.run.group
        if group:
            assert [place.group_rank for place in group.places] == list(range(len(group.places)))
            assert len(set(group.agents)) == len(group.agents)
            shape = self.run.shape
            assert shape.min_nodes <= len(group.places) <= shape.max_nodes

    @invariant()
    def it_never_waits_with_enough_nodes(self) -> None:
        run = self.run
        if run.phase is GenerationPhase.GATHERING and not run.pausing and not run.leaving:
            assert len(run.ready) < run.shape.max_nodes

    @invariant()
    def it_never_waits_for_the_dead(self) -> None:
        assert self.run.waiting_for <= self.alive

    @invariant()
    def it_ends_once(self) -> None:
        assert self.finished == (self.run.phase is GenerationPhase.ENDED)

    def teardown(self) -> None:
        """Check that the run runs or has ended once faults stop, if there are enough nodes."""
        if not hasattr(self, "run"):
            return
        for agent in sorted(self.cold):
            self.tell(AgentJoined(agent))
        self.obey_all()
        saves = self.run.leaving or self.run.taken
        if saves and self.run.phase is GenerationPhase.RUNNING and self.run.group:
            for rank in sorted(self.run.group.ranks):
                self.tell(WorkerEnded("", self.run.generation, rank, 75))
            self.obey_all()
        for event in (PauseOver(), RunMoved()):
            self.tell(event)
        self.obey_all()
        if len(self.run.ready) >= self.run.shape.max_nodes:
            assert self.run.phase in (GenerationPhase.RUNNING, GenerationPhase.ENDED)

    def obey_all(self) -> None:
        while self.inbox:
            self.obey_next(self.inbox[0])


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_advance_does_not_change_its_argument():
    run = Run(TWO)
    assert replace(run) == run and advance(run, AgentGone("nobody")) == (run, [])
