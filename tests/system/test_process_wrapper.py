"""Tests that a program under a stand-in has the same signals, streams and end as without one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence

import pytest
from tests.cluster.conftest import SOURCE
from tests.waiting import PATIENCE_S, eventually

from dalsegno.system.children import start_ticks

STAND_IN = """
import os, sys
from dalsegno.system.process_wrapper import ProcessWrapper, end_as
over = lambda notes: "hangs" in notes
ended = ProcessWrapper(poll_s=0.05).run("/bin/sh", ["sh", "-c", sys.argv[1]], os.environ, "NOTES", over)
print(repr(ended), file=sys.stderr, flush=True)
end_as(ended.code)
"""


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def start(started: list[subprocess.Popen[str]], script: str, before: Sequence[str] = ()) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [*before, sys.executable, "-c", STAND_IN, script], env={**os.environ, "PYTHONPATH": str(SOURCE)}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    started.append(process)
    return process


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    return process.stdout.readline().strip()


def test_streams_notes_and_exit_code_are_those_of_the_program(started: list[subprocess.Popen[str]]):
    process = start(started, 'cat; eval "echo a note >&$NOTES"; exit 7')
    out, err = process.communicate("text", timeout=PATIENCE_S)
    assert (out, process.returncode) == ("text", 7)
    assert "notes='a note\\n', asked=False" in err


def test_wrapper_ends_by_the_signal_of_the_program(started: list[subprocess.Popen[str]]):
    process = start(started, "kill -KILL $$")
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == -signal.SIGKILL


def test_signals_are_forwarded_and_end_requests_recorded(started: list[subprocess.Popen[str]]):
    script = "trap 'echo one' USR1; trap 'exit 9' TERM; echo ready; while :; do sleep 0.05; done"
    process = start(started, script)
    assert line(process) == "ready"
    process.send_signal(signal.SIGUSR1)
    assert line(process) == "one"
    process.terminate()
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 9 and "asked=True" in err


def test_ignored_signals_stay_ignored(started: list[subprocess.Popen[str]]):
    process = start(started, "echo ready; read word; echo $word", ["nohup"])
    assert line(process) == "ready"
    process.send_signal(signal.SIGHUP)
    out, err = process.communicate("on\n", timeout=PATIENCE_S)
    assert out == "on\n" and "asked=False" in err


def test_hangup_is_distinguished_from_other_signals(started: list[subprocess.Popen[str]]):
    process = start(started, "trap 'exit 9' HUP; echo ready; while :; do sleep 0.05; done")
    assert line(process) == "ready"
    process.send_signal(signal.SIGHUP)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 9 and "asked=False, hung_up=True" in err


def test_hanging_program_is_killed(started: list[subprocess.Popen[str]]):
    process = start(started, 'eval "echo hangs >&$NOTES"; exec sleep 1000')
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1 and "code=1, notes='hangs" in err


def test_program_does_not_outlive_the_wrapper(started: list[subprocess.Popen[str]]):
    process = start(started, "echo $$; exec sleep 1000")
    child = int(line(process))
    process.kill()
    eventually(lambda: start_ticks(child) is None)
