"""Tests of interrupted commands: they clean up first, unless they are interrupted twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.waiting import PATIENCE_S

SOURCE = Path(__file__).parents[2] / "src"
WORKS = """
import sys, time, types
import click
from dalsegno.cli import main
from dalsegno.cli.interrupts import stoppable, to_the_end

tidied = []

def tidy():
    tidied.append(1)
    print("tidies", flush=True)
    if how == "slow" or how == "short" and len(tidied) == 1:
        time.sleep(1000)
    print("tidy", flush=True)

@click.command()
def command():
    with stoppable():
        try:
            print("works", flush=True)
            time.sleep(0 if how == "short" else 1000)
        finally:
            to_the_end(tidy)

how = sys.argv.pop()
sys.modules["dalsegno.cli.work"] = types.SimpleNamespace(command=command)
sys.argv, main.COMMANDS["work"] = ["dalsegno", "work"], ""
main.main()
"""
IN_TERMINAL = """
import fcntl, os, signal, sys, termios
os.setsid()
fcntl.ioctl(2, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    children: list[subprocess.Popen[str]] = []

    def begin(
        how: str, before: Sequence[str] = (sys.executable,), stdin: int | None = None, stderr: int = subprocess.PIPE
    ) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [*before, "-c", WORKS, how], env={**os.environ, "PYTHONPATH": str(SOURCE)}, text=True,
            stdin=stdin, stdout=subprocess.PIPE, stderr=stderr,
        )  # fmt: skip
        children.append(child)
        return child

    yield begin
    for child in children:
        child.kill()
        child.communicate()


def hear(child: subprocess.Popen[str], line: str) -> None:
    assert child.stdout is not None and child.stdout.readline() == f"{line}\n"


@pytest.mark.parametrize(
    ("number", "code", "word"),
    [
        (signal.SIGINT, 130, "interrupted"),
        (signal.SIGTERM, 143, "terminated"),
        (signal.SIGHUP, 129, "the terminal was closed"),
    ],
)
def test_signal_runs_cleanup_and_sets_exit_code(start: Start, number: int, code: int, word: str):
    child = start("works")
    hear(child, "works")
    child.send_signal(number)
    out, err = child.communicate(timeout=PATIENCE_S)
    assert (out, err.strip(), child.returncode) == ("tidies\ntidy\n", f"error: {word}", code)


def test_second_ctrl_c_ends_at_once(start: Start):
    child = start("slow")
    hear(child, "works")
    child.send_signal(signal.SIGTERM)
    hear(child, "tidies")
    child.send_signal(signal.SIGINT)
    assert child.wait(PATIENCE_S) == -signal.SIGINT


def test_closed_terminal_does_not_prevent_cleanup(start: Start):
    ours, theirs = os.openpty()
    child = start("works", before=[sys.executable, "-c", IN_TERMINAL], stdin=theirs, stderr=theirs)
    os.close(theirs)
    hear(child, "works")
    os.close(ours)
    out, _ = child.communicate(timeout=PATIENCE_S)
    assert (out, child.returncode) == ("tidies\ntidy\n", 129)


def test_nohup_ignores_closed_terminal(start: Start):
    child = start("works", before=["sh", "-c", "trap '' HUP; exec \"$@\"", "sh", sys.executable])
    hear(child, "works")
    child.send_signal(signal.SIGHUP)
    child.send_signal(signal.SIGTERM)
    assert child.communicate(timeout=PATIENCE_S)[0] == "tidies\ntidy\n"
    assert child.returncode == 143


def test_second_hangup_does_not_interrupt_cleanup(start: Start):
    child = start("slow")
    hear(child, "works")
    child.send_signal(signal.SIGHUP)
    hear(child, "tidies")
    child.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.3)
    child.send_signal(signal.SIGTERM)
    assert child.wait(PATIENCE_S) == -signal.SIGTERM


def test_ctrl_c_during_cleanup_completes_it(start: Start):
    child = start("short")
    hear(child, "works")
    hear(child, "tidies")
    child.send_signal(signal.SIGINT)
    out, _ = child.communicate(timeout=PATIENCE_S)
    assert (out, child.returncode) == ("tidies\ntidy\n", 130)
