"""A command that is told to end while it works: it tidies up first, unless it is told twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
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
Start = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    children: list[subprocess.Popen[str]] = []

    def begin(how: str) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [sys.executable, "-c", WORKS, how], env={**os.environ, "PYTHONPATH": str(SOURCE)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
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
    ("number", "code", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "told to end")]
)
def test_it_tidies_and_says_by_its_code_what_ended_it(start: Start, number: int, code: int, word: str):
    child = start("works")
    hear(child, "works")
    child.send_signal(number)
    out, err = child.communicate(timeout=PATIENCE_S)
    assert (out, err.strip(), child.returncode) == ("tidies\ntidy\n", f"error: {word}", code)


def test_a_second_ctrl_c_ends_it_at_once(start: Start):
    child = start("slow")
    hear(child, "works")
    child.send_signal(signal.SIGTERM)
    hear(child, "tidies")
    child.send_signal(signal.SIGINT)
    assert child.wait(PATIENCE_S) == -signal.SIGINT


def test_ctrl_c_while_it_tidies_after_its_work_leaves_nothing_half_done(start: Start):
    child = start("short")
    hear(child, "works")
    hear(child, "tidies")
    child.send_signal(signal.SIGINT)
    out, _ = child.communicate(timeout=PATIENCE_S)
    assert (out, child.returncode) == ("tidies\ntidy\n", 130)
