"""Killing all processes below an agent, including those that try to escape."""

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from dalsegno.runs.agent.evidence import catches
from dalsegno.system import children

SOURCE = str(Path(__file__).parents[2] / "src")

KILLER = """
import os, subprocess, sys, time
sys.path.insert(0, sys.argv[1])
from dalsegno.runs.agent.parent import kill_below
from dalsegno.runs.agent.evidence import descendants
from dalsegno.runs.agent.warm import adopt_orphans

adopt_orphans()
kept = subprocess.Popen(["sleep", "60"])
subprocess.Popen(["sh", "-c", sys.argv[2]])
while len(descendants(os.getpid())) < 1 + int(sys.argv[3]):
    time.sleep(0.002)
left = kill_below(keep=[kept.pid])
print(left, kept.poll(), [pid for pid in descendants(os.getpid()) if pid != kept.pid])
kept.kill()
"""


@pytest.mark.parametrize(
    ("script", "processes"),
    [
        ("exec sleep 600", 1),
        ("sleep 600 & sleep 600", 3),
        ("setsid sleep 600 & exec sleep 600", 2),  # starts a new session
        ("(setsid sleep 600 &) ; exec sleep 600", 2),  # a daemon, whose parent has exited
        ("trap '' TERM INT HUP; setsid sh -c 'trap \"\" TERM; sleep 600; sleep 600' & exec sleep 600", 3),
    ],
)
def test_kill_below_leaves_only_kept_processes(script: str, processes: int):
    mark = uuid.uuid4().hex
    argv = [sys.executable, "-c", KILLER, SOURCE, script, str(processes)]
    done = subprocess.run(
        argv, env={**os.environ, "TEST_MARK": mark}, capture_output=True, text=True, timeout=100, check=True
    )
    assert done.stdout.strip() == "[] None []"
    assert children.find(lambda pid: f"TEST_MARK={mark}".encode() in children.environment(pid)) == []


def test_process_catches_signals_it_has_handlers_for():
    before = signal.signal(signal.SIGUSR2, lambda number, frame: None)
    try:
        assert catches(os.getpid(), signal.SIGUSR2)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        assert not catches(os.getpid(), signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert not catches(os.getpid(), signal.SIGURG)


def test_missing_process_catches_nothing():
    assert not catches(0, signal.SIGTERM) and not catches(1 << 30, signal.SIGTERM)
