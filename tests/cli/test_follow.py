"""Tests of following a run: output on stdout, messages on stderr, the exit code, and how to stop following."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dalsegno.cli.training.follow import format_line
from dalsegno.runs import journal
from dalsegno.runs.folder import RunFolder
from dalsegno.runs.logs import Line
from tests.cli.runs import end, make_run, members, say, tell
from tests.waiting import PATIENCE_S, eventually

pytestmark = pytest.mark.cluster  # real processes: too slow for the unit part
SOURCE = Path(__file__).parents[2] / "src"
# Follows as `run` does after submission. Slurm is never queried, because the coordinator's status is recent.
FOLLOW = """
import sys
from pathlib import Path
from dalsegno.cli.training.follow import follower_of
from dalsegno.cli.main import main
from dalsegno.cluster import SlurmHere
from dalsegno.runs.folder import RunFolder
sys.exit(follower_of(RunFolder(Path(sys.argv[1])), SlurmHere({})).follow())
"""


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    found = make_run(tmp_path / "runs", ranks=2, created=time.time())
    alive(found)
    return found


def alive(run: RunFolder) -> None:
    started = time.time()
    tell(run, coordinator_pid=1, updated=started + 3600, started=started, generation=1, world_size=2, nproc_per_node=2,
         nodes=members("n1"))  # fmt: skip


@pytest.fixture
def follow(run: RunFolder) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    children: list[subprocess.Popen[str]] = []

    def start(**streams: int) -> subprocess.Popen[str]:
        streams = streams or {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        argv = [sys.executable, "-c", FOLLOW, str(run.root)]
        child = subprocess.Popen(argv, env={**os.environ, "PYTHONPATH": str(SOURCE)}, text=True, **streams)  # type: ignore[call-overload]
        children.append(child)
        return child

    yield start
    for child in children:
        child.kill()
        child.wait()


def test_lines_have_a_rank_prefix_if_there_are_several_ranks() -> None:
    assert format_line(Line(1, 3, "a"), 4) == "[3] a"
    assert format_line(Line(1, 3, "a"), 11) == "[ 3] a"
    assert format_line(Line(1, 0, "a"), 1) == "a"
    assert format_line(Line(1, 0, " 10%\r 20%\r"), 1) == " 20%", "the final state of a progress bar"
    assert format_line(Line(1, 0, "a"), 2, colour=True) == "\x1b[36m[0] \x1b[0ma"


def test_escape_codes_reach_only_the_owner_of_the_run() -> None:
    line = Line(1, 0, "\x1b[32mgreen\x1b[0m")
    assert format_line(line, 1) == "\x1b[32mgreen\x1b[0m"
    assert format_line(line, 1, foreign=True) == "\\x1b[32mgreen\\x1b[0m"


def test_follow_prints_output_and_returns_exit_code(run: RunFolder, follow: Callable[..., subprocess.Popen[str]]):
    say(run, 1, 0, "step 1\n")
    say(run, 1, 1, "step 1\nno end")
    end(run, 7, report="Traceback: ValueError\n", message="rank 1: ValueError", world_size=2, nproc_per_node=2)
    out, err = follow().communicate(timeout=PATIENCE_S)
    assert out == "[0] step 1\n[1] step 1\n[1] no end\n"
    assert err.splitlines() == [
        "Traceback: ValueError",
        "error: run train-k3f9x ended with code 7 after 1:00: rank 1: ValueError",
        "hint: `dalsegno logs train-k3f9x` shows its output",
    ]


def test_follow_prints_new_output(run: RunFolder, follow: Callable[..., subprocess.Popen[str]]):
    child = follow()
    assert child.stdout and child.stderr
    assert child.stderr.readline() == "generation 1: 1 node, 2 processes\n"
    say(run, 1, 1, "later\n")
    assert child.stdout.readline() == "[1] later\n"
    say(run, 2, 0, "again\n")
    assert child.stdout.readline() == "[0] again\n"
    end(run)
    assert child.wait(PATIENCE_S) == 0
    assert child.stderr.read() == "run train-k3f9x is done after 1:00\n"


def formed(run: RunFolder, generation: int) -> None:
    journal.append(run.journal, 1.0, "generation", generation=generation, nodes=["n1"], nproc_per_node=2, wanted=1)


def test_generation_is_reported_before_its_output(run: RunFolder, follow: Callable[..., subprocess.Popen[str]]):
    tell(run, coordinator_pid=1, updated=time.time() + 3600, phase="starting", nodes=members("n1"))
    formed(run, 1)
    say(run, 1, 0, "step 1\n")
    child = follow(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert child.stdout
    assert [child.stdout.readline() for _ in range(3)] == [
        "run train-k3f9x starts on 1 node\n", "generation 1: 1 node, 2 processes\n", "[0] step 1\n",
    ]  # fmt: skip
    alive(run)
    formed(run, 2)
    say(run, 2, 1, "again\n")
    assert [child.stdout.readline() for _ in range(2)] == ["generation 2: 1 node, 2 processes\n", "[1] again\n"]
    end(run)
    assert child.stdout.read() == "run train-k3f9x is done after 1:00\n"


def test_generation_of_short_run_is_reported(run: RunFolder, follow: Callable[..., subprocess.Popen[str]]):
    formed(run, 1)
    end(run)
    _, err = follow().communicate(timeout=PATIENCE_S)
    assert err.splitlines() == ["generation 1: 1 node, 2 processes", "run train-k3f9x is done after 1:00"]


def test_notes_of_one_read_are_printed_once(run: RunFolder, follow: Callable[..., subprocess.Popen[str]]):
    for at in (1.0, 2.0):
        journal.append(run.journal, at, "note", text="n1 has threads")
    terms = {"coordinator_pid": 1, "updated": time.time() + 3600, "generation": 1, "nodes": members("n1")}
    tell(run, **terms, message="n1 has threads", note_at=2.0)
    child = follow()
    assert child.stderr
    assert [child.stderr.readline() for _ in range(2)] == ["generation 1: 0 nodes, 0 processes\n", "n1 has threads\n"]
    journal.append(run.journal, 3.0, "note", text="n1 has threads")
    end(run)
    assert child.stderr.readline() == "n1 has threads\n", "it was noted again"
    assert "n1 has threads" not in child.stderr.read()


def test_ctrl_c_in_a_script_cancels_the_run(run: RunFolder, follow: Callable[..., subprocess.Popen[str]]):
    child = follow()
    assert child.stderr
    child.stderr.readline()
    child.send_signal(signal.SIGINT)
    eventually(run.cancel.exists)
    assert child.wait(PATIENCE_S) == 130


def test_sigterm_of_follower_does_not_end_the_run(run: RunFolder, follow: Callable[..., subprocess.Popen[str]]):
    child = follow()
    assert child.stderr
    child.stderr.readline()
    child.send_signal(signal.SIGTERM)
    assert child.wait(PATIENCE_S) == 143
    assert child.stderr.read() == "run train-k3f9x continues; `dalsegno logs -f train-k3f9x` follows it again\n"
    assert not run.cancel.exists()


@pytest.mark.parametrize(
    ("answer", "code", "cancelled"), [("\n", 0, False), ("d\n", 0, False), ("c\n", 130, True), ("\x03", 0, False)]
)
def test_ctrl_c_in_a_terminal_asks(
    run: RunFolder, follow: Callable[..., subprocess.Popen[str]], answer: str, code: int, cancelled: bool
):
    ours, theirs = pty.openpty()
    child = follow(stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    seen = read_until(ours, "generation 1")
    child.send_signal(signal.SIGINT)
    seen = read_until(ours, "keep going (g)? [d] ")
    assert seen.endswith("\ndetach (d), cancel (c), keep going (g)? [d] ")
    if answer == "\x03":
        child.send_signal(signal.SIGINT)
    else:
        os.write(ours, answer.encode())
    drain(ours)
    assert child.wait(PATIENCE_S) == code
    assert run.cancel.exists() == cancelled


def test_ctrl_c_prompt_can_keep_following(run: RunFolder, follow: Callable[..., subprocess.Popen[str]]):
    ours, theirs = pty.openpty()
    child = follow(stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    read_until(ours, "generation 1")
    child.send_signal(signal.SIGINT)
    read_until(ours, "[d] ")
    os.write(ours, b"x\n")
    read_until(ours, "[d] ")
    os.write(ours, b"g\n")
    say(run, 1, 0, "still here\n")
    assert "still here" in read_until(ours, "still here")
    end(run)
    assert "is done" in drain(ours)
    assert child.wait(PATIENCE_S) == 0


def read_until(fd: int, text: str) -> str:
    seen = ""
    while text not in seen:
        seen += os.read(fd, 4096).decode()
    return seen.replace("\r\n", "\n")


def drain(fd: int) -> str:
    """Read until the other side is closed."""
    seen = b""
    try:
        while data := os.read(fd, 4096):
            seen += data
    except OSError:  # Linux reports a closed terminal with this error
        pass
    os.close(fd)
    return seen.decode()
