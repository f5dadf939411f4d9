"""Growing logs: only whole lines, in order, with any bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from dalsegno.runs import journal
from dalsegno.runs.folder import RunFolder
from dalsegno.runs.logs import MAX_LINE_CHARS, Line, LogTail, Repeats, RunLogs, on_node, ranks_on


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "train-k3f9x")


def say(run: RunFolder, generation: int, rank: int, data: str | bytes) -> None:
    path = run.log(generation, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(data if isinstance(data, bytes) else data.encode())


def test_line_is_shown_when_it_is_complete(run: RunFolder) -> None:
    logs = RunLogs(run)
    assert list(logs.lines(0.0)) == [], "the folder does not exist yet"
    say(run, 1, 0, "one\ntw")
    assert list(logs.lines(0.1)) == [Line(1, 0, "one")]
    say(run, 1, 0, "o\n")
    assert list(logs.lines(0.2)) == [Line(1, 0, "two")]
    assert list(logs.lines(9.0)) == []


def test_incomplete_line_is_shown_after_a_second_or_at_the_end(run: RunFolder) -> None:
    logs = RunLogs(run)
    say(run, 1, 0, "step 1\nloading …")
    assert list(logs.lines(5.0)) == [Line(1, 0, "step 1")]
    assert list(logs.lines(5.9)) == []
    assert list(logs.lines(6.0)) == [Line(1, 0, "loading …")]
    say(run, 1, 0, " done")
    assert list(logs.lines(6.1)) == []
    assert list(logs.lines(6.2, final=True)) == [Line(1, 0, " done")]
    assert list(logs.lines(6.3, final=True)) == []


def test_invalid_utf8_does_not_stop_the_tail(run: RunFolder) -> None:
    logs = RunLogs(run)
    say(run, 1, 0, b"\xff\xfe ok\n caf\xc3")
    assert list(logs.lines(0.0)) == [Line(1, 0, "�� ok")]
    say(run, 1, 0, b"\xa9\n")
    assert list(logs.lines(0.1)) == [Line(1, 0, " café")], "a character in two parts is one character"
    say(run, 1, 0, b"cut \xc3")
    assert list(logs.lines(0.2, final=True)) == [Line(1, 0, "cut �")]


def test_logs_may_appear_at_any_time(run: RunFolder) -> None:
    logs = RunLogs(run)
    say(run, 1, 1, "b\n")
    assert list(logs.lines(0.0)) == [Line(1, 1, "b")]
    say(run, 1, 0, "a\n")
    say(run, 2, 0, "again\n")
    say(run, 1, 1, "last word\n")
    assert list(logs.lines(0.1)) == [Line(1, 0, "a"), Line(1, 1, "last word"), Line(2, 0, "again")]
    say(run, 10, 10, "x\n")
    say(run, 10, 9, "y\n")
    assert list(logs.lines(0.2)) == [Line(10, 9, "y"), Line(10, 10, "x")]
    assert logs.count == 2, "old generations are no longer read"


def test_incomplete_line_of_a_dead_generation_is_not_lost(run: RunFolder) -> None:
    logs = RunLogs(run)
    say(run, 1, 0, "half")
    assert list(logs.lines(0.0)) == []
    say(run, 3, 0, "new\n")
    assert list(logs.lines(0.1)) == [Line(1, 0, "half"), Line(3, 0, "new")]


def test_old_run_is_read_by_generation_and_rank(run: RunFolder) -> None:
    for generation in (1, 2, 3, 12):
        for rank in (0, 1):
            say(run, generation, rank, f"{generation}.{rank}")
    found = [line.text for line in RunLogs(run).lines(0.0, final=True)]
    assert found == ["1.0", "1.1", "2.0", "2.1", "3.0", "3.1", "12.0", "12.1"]


def test_other_files_in_the_log_folder_are_skipped(run: RunFolder) -> None:
    say(run, 1, 0, "a\n")
    (run.generation(1) / "rank0.log.tmp").write_text("no\n")
    (run.logs / "notes").write_text("no\n")
    assert list(RunLogs(run).lines(0.0)) == [Line(1, 0, "a")]


def test_very_long_line_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("x" * 1_000_000)
    tail = LogTail(RunFolder(tmp_path), path)
    assert sum(map(len, tail.read(0.0))) == 1_000_000
    path.write_text("x" * 1_000_000 + "y" * (MAX_LINE_CHARS + 1))
    assert list(tail.read(0.1)) == ["y" * (MAX_LINE_CHARS + 1)], "it does not wait for a line end"


def test_only_wanted_ranks_are_shown(run: RunFolder) -> None:
    say(run, 1, 0, "a\n")
    say(run, 1, 1, "b\n")
    assert [line.text for line in RunLogs(run, lambda _, rank: rank == 1).lines(0.0)] == ["b"]


def test_ranks_of_a_node_change_with_generations(run: RunFolder) -> None:
    run.root.mkdir()
    journal.append(run.journal, 1.0, "generation", generation=1, nodes=["n1", "n2"], nproc_per_node=2)
    journal.append(run.journal, 2.0, "lost", node="n1")
    journal.append(run.journal, 3.0, "generation", generation=2, nodes=["n3", "n2"], nproc_per_node=2)
    assert ranks_on(run, "n1") == {1: range(2), 2: range(0)}
    wanted = on_node(run, "n3")
    assert [wanted(1, 0), wanted(2, 0), wanted(2, 1), wanted(2, 2), wanted(3, 0)] == [False, True, True, False, False]
    journal.append(run.journal, 4.0, "generation", generation=3, nodes=["n3"], nproc_per_node=1)
    assert wanted(3, 0), "a generation formed since"


BLOCK = [
    "Traceback (most recent call last):",
    '  File "train.py", line 3, in <module>',
    "    step()",
    "ValueError: bad",
]


def said(rank: int, *texts: str, generation: int = 1) -> list[Line]:
    return [Line(generation, rank, text) for text in texts]


def test_traceback_common_to_all_ranks_is_shown_once() -> None:
    repeats = Repeats()
    first = said(0, "epoch 1", *BLOCK)
    second = said(1, "epoch 1", *(f"[rank1]: {text}" for text in BLOCK))
    shown = list(repeats.once([*first, *second, *said(0, *BLOCK, "more", generation=2)]))
    assert shown[: len(first)] == first
    assert [line.text for line in shown[len(first) :]] == [
        "epoch 1", "[rank1]: ValueError: bad (as rank 0)", "ValueError: bad (as before)", "more",
    ]  # fmt: skip
    assert repeats.has_shown("\n".join(BLOCK)) and not repeats.has_shown("ValueError: worse")


def test_syntax_and_usage_errors_are_shown_once_too() -> None:
    syntax = ['  File "train.py", line 2', "    def f(:", "          ^", "SyntaxError: invalid syntax"]
    usage = ["usage: train.py [-h]", "                [--lr LR]", "train.py: error: unrecognized arguments: --nope"]
    for block in (syntax, usage):
        shown = list(Repeats().once([*said(0, *block), *said(1, *block)]))
        assert [line.text for line in shown] == [*block, f"{block[-1]} (as rank 0)"]


def test_lines_that_only_begin_like_a_traceback_are_shown() -> None:
    lines = [*said(0, BLOCK[0], BLOCK[1]), *said(1, "epoch 2"), *said(0, "usage: a lot of memory")]
    assert list(Repeats().once(lines)) == lines
