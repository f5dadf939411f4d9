"""Hangs under torchrun: the evidence that agents send, and what the coordinator prints."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path

import pytest

from dalsegno.runs.agent.worker_processes import GenerationWorkers
from dalsegno.runs.coordinator.agents.hangs import ALL_IDLE_S, StepMarks
from dalsegno.runs.coordinator.agents.messages import LogPiece, read_message
from dalsegno.runs.coordinator.generations.events import AgentJoined, Event, StoreOpened, WorkerEnded
from dalsegno.runs.coordinator.generations.generations import GenerationPhase, Run, advance
from dalsegno.runs.coordinator.generations.group import Shape
from dalsegno.runs.flight_recorder import CollectiveCall, FlightDump
from dalsegno.runs.folder import RunFolder
from dalsegno.runs.hang import HangReport, HangSuspect
from dalsegno.runs.torchrun.coordinator import NOWHERE
from dalsegno.runs.torchrun.hang_evidence import (
    MAX_FILE_BYTES,
    HangEvidence,
    TorchrunHangWatch,
    evidence_messages,
    keep_newest,
)

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
        LogPiece("flight/1/1", "{\ud800"),
    ],
)
def test_malformed_evidence_is_ignored(piece: LogPiece) -> None:
    evidence = evidence_of(piece)
    evidence.record_timeout(1, 0)
    assert evidence.judge(1) is None


def test_only_the_end_of_a_long_file_is_sent(tmp_path: Path) -> None:
    long = "x" * MAX_FILE_BYTES + "\n" + dump(1)
    flight, folder = sent(tmp_path, 1, flight=long)
    assert (flight.text, folder.text) == (dump(1), str(tmp_path))


def test_only_regular_files_are_sent(tmp_path: Path) -> None:
    """The user's code can create any file in its log folder, and a pipe would block the agent."""
    current = GenerationWorkers(1)
    os.mkfifo(tmp_path / "stacks")
    (tmp_path / "flight").symlink_to("/etc/passwd")
    current.add(0, "", error_file="", stacks=str(tmp_path / "stacks"), flight=str(tmp_path / "flight"))
    assert list(evidence_messages(current)) == []


def test_each_rank_keeps_its_newest_calls_of_each_group() -> None:
    """A rank without calls would be blamed, so a limit applies to all ranks alike."""
    evidence = HangEvidence(max_calls=4)
    evidence.start(1, {0: "gpu-1", 1: "gpu-2"})
    for rank in (0, 1):
        evidence.add(LogPiece(f"flight/1/{rank}", dump(*range(1, 30))))
    evidence.record_timeout(1, 0)
    report = evidence.judge(1)
    assert report is not None
    assert report.sentence.startswith("all 2 ranks have called collective 29"), "rank 1 is not missing"
    calls = tuple(CollectiveCall(group, number, "all_reduce", True) for group in "ab" for number in range(9))
    newest = keep_newest(FlightDump(0, calls), 4).calls
    assert [(call.group, call.sequence) for call in newest] == [("a", 7), ("a", 8), ("b", 7), ("b", 8)]


def test_another_generation_is_not_judged_by_this_ones_evidence(tmp_path: Path) -> None:
    evidence = evidence_of(*sent(tmp_path, 1, STACKS))
    assert evidence.judge(1) is not None and evidence.judge(2) is None


def test_report_names_duration_rank_node_collective_line_suspect_and_files(tmp_path: Path) -> None:
    evidence = evidence_of(*sent(tmp_path, 0, flight=dump(1, 2)), *sent(tmp_path, 1, STACKS, dump(1)))
    evidence.record_timeout(1, 0)
    assert evidence.describe("no rank was at work for 60 s", evidence.judge(1)) == (
        "no rank was at work for 60 s; rank 1 on gpu-2 did not arrive: it is at /job/train.py:11; 1 rank waits in"
        " collective 2 of process group 0, all_reduce (8); the code is suspected: the rank runs, but elsewhere in"
        f" the script; see gpu-2:{tmp_path}"
    )


def test_report_without_evidence_says_how_long_it_lasts() -> None:
    evidence = evidence_of(LogPiece("folder/1/0", "/tmp/a\x1b[2J"))
    assert evidence.judge(1) is None
    assert evidence.describe("no step for 60 s", None) == "no step for 60 s; see gpu-1:/tmp/a\\x1b[2J"
    assert HangEvidence().describe("no step for 60 s", None) == "no step for 60 s"


def test_rank_that_has_returned_is_named_as_the_cause(tmp_path: Path) -> None:
    evidence = evidence_of(*sent(tmp_path, 0, flight=dump(1, 2)), *sent(tmp_path, 1, STACKS, dump(1)))
    evidence.record_timeout(1, 0)
    report = evidence.judge(1, idle=[0])
    assert report is not None and "its script has ended" in report.reason
    assert report.where == "", "its stack is older than its end"


# What the watch prints


