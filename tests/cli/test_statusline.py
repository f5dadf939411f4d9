"""How a run fares, in words."""

from __future__ import annotations

from dalsegno.cli.statusline import clock, farewell, last_cause, live_text, sentences
from dalsegno.launch.status import ENDED, RESTARTING, STARTING, STOPPING, WAITING, NodeStatus
from tests.cli.runs import members, status

WAITS = status(phase=WAITING, message="Priority", wanted_nodes=4)
RUNS = status(
    generation=1, wanted_nodes=4, world_size=8, nproc_per_node=2, nodes=members("n1", "n2", "n3", "n4"), started=130.0
)


def test_the_line_says_what_matters_now() -> None:
    assert live_text(WAITS, 107.0) == "train-k3f9x  waiting  0/4 nodes  Priority  0:07"
    assert live_text(RUNS, 192.0) == "train-k3f9x  running  4/4 nodes  generation 1  1:02"
    spare = status(generation=3, restarts=1, world_size=1, nodes=(*members("n1"), NodeStatus("n2", "spare")))
    assert live_text(spare, 100.0) == "train-k3f9x  running  1/1 node and 1 spare  generation 3  1 restart  0:00"


def test_a_run_that_is_smaller_than_asked_says_so_everywhere() -> None:
    smaller = status(
        generation=2, wanted_nodes=4, world_size=6, nproc_per_node=2, nodes=members("n1", "n2", "n3"),
        message="runs on 3 of 4 nodes",
    )  # fmt: skip
    assert "smaller than asked: this changes the effective batch" in live_text(smaller, 100.0)
    assert sentences(RUNS, smaller) == [
        "generation 2: 3 nodes, 6 processes; smaller than the 4 nodes asked for, which changes the effective batch"
    ]


def test_what_has_changed_is_told_once() -> None:
    handed = status(phase=WAITING, message="handed over")
    assert sentences(None, handed) == ["run train-k3f9x is handed over"]
    assert sentences(handed, WAITS) == ["run train-k3f9x waits in the queue: Priority"]
    assert sentences(WAITS, WAITS) == []
    starts = status(phase=STARTING, wanted_nodes=4)
    assert sentences(WAITS, starts) == ["run train-k3f9x starts on 4 nodes"]
    assert sentences(starts, RUNS) == ["generation 1: 4 nodes, 8 processes"]
    assert sentences(RUNS, RUNS) == []


def test_a_restart_says_why_once() -> None:
    why = "rank 3 on n2 was ended by SIGKILL"
    stopped = status(phase=RESTARTING, generation=1, started=130.0)
    forming = status(phase=RESTARTING, generation=2, started=130.0)
    again = status(generation=2, world_size=8, nproc_per_node=2, wanted_nodes=4)
    assert sentences(RUNS, stopped, why) == [f"run train-k3f9x restarts: {why}"]
    assert sentences(stopped, forming, why) == []
    assert sentences(forming, again, why) == ["generation 2: 4 nodes, 8 processes"]
    assert sentences(RUNS, again, why) == [f"generation 2: 4 nodes, 8 processes ({why})"], "too quick to be seen"


def test_the_cause_is_the_first_rank_that_failed_and_not_the_noise_after_it() -> None:
    generation = {"event": "generation"}
    lost = {"event": "lost", "node": "n2", "why": "no answer for 1.5 s"}
    noise = {"event": "failed", "rank": 0, "node": "n1", "what": "ended with code 1", "noise": True}
    failed = {"event": "failed", "rank": 3, "node": "n2", "what": "was ended by SIGKILL", "noise": False}
    assert last_cause([generation]) == ""
    assert last_cause([generation, noise, failed, lost]) == "rank 3 on n2 was ended by SIGKILL"
    assert last_cause([generation, failed, generation, noise, lost]) == "n2 is lost: no answer for 1.5 s"
    assert last_cause([generation, lost, generation]) == "n2 is lost: no answer for 1.5 s"
    assert last_cause([generation, lost, generation, generation]) == ""


def test_a_parent_that_was_killed_ends_the_generation_of_its_workers_and_of_no_spare() -> None:
    formed = {"event": "generation", "nodes": ["n1", "n2"]}
    killed = {"event": "cold", "node": "n2", "why": "its warm parent was killed"}
    assert last_cause([formed, killed]) == "n2: its warm parent was killed, and its workers with it"
    assert last_cause([formed, {**killed, "node": "n3"}]) == ""


def test_a_spare_that_was_lost_before_is_not_the_cause() -> None:
    generation = {"event": "generation"}
    spare = {"event": "lost", "node": "n3", "why": "no answer", "was": "spare"}
    member = {"event": "lost", "node": "n4", "why": "silence", "was": "member"}
    assert last_cause([generation, spare, member]) == "n4 is lost: silence"
    assert last_cause([generation, spare]) == ""


def test_the_loss_of_a_spare_is_told_though_nothing_restarts() -> None:
    whole = status(generation=1, nodes=(*members("n1"), NodeStatus("n12", "spare")), world_size=1)
    alone = status(generation=1, nodes=members("n1"), world_size=1, lost_nodes=1)
    assert sentences(whole, alone) == ["spare n12 is lost"]
    assert sentences(whole, alone, "n1 is lost: silence") == ["spare n12 is lost"]


def test_while_it_is_not_decided_whether_a_run_goes_on_nothing_is_said_of_a_restart() -> None:
    why = "rank 1 on n2 failed: ValueError"
    stopping = status(phase=STOPPING, generation=1, started=130.0, nodes=RUNS.nodes)
    restarts = status(phase=RESTARTING, generation=1, started=130.0, nodes=RUNS.nodes)
    assert sentences(RUNS, stopping, why) == []
    assert sentences(stopping, restarts, why) == [f"run train-k3f9x restarts: {why}"]


def test_a_lost_node_has_a_name() -> None:
    lost = status(phase=RESTARTING, generation=1, started=130.0, nodes=members("n1", "n3", "n4"), lost_nodes=1)
    assert sentences(RUNS, lost) == ["node n2 is lost", "run train-k3f9x restarts"]
    assert sentences(RUNS, lost, "n2 is lost: silence") == ["run train-k3f9x restarts: n2 is lost: silence"]
    assert sentences(lost, lost) == []
    left = status(generation=1, nodes=members("n1"), world_size=2, nproc_per_node=2)
    assert sentences(RUNS, left) == [], "a node whose job is over is not lost"


def test_what_a_coordinator_has_to_say_is_told_once() -> None:
    noted = status(generation=1, message="the warm parent holds threads: tokenizers")
    assert sentences(RUNS, noted) == ["the warm parent holds threads: tokenizers"]
    assert sentences(noted, noted) == []


def test_the_last_word() -> None:
    done = status(phase=ENDED, started=100.0, ended=3725.0, exit_code=0, generation=1)
    assert farewell(done) == "run train-k3f9x is done after 1:00:25"
    failed = status(
        phase=ENDED, started=100.0, ended=160.0, exit_code=1, generation=3, lost_nodes=1, message="rank 0: ValueError"
    )
    assert (
        farewell(failed)
        == "run train-k3f9x ended with code 1 after 1:00, 3 generations, 1 node lost: rank 0: ValueError"
    )


def test_times_are_written_as_squeue_does() -> None:
    assert [clock(each) for each in (0, 65, 3600, 90_061)] == ["0:00", "1:05", "1:00:00", "1-01:01:01"]
