"""The evidence about a hang that agents of torchrun send, and what the coordinator makes of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dalsegno.runs.agent.worker_processes import GenerationWorkers
from dalsegno.runs.coordinator.agents.messages import LogPiece, read_message
from dalsegno.runs.hang import HangSuspect
from dalsegno.runs.torchrun.hang_evidence import MAX_FILE_BYTES, HangEvidence, evidence_messages

STACKS = 'Current thread 0x1 (most recent call first):\n  File "/job/train.py", line 11 in main\n'


def dump(*sequences: int) -> str:
    """Return the line of a rank that has called these all-reduces. As after a timeout of gloo, all look done."""
    entries = [
        {"profiling_name": "gloo:all_reduce", "process_group": ["0", ""], "collective_seq_id": number,
         "state": "scheduled", "retired": True, "input_sizes": [[8]]}
        for number in sequences
    ]  # fmt: skip
    return json.dumps({"version": "2.10", "pg_config": {}, "entries": entries}) + "\n"


def sent(folder: Path, rank: int, stacks: str = "", flight: str = "") -> list[LogPiece]:
    """Return what the coordinator receives from the agent of one rank."""
    current = GenerationWorkers(1)
    for name, text in (("stacks", stacks), ("flight", flight)):
        (folder / f"{name}{rank}").write_text(text)
    current.add(rank, "", error_file="", stacks=str(folder / f"stacks{rank}"), flight=str(folder / f"flight{rank}"))
    found = [read_message(message) for message in evidence_messages(current)]
    return [each for each in found if isinstance(each, LogPiece)]


def evidence_of(*pieces: LogPiece) -> HangEvidence:
    evidence = HangEvidence()
    evidence.start(1, {0: "gpu-1", 1: "gpu-2"})
    for piece in pieces:
        evidence.add(piece)
    return evidence


def test_rank_that_did_not_arrive_is_named_with_collective_and_node(tmp_path: Path) -> None:
    pieces = [*sent(tmp_path, 0, flight=dump(1, 2)), *sent(tmp_path, 1, STACKS, dump(1))]
    evidence = evidence_of(*pieces)
    before = evidence.judge(1)
    assert before is not None and before.collective == "", "rank 0 is not known to wait"
    evidence.record_timeout(1, 0)
    report = evidence.judge(1)
    assert report is not None
    assert (report.ranks, report.nodes, report.collective) == ((1,), ("gpu-2",), "all_reduce")
    assert (report.where, report.suspect) == ("/job/train.py:11", HangSuspect.CODE)


def test_next_generation_forgets_the_evidence(tmp_path: Path) -> None:
    evidence = evidence_of(*sent(tmp_path, 1, STACKS))
    assert evidence.judge(1) is not None
    evidence.start(2, {0: "gpu-1", 1: "gpu-2"})
    assert evidence.judge(2) is None


@pytest.mark.parametrize(
    "piece",
    [
        LogPiece("stacks/1/7", STACKS),  # no such rank
        LogPiece("stacks/2/1", STACKS),  # another generation
        LogPiece("logs/g0001/rank1.log", STACKS),
        LogPiece("flight/1/1", "not JSON"),
        LogPiece("flight/1/1", "{"),
        LogPiece("flight/1/1", "\x80\x04"),
    ],
)
def test_malformed_evidence_is_ignored(piece: LogPiece) -> None:
    evidence = evidence_of(piece)
    evidence.record_timeout(1, 0)
    assert evidence.judge(1) is None


def test_only_the_end_of_a_long_file_is_sent(tmp_path: Path) -> None:
    long = "x" * MAX_FILE_BYTES + "\n" + dump(1)
    (piece,) = sent(tmp_path, 1, flight=long)
    assert piece.text == dump(1)