class PlayedControl:
    """A run on two nodes whose agents answer at once, and what its watch has printed and applied."""

    def __init__(
        self,
        timeout_s: float | None,
        max_restarts: int = 0,
        spent: int = 0,
        all_idle_s: float = ALL_IDLE_S,
        evidence: HangEvidence | None = None,
    ) -> None:
        self.folder, self.present = RunFolder(NOWHERE / "id"), frozenset(["0@gpu-1#1", "1@gpu-2#1"])
        self.said, self.applied, self.tasks = list[str](), list[Event](), list[object]()
        self.run = Run(Shape(2, 2, 1), max_restarts, literal=True, spent=spent)
        for event in (*map(AgentJoined, sorted(self.present)), StoreOpened("0@gpu-1#1", 1, 5000)):
            self.run, _ = advance(self.run, event)
        evidence = evidence or HangEvidence()
        evidence.start(1, {0: "gpu-1", 1: "gpu-2"})
        evidence.add(LogPiece("stacks/1/1", STACKS))
        self.watch = TorchrunHangWatch(self, timeout_s, evidence, self.said.append, all_idle_s)  # type: ignore[arg-type]

    def send(self, agent: str, message: dict[str, object]) -> None:
        asyncio.get_running_loop().call_soon(self.watch.stacks_done, agent)

    def apply(self, event: Event) -> None:
        self.applied.append(event)

    def last_output(self, generation: int) -> float:
        return 0.0

    def note(self, text: str) -> None: ...

    def journal(self, event: object, **what: object) -> None: ...

    def run_in_background(self, work: object) -> None:
        self.tasks.append(work)

    async def check(self) -> None:
        """Check twice, and wait until everything that was found is reported."""
        self.watch.check()
        self.watch.check()
        await asyncio.gather(*self.tasks)  # type: ignore[call-overload]
        self.tasks.clear()


def stopped_steps(timeout_s: float | None) -> StepMarks:
    """Return the marks of a script that has made a step per second until two minutes ago."""
    began = time.monotonic() - 130.0
    marks = StepMarks(timeout_s, began)
    for step in range(10):
        marks.step(step, began + step)
    return marks


AT_LINE = "no rank waits in a collective: rank 1 on gpu-2 at /job/train.py:11; the code is suspected"


def test_hang_is_reported_once_and_not_ended_without_a_restart_left() -> None:
    async def main() -> None:
        control = PlayedControl(None)
        control.watch._marks = stopped_steps(None)
        await control.check()
        (line,) = control.said
        assert line.startswith("no step for 121 s; the workers continue; " + AT_LINE)
        control.watch.stepped(1, 10)
        await control.check()
        assert control.said[1:] == ["steps are completed again"] and control.applied == []

    asyncio.run(main())


def test_hang_is_not_reported_if_the_generation_ends_while_stacks_are_captured() -> None:
    async def main() -> None:
        control = PlayedControl(None)
        control.watch._marks = stopped_steps(None)
        control.watch.check()
        control.run, _ = advance(control.run, WorkerEnded("1@gpu-2#1", 1, 1, 1))
        await control.check()
        assert control.run.phase is not GenerationPhase.RUNNING and control.said == []

    asyncio.run(main())


@pytest.mark.parametrize(
    ("timeout_s", "max_restarts", "spent", "ends"),
    [(None, 0, 0, False), (None, 1, 0, True), (None, 1, 1, False), (60.0, 0, 0, True), (0.0, 1, 0, False)],
)
def test_hang_is_ended_if_a_restart_is_left_or_the_user_has_set_a_limit(
    timeout_s: float | None, max_restarts: int, spent: int, ends: bool
) -> None:
    async def main() -> None:
        control = PlayedControl(timeout_s, max_restarts, spent)
        control.watch._marks = stopped_steps(timeout_s)
        await control.check()
        assert bool(control.applied) is ends
        assert len(control.said) == (timeout_s != 0)

    asyncio.run(main())


def test_idle_ranks_of_a_silent_script_are_reported_once_with_cause_and_nodes() -> None:
    async def main() -> None:
        control = PlayedControl(None, max_restarts=3, all_idle_s=0.0)
        await control.check()
        (line,) = control.said
        assert line.startswith(f"no step, and all 2 ranks have been idle for 0 s; {AT_LINE}")
        assert control.applied == [], "the workers continue"

    asyncio.run(main())


class BrokenEvidence(HangEvidence):
    """Evidence that cannot be judged."""

    def judge(self, generation: int, idle: object = None) -> HangReport | None:
        raise ValueError("unexpected")


def test_hang_is_ended_and_idle_ranks_are_reported_if_the_evidence_cannot_be_judged() -> None:
    async def main() -> None:
        control = PlayedControl(60.0, evidence=BrokenEvidence())
        control.watch._marks = stopped_steps(60.0)
        await control.check()
        assert len(control.applied) == 1 and control.said[0].startswith("no step for 121 s")
        idle = PlayedControl(None, max_restarts=3, all_idle_s=0.0, evidence=BrokenEvidence())
        await idle.check()
        assert idle.said == ["no step, and all 2 ranks have been idle for 0 s"]

    asyncio.run(main())
