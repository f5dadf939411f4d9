"""A worker that was a standby cannot be distinguished from a freshly forked one. Both train on the CPU here.

tests/train/test_gpu_standby.py compares the state of CUDA.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.runs.warm_agent import Agent, script

pytestmark = pytest.mark.cluster  # imports torch

# A preloaded module that draws random numbers: the parent's generators are no longer in a state right after seeding.
DRAWS = """
import random
import numpy
for _ in range(5):
    random.gauss(0, 1), numpy.random.standard_normal()
FIRST = random.getstate()[1][9], int(numpy.random.get_state()[1][9])
"""
LOOKS = """
import atexit, ctypes, gc, hashlib, json, os, random, resource, signal, sys, threading
import draws, numpy, torch

def opened(number):
    try:
        return [os.readlink(f"/proc/self/fd/{number}"), os.get_inheritable(int(number)),
                open(f"/proc/self/fdinfo/{number}").read().split("flags:")[1].split()[0]]
    except OSError:  # the file with which this list was read
        return None

def environment():
    pointer, found = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ"), []
    while pointer[len(found)]:
        found.append(pointer[len(found)].decode())
    return sorted(found)

def digest(data):
    return hashlib.sha256(data).hexdigest()

tasks = sorted(map(int, os.listdir("/proc/self/task")))
lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
death = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(death))  # PR_GET_PDEATHSIG
kind, words, *rest = numpy.random.get_state()
found = {
    "argv": [sys.argv, sys.orig_argv], "name": __name__, "file": __file__, "cwd": os.getcwd(), "path": sys.path,
    "environment": [dict(os.environ), environment()], "modules": sorted(sys.modules),
    "files": {number: opened(number) for number in os.listdir("/proc/self/fd")},
    "output": [[each.line_buffering, each.write_through, each.fileno()] for each in (sys.stdout, sys.stderr)],
    "handlers": {number: repr(signal.getsignal(number)) for number in signal.valid_signals()},
    "signals": [lines[name] for name in ("SigPnd", "ShdPnd", "SigBlk", "SigIgn", "SigCgt")],
    "wakeup": signal.set_wakeup_fd(-1), "death signal": death.value,
    "niceness": [os.getpriority(os.PRIO_PROCESS, task) for task in tasks],
    "scheduling": [os.sched_getscheduler(0), sorted(os.sched_getaffinity(0))],
    "group": os.getpgid(0) == os.getpid(), "session": os.getsid(0), "umask": os.umask(0o22),
    "limits": [resource.getrlimit(number) for number in range(16)],
    "comm": open("/proc/self/comm").read(), "threads": [each.name for each in threading.enumerate()],
    "next thread": threading.Thread().name, "exit handlers": atexit._ncallbacks(), "collector": gc.isenabled(),
    "random": [random.getstate()[0], random.getstate()[1][-1], random.getstate()[2]],
    "numpy": [kind, *rest],
    "torch": [digest(torch.get_rng_state().numpy().tobytes()), torch.initial_seed(), torch.get_num_threads(),
              torch.is_grad_enabled(), str(torch.get_default_dtype()), torch.cuda.is_initialized(),
              torch.distributed.is_initialized()],
}
found["files"] = {number: each for number, each in found["files"].items() if each}
seeds = {"random": random.getstate()[1][9], "numpy": int(words[9]), "parent": draws.FIRST}
print(json.dumps([found, seeds]))
"""
ENV = {"RANK": "3", "PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
NICE = {os.getpriority(os.PRIO_PROCESS, 0)}  # of all threads


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    """Return the agent of a warm parent with torch, in whose own random generators numbers were drawn."""
    pytest.importorskip("torch")
    (tmp_path / "draws.py").write_text(DRAWS)
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    agent = Agent(tmp_path, "random", "numpy", "torch", "torch.distributed", "draws", env=env)
    assert agent.hear("warm")["warm"]["ok"]
    yield agent
    agent.end_workers()
    agent.close()


def test_script_in_a_standby_sees_the_same_process_as_in_a_fresh_fork(agent: Agent, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    task = agent.task(script(tmp_path, LOOKS), "--lr", "a b", env=ENV, cwd=work, name="ds:w3")

    def looked(code: int) -> Any:
        assert code == 0, (tmp_path / "err").read_text()
        text = (tmp_path / "out").read_text()
        (tmp_path / "out").unlink()
        return json.loads(text)

    fresh, fresh_seeds = looked(agent.run(task["script"], *task["args"], env=ENV, cwd=work, name="ds:w3"))
    waited, waited_seeds = looked(agent.run_in_standby(task, {**ENV, "RANK": "0", "ONLY_BEFORE": "yes"}))
    assert {name: (waited[name], value) for name, value in fresh.items() if waited[name] != value} == {}
    assert fresh["environment"][0] == ENV and fresh["cwd"] == str(work) and set(fresh["niceness"]) == NICE
    for name, parent in zip(("random", "numpy"), fresh_seeds["parent"], strict=True):
        assert len({fresh_seeds[name], waited_seeds[name], parent}) == 3, f"{name} is seeded in each process"
