"""The first process of a batch step restarts its coordinator and passes on its exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dalsegno.runs.coordinator.program import CRASHED, MAX_SHORT_LIVES, supervise
from tests.waiting import PATIENCE_S, eventually

pytestmark = pytest.mark.cluster  # real processes: too slow for the unit part

LIVES = "import os, sys; f = open(sys.argv[1], 'a'); f.write('x'); f.close(); n = os.stat(sys.argv[1]).st_size; "


def supervised(tmp_path: Path, then: str) -> tuple[int, int]:
    """Return the exit code, and how often the process was started."""
    lives = tmp_path / "lives"
    code = supervise([sys.executable, "-c", LIVES + then, str(lives)])
    return code, lives.stat().st_size


def test_coordinator_that_exits_is_not_restarted(tmp_path: Path) -> None:
    assert supervised(tmp_path, "sys.exit(3)") == (3, 1)


def test_killed_or_crashed_coordinator_is_restarted(tmp_path: Path) -> None:
    assert supervised(tmp_path, f"os.kill(os.getpid(), 9) if n == 1 else sys.exit({CRASHED} if n == 2 else 0)") == (
        0,
        3,
    )


def test_coordinator_that_always_dies_is_not_restarted_forever(tmp_path: Path) -> None:
    assert supervised(tmp_path, "os.kill(os.getpid(), 9)") == (137, MAX_SHORT_LIVES)


@pytest.mark.parametrize(("does", "code"), [("signal.signal(15, lambda *_: sys.exit(7))", 7), ("pass", 143)])
def test_signals_of_slurm_reach_the_coordinator_and_prevent_a_restart(tmp_path: Path, does: str, code: int) -> None:
    ready = tmp_path / "ready"
    child = f"import signal, sys, time; {does}; open({str(ready)!r}, 'w')\nwhile True: time.sleep(0.1)"
    imports = "import sys; from dalsegno.runs.coordinator.program import supervise"
    keeper = f"{imports}; sys.exit(supervise([sys.executable, '-c', {child!r}]))"
    process = subprocess.Popen(
        [sys.executable, "-c", keeper], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    eventually(ready.exists)
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == code


def test_signal_during_the_start_reaches_the_coordinator(tmp_path: Path) -> None:
    """At any time after `supervise` has begun, the coordinator gets the signal."""
    child = "import time\nwhile True: time.sleep(0.1)"
    keeper = (
        "import os, signal, sys\n"
        "from dalsegno.runs.coordinator import program\n"
        "sys.addaudithook(lambda event, _: event == 'subprocess.Popen' and os.kill(os.getpid(), signal.SIGTERM))\n"
        f"sys.exit(program.supervise([sys.executable, '-c', {child!r}]))"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", keeper], env=env, timeout=PATIENCE_S, check=False).returncode == 143
