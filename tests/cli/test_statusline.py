"""Tests of the status text of a run."""

from __future__ import annotations

from dalsegno.cli.training.statusline import Cause, clock, describe_changes, describe_end, last_cause, live_text
from dalsegno.runs.status import NodeRole, RunCause, RunNodeStatus, RunPhase
from tests.cli.runs import members, status

WAITS = status(phase=RunPhase.WAITING, message="Priority", wanted_nodes=4)
RUNS = status(
    generation=1, wanted_nodes=4, world_size=8, nproc_per_node=2, nodes=members("n1", "n2", "n3", "n4"), started=130.0
)


def test_live_line_shows_current_state() -> None:
    assert live_text(WAITS, 107.0) == "train-k3f9x  waiting  0/4 nodes  Priority  0:07"
    assert live_text(RUNS, 192.0) == "train-k3f9x  running  4/4 nodes  generation 1  1:02"
    spare = status(generation=3, restarts=1, world_size=1, nodes=(*members("n1"), RunNodeStatus("n2", NodeRole.SPARE)))
    assert live_text(spare, 100.0) == "train-k3f9x  running  1/1 node and 1 spare  generation 3  1 restart  0:00"


def test_run_smaller_than_requested_is_reported() -> None:
    smaller = status(
        generation=2, wanted_nodes=4, world_size=6, nproc_per_node=2, nodes=members("n1", "n2", "n3"),
        message="runs on 3 of 4 nodes",
    )  # fmt: skip
    assert "smaller than requested: this changes the effective batch" in live_text(smaller, 100.0)
    assert describe_changes(RUNS, smaller) == [
        "generation 2: 3 nodes, 6 processes; smaller than the 4 nodes requested, which changes the effective batch"
    ]


def test_changes_are_reported_once() -> None:
    handed = status(phase=RunPhase.WAITING, message="handed over", cause=RunCause.HANDED_OVER)
    assert describe_changes(None, handed) == ["run train-k3f9x is submitted"]
    assert describe_changes(handed, WAITS) == ["run train-k3f9x waits in the queue: Priority"]
    assert describe_changes(WAITS, WAITS) == []
    starts = status(phase=RunPhase.STARTING, wanted_nodes=4)
    assert describe_changes(WAITS, starts) == ["run train-k3f9x starts on 4 nodes"]
    assert describe_changes(starts, RUNS) == ["generation 1: 4 nodes, 8 processes"]
    assert describe_changes(RUNS, RUNS) == []


def test_cause_of_restart_is_reported_once() -> None:
    cause = Cause("rank 3 on n2 was ended by SIGKILL", "n2")
    stopped = status(phase=RunPhase.RESTARTING, generation=1, started=130.0)
    forming = status(phase=RunPhase.RESTARTING, generation=2, started=130.0)
    again = status(generation=2, world_size=8, nproc_per_node=2, wanted_nodes=4)
    assert describe_changes(RUNS, stopped, cause) == [f"run train-k3f9x restarts: {cause.text}"]
    assert describe_changes(stopped, forming, cause) == []
    assert describe_changes(forming, again, cause) == ["generation 2: 4 nodes, 8 processes"]
    assert describe_changes(RUNS, again, cause) == [f"generation 2: 4 nodes, 8 processes ({cause.text})"], (
        "too short to be seen in a status"
    )


def test_cause_is_the_first_failed_rank() -> None:
    generation = {"event": "generation"}
    lost = {"event": "lost", "node": "n2", "why": "no answer for 1.5 s"}
    noise = {"event": "failed", "rank": 0, "node": "n1", "what": "ended with code 1", "noise": True}
    failed = {"event": "failed", "rank": 3, "node": "n2", "what": "was ended by SIGKILL", "noise": False}
    assert last_cause([generation]).text == ""
    assert last_cause([generation, noise, failed, lost]).text == "rank 3 on n2 was ended by SIGKILL"
    assert last_cause([generation, failed, generation, noise, lost]).text == "n2 is lost: no answer for 1.5 s"
    assert last_cause([generation, lost, generation]).text == "n2 is lost: no answer for 1.5 s"
    assert last_cause([generation, lost, generation, generation]).text == ""


