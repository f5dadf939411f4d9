"""Where a hanging worker is: py-spy's word if it is installed, else what its own faulthandler writes on a signal."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterable

from dalsegno.launch.agent.procs import catches, is_stopped
from dalsegno.launch.agent.script import STACKS_SIGNAL

WAIT_S = 1.0  # for the first line of it
QUIET_S = 0.05  # after the last one: whoever is killed while it tells is cut off
PYSPY_S = 5.0


def capture_all(workers: Iterable[tuple[int, str]]) -> None:
    """Of many processes at once, each in its own file: one that tells nothing does not delay the others."""
    asked = [threading.Thread(target=capture, args=each) for each in workers]
    for thread in asked:
        thread.start()
    for thread in asked:
        thread.join()


def capture(pid: int, path: str) -> None:
    """Append the stacks of a process to a file; a process that tells nothing is said to."""
    with contextlib.suppress(OSError):  # nowhere to write: the run is worth more than where it was
        if not (_by_pyspy(pid, path) or _by_signal(pid, path)):
            with open(path, "a") as file:
                file.write(f"process {pid} {_why_silent(pid)}\n")


def _why_silent(pid: int) -> str:
    if is_stopped(pid):
        return "was stopped from outside (SIGSTOP): it cannot tell where it is; install py-spy to see it"
    return "tells nothing of where it is: install py-spy to see it"


def _by_pyspy(pid: int, path: str) -> bool:
    program = shutil.which("py-spy")
    if program is None:
        return False
    with open(path, "ab") as file, contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            [program, "dump", "--pid", str(pid)], stdout=file, stderr=subprocess.DEVNULL, timeout=PYSPY_S, check=False
        )
        return done.returncode == 0
    return False


def _by_signal(pid: int, path: str) -> bool:
    if not catches(pid, STACKS_SIGNAL):
        return False
    before = os.stat(path).st_size
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, STACKS_SIGNAL)
    return _grows(path, before, WAIT_S) and _falls_quiet(path)


def _grows(path: str, size: int, within_s: float) -> bool:
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        if os.stat(path).st_size > size:
            return True
        time.sleep(0.01)
    return False


def _falls_quiet(path: str) -> bool:
    until = time.monotonic() + WAIT_S
    while _grows(path, os.stat(path).st_size, QUIET_S) and time.monotonic() < until:
        pass
    return True
