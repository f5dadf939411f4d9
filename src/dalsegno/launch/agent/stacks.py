"""Where a hanging worker is: py-spy's word if it is installed, else what its own faulthandler writes on a signal."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time

from dalsegno.launch.agent.parent import catches
from dalsegno.launch.agent.script import STACKS_SIGNAL

WAIT_S = 1.0


def capture(pid: int, path: str) -> None:
    """Append the stacks of a process to a file; a process that tells nothing is said to."""
    with contextlib.suppress(OSError):  # nowhere to write: the run is worth more than where it was
        if not (_by_pyspy(pid, path) or _by_signal(pid, path)):
            with open(path, "a") as file:
                file.write(f"process {pid} tells nothing of where it is: install py-spy to see it\n")


def _by_pyspy(pid: int, path: str) -> bool:
    program = shutil.which("py-spy")
    if program is None:
        return False
    with open(path, "ab") as file, contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            [program, "dump", "--pid", str(pid)], stdout=file, stderr=subprocess.DEVNULL, timeout=10, check=False
        )
        return done.returncode == 0
    return False


def _by_signal(pid: int, path: str) -> bool:
    if not catches(pid, STACKS_SIGNAL):
        return False
    before = os.stat(path).st_size
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, STACKS_SIGNAL)
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        if os.stat(path).st_size > before:
            return True
        time.sleep(0.01)
    return False
