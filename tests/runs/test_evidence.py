"""The evidence that a dead worker leaves."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dalsegno.runs.agent.evidence import MAX_CHARS, gather, last_error_line, last_traceback, oom_kills

SIMPLE = """Traceback (most recent call last):
  File "/home/ada/train.py", line 7, in <module>
    step()
ValueError: bad batch"""

CHAINED = """Traceback (most recent call last):
  File "/home/ada/train.py", line 3, in load
    open("x")
FileNotFoundError: x

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/home/ada/train.py", line 5, in load
    raise LoadError("x")
LoadError: x

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/home/ada/train.py", line 9, in <module>
    load()
RuntimeError: no data"""


def test_traceback_ends_with_the_exception_line():
    assert last_traceback(f"step 1\nstep 2\n{SIMPLE}\nbye\n") == SIMPLE


def test_chained_exceptions_are_one_traceback():
    assert last_traceback(f"hello\n{CHAINED}\nbye") == CHAINED


def test_last_of_several_tracebacks_counts():
    handled = SIMPLE.replace("bad batch", "was handled")
    assert last_traceback(f"{handled}\nwent on\n{SIMPLE}\n") == SIMPLE
    assert last_traceback(f"{CHAINED}\nwent on\n{SIMPLE}\n") == SIMPLE


def test_rank_prefix_of_torch_does_not_hide_a_traceback():
    prefixed = "\n".join(f"[rank2]: {line}" for line in CHAINED.splitlines())
    assert last_traceback(f"[rank2]: hello\n{prefixed}\n[rank2]: bye") == prefixed


def test_truncated_traceback_is_kept():
    assert last_traceback(SIMPLE.rpartition("\n")[0]) == SIMPLE.rpartition("\n")[0]


@pytest.mark.parametrize("text", ["", "step 1\nstep 2\n", "Traceback is a word"])
def test_log_without_a_traceback_gives_none(text: str):
    assert last_traceback(text) == ""


def test_output_of_an_earlier_worker_is_ignored(tmp_path: Path):
    log = tmp_path / "rank0.log"
    log.write_text(SIMPLE + "\n")
    start = log.stat().st_size
    with log.open("a") as file:
        file.write("killed in silence\n")
    assert gather(str(log), str(tmp_path / "none"), start) == {}
    assert gather(str(log), str(tmp_path / "none")) == {"traceback": SIMPLE}


def test_only_the_end_of_a_huge_log_is_read(tmp_path: Path):
    log = tmp_path / "rank0.log"
    with log.open("wb") as file:
        file.truncate(1 << 34)  # a sparse file of 16 GiB
        file.seek(0, 2)
        file.write(b"\n" + SIMPLE.encode())
    assert gather(str(log), str(tmp_path / "none")) == {"traceback": SIMPLE}


def test_pipes_of_the_script_do_not_block_the_agent(tmp_path: Path):
    log, error_file = tmp_path / "rank0.log", tmp_path / "rank0.error.json"
    os.mkfifo(log)
    os.mkfifo(error_file)
    assert gather(str(log), str(error_file)) == {}


def test_invalid_utf8_does_not_hide_a_traceback(tmp_path: Path):
    log = tmp_path / "rank0.log"
    log.write_bytes(b"\xff\xfe\n" + SIMPLE.encode())
    assert gather(str(log), str(tmp_path / "none")) == {"traceback": SIMPLE}


def test_very_long_traceback_keeps_its_end(tmp_path: Path):
    log = tmp_path / "rank0.log"
    log.write_text(SIMPLE + "x" * 20000)
    assert gather(str(log), str(tmp_path / "none")) == {"traceback": (SIMPLE + "x" * 20000)[-MAX_CHARS:]}


def test_missing_files_give_no_evidence(tmp_path: Path):
    assert gather(str(tmp_path / "no.log"), str(tmp_path / "no.json")) == {}


def test_torch_error_file_takes_precedence_over_the_log(tmp_path: Path):
    error = tmp_path / "error.json"
    extra = {"py_callstack": SIMPLE, "timestamp": "1700000000"}
    error.write_text(json.dumps({"message": {"message": "ValueError: bad batch", "extraInfo": extra}}))
    log = tmp_path / "rank0.log"
    log.write_text(CHAINED)
    assert gather(str(log), str(error)) == {"traceback": SIMPLE, "at": 1700000000.0}


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ({"message": "RuntimeError: in C++"}, {"traceback": "RuntimeError: in C++"}),
        ({"message": {"message": "only words"}}, {"traceback": "only words", "at": 0.0}),
        ({"message": {"extraInfo": {}}}, {}),
        ({"message": {"extraInfo": {"timestamp": "soon"}, "message": "x"}}, {}),
        ({"message": {"extraInfo": {"timestamp": "nan"}, "message": "x"}}, {"traceback": "x", "at": 0.0}),
        ({"message": {"extraInfo": {"timestamp": "inf"}, "message": "x"}}, {"traceback": "x", "at": 0.0}),
        ({"message": {"extraInfo": {"timestamp": 1e13}, "message": "x"}}, {"traceback": "x", "at": 0.0}),
        ({"message": {"extraInfo": {"timestamp": 10**400}, "message": "x"}}, {}),
        ({"message": {"message": {"not": "text"}}}, {}),
        ({}, {}),
        ([], {}),
        (None, {}),
    ],
)
def test_error_files_of_other_formats_are_read(tmp_path: Path, content: object, found: dict[str, object]):
    error = tmp_path / "error.json"
    error.write_text(json.dumps(content))
    assert gather(str(tmp_path / "no.log"), str(error)) == found


def test_log_is_used_if_the_error_file_is_broken(tmp_path: Path):
    (tmp_path / "error.json").write_text('{"mess')
    (tmp_path / "rank0.log").write_text(SIMPLE)
    assert gather(str(tmp_path / "rank0.log"), str(tmp_path / "error.json")) == {"traceback": SIMPLE}


def test_log_is_used_if_the_error_file_is_nested_too_deeply_or_too_large(tmp_path: Path):
    error, log = tmp_path / "error.json", tmp_path / "rank0.log"
    log.write_text(SIMPLE)
    for content in ("[" * 200_000, json.dumps({"message": "x" * (1 << 20)})):
        error.write_text(content)
        assert gather(str(log), str(error)) == {"traceback": SIMPLE}


def test_oom_kills_are_counted_by_the_kernel():
    assert oom_kills() >= 0


def test_syntax_error_is_found_without_a_traceback(tmp_path: Path):
    log = tmp_path / "rank0.log"
    done = subprocess.run([sys.executable, "-c", "compile('a = 1\\nprint(', 'train.py', 'exec')"], capture_output=True)
    printed = done.stderr.decode()
    shown = printed[printed.index('  File "train.py"') :]  # shown as the warm parent prints it, without its own frames
    log.write_text(f"hello\n{shown}")
    assert gather(str(log), "") == {"traceback": shown.rstrip("\n")}
    assert "line 2" in shown and "SyntaxError: '(' was never closed" in shown


@pytest.mark.parametrize(
    "line", ["train.py: error: the following arguments are required: --data", "bash: x: not found"]
)
def test_last_line_is_reported_if_it_looks_like_an_error(tmp_path: Path, line: str):
    log = tmp_path / "rank0.log"
    log.write_text(f"step 1\n{line}\n\n")
    assert last_error_line(str(log)) == {"traceback": line}
    assert last_error_line(str(log), since=log.stat().st_size) == {} == last_error_line(str(tmp_path / "none"))


def test_harmless_last_line_is_not_reported(tmp_path: Path):
    log = tmp_path / "rank0.log"
    log.write_text("an error that was handled\nstep 7\n")
    assert last_error_line(str(log)) == {} == gather(str(log), "")
