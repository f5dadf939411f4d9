"""Stacks of hanging workers."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dalsegno.runs.agent.evidence import WAIT_S, capture, capture_all, is_stopped
from tests.runs.warm_agent import Agent, script
from tests.waiting import eventually

HANGING = """
import time
def deep_in_thought():
    print("thinks", flush=True)
    time.sleep(600)
deep_in_thought()
"""


def hanging(agent: Agent, folder: Path) -> int:
    pid = agent.fork(script(folder, HANGING), stacks=str(folder / "stacks.txt"))
    eventually(lambda: "thinks" in (folder / "out").read_text())
    return pid


def test_hanging_worker_writes_its_stacks_and_continues(agent: Agent, tmp_path: Path):
    pid = hanging(agent, tmp_path)
    capture(pid, str(tmp_path / "stacks.txt"))
    capture(pid, str(tmp_path / "stacks.txt"))
    assert (tmp_path / "stacks.txt").read_text().count("deep_in_thought") == 2
    assert Path(f"/proc/{pid}").exists()


def test_process_without_stacks_is_reported(tmp_path: Path):
    with subprocess.Popen(["sleep", "60"]) as process:
        capture(process.pid, str(tmp_path / "stacks.txt"))
        assert "writes no stacks" in (tmp_path / "stacks.txt").read_text()
        process.kill()


def test_stopped_process_is_reported(tmp_path: Path):
    with subprocess.Popen(["sleep", "60"]) as process:
        process.send_signal(signal.SIGSTOP)
        eventually(lambda: is_stopped(process.pid))
        capture(process.pid, str(tmp_path / "stacks.txt"))
        assert "was stopped (SIGSTOP)" in (tmp_path / "stacks.txt").read_text()
        process.kill()


def test_unwritable_stacks_file_is_ignored(agent: Agent, tmp_path: Path):
    pid = hanging(agent, tmp_path)
    (tmp_path / "stacks.txt").unlink()
    capture(pid, str(tmp_path / "stacks.txt"))
    capture(pid, str(tmp_path / "no" / "folder" / "stacks.txt"))
    capture(pid, "")


def test_pipe_in_place_of_the_stacks_file_does_not_block_the_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    stacks, pyspy = tmp_path / "stacks.txt", tmp_path / "py-spy"
    os.mkfifo(stacks)
    with subprocess.Popen(["sleep", "60"]) as process:
        capture(process.pid, str(stacks))
        pyspy.write_text("#!/bin/sh\necho stack\n")
        pyspy.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        capture(process.pid, str(stacks))
        reader = os.open(stacks, os.O_RDONLY | os.O_NONBLOCK)  # with a reader, opening the pipe succeeds
        capture(process.pid, str(stacks))
        assert os.read(reader, 100) == b""
        os.close(reader)
        process.kill()


SILENT = """
import faulthandler, os, signal
from dalsegno.runs.agent.script import STACKS_SIGNAL
faulthandler.register(STACKS_SIGNAL, open(os.devnull, "w"))
print(flush=True)
signal.pause()
"""


def test_many_processes_are_captured_at_once(tmp_path: Path):
    """The processes handle the signal but do not write to the requested files, so every capture times out."""
    processes = [subprocess.Popen([sys.executable, "-c", SILENT], stdout=subprocess.PIPE) for _ in range(10)]
    files = {process.pid: tmp_path / f"{process.pid}.txt" for process in processes}
    try:
        for process in processes:
            assert process.stdout is not None and process.stdout.readline()
            files[process.pid].touch()
        began = time.monotonic()
        capture_all((pid, str(path)) for pid, path in files.items())
        assert time.monotonic() - began < 7 * WAIT_S, "in sequence they would take ten times that"
        assert all("writes no stacks" in path.read_text() for path in files.values())
    finally:
        for process in processes:
            process.kill()
            process.communicate()
