"""The verdict on a hang: the rank and the collective that did not arrive, and whether code or node is suspected."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dalsegno.runs.flight_recorder import CollectiveCall, FlightDump, ProcessState
from dalsegno.runs.folder import RunFolder
from dalsegno.runs.hang import HangSuspect, RankStack, judge_hang, parse_stacks, read_hang
from dalsegno.runs.journal import RunEvent

RECORDED = Path(__file__).parents[1] / "recorded/doctor"
PLACES = {0: "gpu-1", 1: "gpu-2", 2: "gpu-3"}
FORMED = {"event": RunEvent.GENERATION, "generation": 1, "nodes": ["gpu-1", "gpu-2"], "nproc_per_node": 1}


def waiting(rank: int, operation: str = "all_reduce") -> FlightDump:
    return FlightDump(rank, (CollectiveCall("0", 8, operation, done=False, sizes=((1024,),)),))


def elsewhere(rank: int, state: ProcessState = ProcessState.ANSWERED) -> FlightDump:
    return FlightDump(rank, (CollectiveCall("0", 7, "all_reduce", done=True),), state=state)


def test_recorded_hang_names_rank_node_line_and_collective(tmp_path: Path):
    run = RunFolder(tmp_path / "train-x")
    shutil.copytree(RECORDED / "gloo-hang", run.all_stacks)
    found = read_hang(run, 1, [FORMED])
    assert found is not None and found.describe() == (
        "rank 1 on gpu-2 did not arrive: it is at /home/ada/train.py:6; 1 rank waits in collective 4 of process group"
        " 0, all_reduce (8); the code is suspected: the rank runs, but elsewhere in the script"
    )
    assert (found.ranks, found.nodes, found.suspect) == ((1,), ("gpu-2",), HangSuspect.CODE)
    assert read_hang(run, 2, [FORMED]) is None, "another generation"


def test_own_dump_of_torch_is_preferred_because_it_has_stacks(tmp_path: Path):
    run = RunFolder(tmp_path / "train-x")
    run.all_stacks.mkdir(parents=True)
    shutil.copy(RECORDED / "nccl-timeout/trace_0", run.all_stacks / "g0001-flight-0")
    shutil.copy(RECORDED / "nccl-timeout/trace_0.json", run.flight_dump(1, 0))
    found = read_hang(run, 1, [{**FORMED, "nodes": ["gpu-1"]}])
    assert found is not None and found.suspect is HangSuspect.NETWORK
    assert "all_reduce (1024) at /tmp/w/train.py:21, but it does not end" in found.sentence


def test_stopped_process_makes_its_node_suspect():
    found = judge_hang(1, [waiting(0), elsewhere(1, ProcessState.STOPPED), waiting(2)], {}, PLACES)
    assert found is not None and (found.suspect, found.nodes) == (HangSuspect.NODE, ("gpu-2",))


@pytest.mark.parametrize(
    ("states", "sentence"),
    [
        ([ProcessState.ANSWERED, ProcessState.STOPPED], "rank 1 on gpu-2 does nothing"),
        ([ProcessState.BLOCKED, ProcessState.STOPPED], "ranks 0 on gpu-1, 1 on gpu-2 do nothing"),
    ],
)
def test_stopped_ranks_outside_of_collectives_are_named(states: list[ProcessState], sentence: str):
    found = judge_hang(1, [elsewhere(rank, state) for rank, state in enumerate(states)], {}, PLACES)
    assert found is not None and found.sentence == f"{sentence}, and no rank waits in a collective"


def test_line_of_one_of_several_missing_ranks_is_said_to_be_its_own():
    found = judge_hang(1, [waiting(0), elsewhere(1), elsewhere(2)], {1: RankStack("train.py:9")}, PLACES)
    assert found is not None
    assert found.sentence.startswith("ranks 1 on gpu-2, 2 on gpu-3 did not arrive: rank 1 is at train.py:9; 1 rank")


def test_failed_check_makes_the_node_suspect_whatever_the_script_does():
    stacks = {1: RankStack("train.py:20")}
    found = judge_hang(1, [waiting(0), elsewhere(1), waiting(2)], stacks, PLACES, faulty_nodes=["gpu-2"])
    assert found is not None and (found.suspect, found.reason) == (HangSuspect.NODE, "checks of gpu-2 have failed")


def test_node_of_which_no_rank_answers_is_suspect():
    found = judge_hang(1, [waiting(0), waiting(2)], {}, PLACES)
    assert found is not None and (found.suspect, found.ranks) == (HangSuspect.NODE, (1,))


def test_rank_that_has_returned_is_a_fault_of_the_code(tmp_path: Path):
    """Rank 0 has neither stacks nor a dump, because its process is gone."""
    run = RunFolder(tmp_path / "train-x")
    shutil.copytree(RECORDED / "gloo-hang", run.all_stacks)
    run.flight_dump(1, 1).unlink()
    run.stacks(1, 1).unlink()
    idle = {"event": RunEvent.IDLE, "generation": 1, "ranks": {"0": "gpu-1"}}
    again = {"event": RunEvent.IDLE, "generation": 1, "ranks": {}}
    journals = ([FORMED], [FORMED, idle], [FORMED, idle, again])
    suspects = [found.suspect for entries in journals if (found := read_hang(run, 1, entries))]
    assert suspects == [HangSuspect.NODE, HangSuspect.CODE, HangSuspect.NODE], "idle ranks may be at work again"


def test_rank_whose_collective_timed_out_is_not_the_one_that_did_not_arrive():
    """Rank 0 has ended, and left no dump."""
    found = judge_hang(1, [elsewhere(1), waiting(2)], {1: RankStack("train.py:9")}, PLACES, timed_out=[0])
    assert found is not None and (found.ranks, found.where) == ((1,), "train.py:9")


def test_rank_in_its_dataloader_is_named_so():
    found = judge_hang(1, [waiting(0), elsewhere(1), waiting(2)], {1: RankStack("train.py:9", True)}, PLACES)
    assert found is not None and found.reason == "the rank waits for its DataLoader"


def test_different_collectives_are_a_fault_of_the_code():
    found = judge_hang(1, [waiting(0), waiting(1, "broadcast"), waiting(2)], {}, PLACES)
    assert found is not None and found.suspect is HangSuspect.CODE and found.ranks == (1,)
    assert "rank 1 on gpu-2 called broadcast (1024), ranks 0 on gpu-1, 2 on gpu-3 called all_reduce" in found.sentence


def test_collective_that_all_have_called_makes_the_network_suspect():
    found = judge_hang(1, [waiting(0), waiting(1), waiting(2)], {}, PLACES)
    assert found is not None and found.suspect is HangSuspect.NETWORK


def test_hang_outside_of_collectives_is_a_fault_of_the_script():
    stacks = {0: RankStack("train.py:4"), 1: RankStack("data.py:9"), 2: RankStack("train.py:4")}
    found = judge_hang(1, [elsewhere(0), elsewhere(1)], stacks, PLACES)
    assert found is not None and (found.suspect, found.where) == (HangSuspect.CODE, "data.py:9")
    assert found.sentence == (
        "no rank waits in a collective: ranks 0 on gpu-1, 2 on gpu-3 at train.py:4; rank 1 on gpu-2 at data.py:9"
    )
    assert judge_hang(1, [], {}, PLACES) is None, "no evidence"


def test_place_in_the_script_is_found_in_stacks_of_faulthandler_and_of_py_spy():
    recorded = (RECORDED / "gloo-hang/g0001-rank1.txt").read_text()
    assert parse_stacks(recorded) == RankStack("/home/ada/train.py:6")
    spied = """Process 7: python train.py
