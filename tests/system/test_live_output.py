"""Commands whose output is shown while they run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.waiting import eventually

from dalsegno.system.children import arguments
from dalsegno.system.live_output import run_showing

SRC = Path(__file__).parents[2] / "src"


def test_output_is_shown_line_by_line_and_its_end_is_kept():
    shown: list[str] = []
    done = run_showing(["sh", "-c", "seq 100; printf '10%%\\r20%%\\r'; printf '\\377\\n' >&2; exit 3"], shown.append)
    assert shown == [*map(str, range(1, 101)), "10%", "20%", "\ufffd"] and done.exit_code == 3
    assert done.stdout.splitlines() == shown[-50:]


def test_line_without_an_end_is_shown_in_pieces_and_kept_in_part():
    shown: list[str] = []
    done = run_showing(["sh", "-c", "head -c 200000 /dev/zero | tr '\\0' x; echo; echo end"], shown.append)
    assert "".join(shown) == "x" * 200000 + "end" and max(map(len, shown)) <= 1 << 16
    assert len(done.stdout) < 10000 and done.stdout.endswith("x\nend")


def test_signal_right_before_the_wait_ends_the_command():
    """A signal that another thread receives does not interrupt a wait, like one right before the wait."""
    shown: list[str] = []

    def show(line: str) -> None:
        shown.append(line)
        if line == "started":
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_showing(["sh", "-c", "echo started; sleep 30; echo ended"], show)
    finally:
        signal.signal(signal.SIGINT, before)
    assert shown == ["started"]


def test_command_does_not_outlive_a_killed_caller():
    program = (
        "from functools import partial; from dalsegno.system.live_output import run_showing; "
        "run_showing(['sh', '-c', 'echo $$; exec sleep 4322'], partial(print, flush=True))"
    )
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    with subprocess.Popen([sys.executable, "-c", program], env=env, stdout=subprocess.PIPE, text=True) as caller:
        assert caller.stdout
        command = int(caller.stdout.readline())
        caller.kill()
    eventually(lambda: arguments(command) == [])
