"""A standby worker is prepared at low priority, and no thread keeps that priority when the script begins."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dalsegno.runs.agent.standby_process import (
    FREE_MIB,
    LOWEST_NICENESS,
    GpuMemory,
    ThreadPriority,
    can_undo_niceness,
    find_lack_of_memory,
    lower_priority,
    restore_priority,
)
from tests.runs.warm_agent import Agent, script

SOURCE = str(Path(__file__).parents[2] / "src")
USUAL = ThreadPriority.of(threading.get_native_id())


@contextmanager
def helper_thread_of_preparation(can_undo: bool) -> Iterator[int]:
    """Start a thread from one at low priority, as CUDA does, and return its id. The first thread has ended by then."""
    ready, end, ids, helpers = threading.Event(), threading.Event(), list[int](), list[threading.Thread]()

    def help_out() -> None:
        ids.append(threading.get_native_id())
        ready.set()
        end.wait()

    def prepare() -> None:
        lower_priority(can_undo)
        helpers.append(threading.Thread(target=help_out))
        helpers[0].start()

    preparing = threading.Thread(target=prepare)
    preparing.start()
    preparing.join()
    ready.wait()
    try:
        yield ids[0]
    finally:
        end.set()
        helpers[0].join()


@pytest.mark.skipif(os.geteuid() != 0, reason="a plain user cannot undo a niceness")
def test_niceness_of_helper_threads_is_restored() -> None:
    with helper_thread_of_preparation(can_undo=True) as thread:
        assert ThreadPriority.of(thread) == ThreadPriority(LOWEST_NICENESS, USUAL.policy)
        restore_priority(USUAL)
        assert ThreadPriority.of(thread) == ThreadPriority.of(threading.get_native_id()) == USUAL


def test_policy_of_helper_threads_is_restored_without_privileges() -> None:
    with helper_thread_of_preparation(can_undo=False) as thread:
        assert ThreadPriority.of(thread) == ThreadPriority(USUAL.niceness, os.SCHED_BATCH)
        restore_priority(USUAL)
        assert ThreadPriority.of(thread) == ThreadPriority.of(threading.get_native_id()) == USUAL


# The whole order of a standby worker, in a process of a user who may not undo a niceness.
PLAIN_USER = """
import json, os, resource, sys, threading
sys.path.insert(0, sys.argv[1])
from dalsegno.runs.agent.standby_process import ThreadPriority, can_undo_niceness, lower_priority, restore_priority
resource.setrlimit(resource.RLIMIT_NICE, (0, 0))
if os.geteuid() == 0:
    os.setuid(65534)
usual, ready, end, found = ThreadPriority.of(threading.get_native_id()), threading.Event(), threading.Event(), []
def help_out():
    found.append(threading.get_native_id())
    ready.set()
    end.wait()
def prepare():
    found.append(can_undo_niceness())
    lower_priority(found[0])
    threading.Thread(target=help_out).start()
preparing = threading.Thread(target=prepare)
preparing.start()
preparing.join()
ready.wait()
lowered = ThreadPriority.of(found[1])
restore_priority(usual)
print(found[0], lowered != usual, ThreadPriority.of(found[1]) == ThreadPriority.of(os.getpid()) == usual)
end.set()
"""


def test_plain_user_gets_the_usual_priority_back() -> None:
    ended = subprocess.run([sys.executable, "-c", PLAIN_USER, SOURCE], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, "False True True\n"), ended.stderr


# A torch whose CUDA only starts a thread, as the driver does when it creates a context.
TORCH = """
import contextlib, sys, threading
sys.modules["torch.cuda"] = sys.modules["torch"]
cuda, float32, bfloat16 = sys.modules["torch"], 1, 2

class Matrix:
    def __matmul__(self, other):
        return self

@contextlib.contextmanager
def device(number):
    global driver
    driver = threading.Thread(target=threading.Event().wait, daemon=True)
    driver.start()
    yield

def nothing(*_):
    return None

ones = lambda *_, **__: Matrix()
is_available, device_count, is_initialized = lambda: True, lambda: 1, lambda: False
get_device_properties = synchronize = empty_cache = reset_peak_memory_stats = reset_accumulated_memory_stats = nothing
"""
LOOKS = """
import os, torch
for thread in (os.getpid(), torch.driver.native_id):
    print(os.getpriority(os.PRIO_PROCESS, thread), os.sched_getscheduler(thread))
"""


def test_threads_that_cuda_started_have_the_usual_priority_in_the_script(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(TORCH)
    agent = Agent(tmp_path, "torch", env={**os.environ, "PYTHONPATH": str(tmp_path)})
    try:
        assert agent.hear("warm")["warm"]["ok"]
        task = agent.task(script(tmp_path, LOOKS), name="ds:w0")
        code = agent.run_in_standby(task, {"PATH": os.environ["PATH"]}, gpu=True)
        expected = 2 * f"{USUAL.niceness} {USUAL.policy}\n"
        assert (code, (tmp_path / "out").read_text()) == (0, expected), (tmp_path / "err").read_text()
    finally:
        agent.end_workers()
        agent.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a user who can undo a niceness")
def test_root_can_undo_niceness_and_keeps_its_own() -> None:
    assert can_undo_niceness()
    assert ThreadPriority.of(threading.get_native_id()) == USUAL


@pytest.mark.parametrize(
    ("free_mib", "why"),
    [
        (0, "GPU 3 has only 0 MiB of free memory"),
        (FREE_MIB - 1, f"GPU 3 has only {FREE_MIB - 1} MiB of free memory"),
        (FREE_MIB, ""),
        (100_000, ""),
    ],
)
def test_standby_needs_free_memory_on_its_gpu(free_mib: int, why: str) -> None:
    assert find_lack_of_memory(3, GpuMemory(total=144_000 << 20, free=free_mib << 20)) == why


def test_standby_is_prepared_if_the_free_memory_is_unknown() -> None:
    assert find_lack_of_memory(0, None) == ""