Python v3.11.2 (/usr/bin/python3.11)

Thread 7 (idle): "MainThread"
    _try_get_data (/opt/venv/lib/python3.11/site-packages/torch/utils/data/dataloader.py:1131)
    train (train.py:20)
    <module> (train.py:31)
"""
    assert parse_stacks(spied) == RankStack("train.py:20", loads_data=True)
    assert parse_stacks("process 7 writes no stacks") == RankStack("")


def test_long_line_in_a_stack_is_parsed_in_linear_time_and_a_long_path_is_cut():
    thread = "Thread 0x1 (most recent call first):\n"
    assert parse_stacks(f"{thread}  f{' (:' * 80_000}\n").where == ""
    assert parse_stacks(f'{thread}  File "/{"a" * 9000}/train.py", line 3 in main\n').where.endswith("a/train.py:3")
    assert len(parse_stacks(f'{thread}  File "/{"a" * 9000}/train.py", line 3 in main\n').where) < 300
    assert parse_stacks(f"{thread}    main (/job (new)/train.py:3)\n").where == "new)/train.py:3"


def test_newest_call_of_a_rank_that_timed_out_counts_as_waiting():
    """gloo marks a call that failed like one that is done."""
    timed_out = FlightDump(0, tuple(CollectiveCall("0", number, "all_reduce", done=True) for number in (7, 8)))
    found = judge_hang(1, [timed_out, elsewhere(1)], {}, {0: "gpu-1", 1: "gpu-2"}, timed_out=[0])
    assert found is not None and (found.ranks, found.collective) == ((1,), "all_reduce")
    assert judge_hang(1, [timed_out, elsewhere(1)], {}, {0: "gpu-1", 1: "gpu-2"}) is None


def test_rank_of_several_groups_that_timed_out_is_not_said_to_wait_in_one_of_them():
    calls = (CollectiveCall("0", 7, "all_reduce", done=True), CollectiveCall("1", 8, "all_gather", done=True))
    assert judge_hang(1, [FlightDump(0, calls)], {}, {0: "gpu-1", 1: "gpu-2"}, timed_out=[0]) is None