def test_killed_warm_parent_is_a_cause_unless_on_a_spare() -> None:
    formed = {"event": "generation", "nodes": ["n1", "n2"]}
    killed = {"event": "cold", "node": "n2", "why": "its warm parent was killed"}
    assert last_cause([formed, killed]).text == "n2: its warm parent was killed, and its workers with it"
    assert last_cause([formed, {**killed, "node": "n3"}]).text == ""


def test_lost_spare_is_not_the_cause() -> None:
    generation = {"event": "generation"}
    spare = {"event": "lost", "node": "n3", "why": "no answer", "was": "spare"}
    member = {"event": "lost", "node": "n4", "why": "silence", "was": "member"}
    assert last_cause([generation, spare, member]).text == "n4 is lost: silence"
    assert last_cause([generation, spare]).text == ""


def test_lost_spare_is_reported_without_restart() -> None:
    whole = status(generation=1, nodes=(*members("n1"), RunNodeStatus("n12", NodeRole.SPARE)), world_size=1)
    alone = status(generation=1, nodes=members("n1"), world_size=1, lost_nodes=1)
    assert describe_changes(whole, alone) == ["spare n12 is lost"]
    assert describe_changes(whole, alone, Cause("n1 is lost: silence", "n1")) == ["spare n12 is lost"]


def test_no_restart_is_reported_while_undecided() -> None:
    cause = Cause("rank 1 on n2 failed: ValueError", "n2")
    stopping = status(phase=RunPhase.STOPPING, generation=1, started=130.0, nodes=RUNS.nodes)
    restarts = status(phase=RunPhase.RESTARTING, generation=1, started=130.0, nodes=RUNS.nodes)
    assert describe_changes(RUNS, stopping, cause) == []
    assert describe_changes(stopping, restarts, cause) == [f"run train-k3f9x restarts: {cause.text}"]


def test_lost_node_is_named() -> None:
    lost = status(phase=RunPhase.RESTARTING, generation=1, started=130.0, nodes=members("n1", "n3", "n4"), lost_nodes=1)
    assert describe_changes(RUNS, lost) == ["node n2 is lost", "run train-k3f9x restarts"]
    assert describe_changes(RUNS, lost, Cause("n2 is lost: silence", "n2")) == [
        "run train-k3f9x restarts: n2 is lost: silence"
    ]
    assert describe_changes(lost, lost) == []
    left = status(generation=1, nodes=members("n1"), world_size=2, nproc_per_node=2)
    assert describe_changes(RUNS, left) == [], "a node whose job has ended is not lost"


def test_coordinator_message_is_reported_once() -> None:
    waits = status(generation=1, message="waiting for another node")
    assert describe_changes(RUNS, waits) == ["waiting for another node"]
    assert describe_changes(waits, waits) == []


def test_note_is_left_to_the_journal() -> None:
    assert describe_changes(RUNS, status(generation=1, message="n1 has threads", note_at=130.0)) == []


def test_final_message_of_a_run() -> None:
    done = status(phase=RunPhase.ENDED, started=100.0, ended=3725.0, exit_code=0, generation=1)
    assert describe_end(done) == "run train-k3f9x is done after 1:00:25"
    failed = status(
        phase=RunPhase.ENDED,
        started=100.0,
        ended=160.0,
        exit_code=1,
        generation=3,
        lost_nodes=1,
        message="rank 0: ValueError",
    )
    assert (
        describe_end(failed)
        == "run train-k3f9x ended with code 1 after 1:00, 3 generations, 1 node lost: rank 0: ValueError"
    )


def test_times_are_written_as_squeue_does() -> None:
    assert [clock(each) for each in (0, 65, 3600, 90_061)] == ["0:00", "1:05", "1:00:00", "1-01:01:01"]
