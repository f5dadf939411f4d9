"""Snapshots of a training without an agent are removed when all its processes are gone, not before."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from dalsegno.train.memory.files import hold, is_current, sweep_abandoned
from dalsegno.train.memory.slots import Slots
from tests.train.memory.processes import fork
from tests.train.memory.run_files import list_run_files
from tests.train.memory.states import filled

SCRIPT = """
import os, sys, torch, time
from dalsegno.train import Checkpointer
model = torch.nn.Linear(4, 4)
steps = Checkpointer(sys.argv[1], model=model, disk_every=1)
for step in steps.steps(1000):
    steps.done()
    if step == 3:
        from dalsegno.train.memory.files import find_folder, run_of
        names = [name for name in sorted(os.listdir(find_folder())) if run_of(name) == steps._where.run]
        print(find_folder(), *names, flush=True)
        time.sleep(600)
"""


def test_snapshots_of_a_killed_training_are_removed_by_the_next_one(shm: Path) -> None:
    def train() -> None:
        hold("a", 0, shm)
        Slots("a", 0, 1, folder=shm).write(filled(1))
        os.kill(os.getpid(), signal.SIGKILL)

    pid = fork(train)
    os.waitpid(pid, 0)
    # These snapshots belong to a run with a launcher, which has no lock.
    Slots("launched", 0, 1, folder=shm).write(filled(1))
    assert list_run_files("a", shm) == ["a.0.0", "a.0.1", "a.0.alive"]
    assert sweep_abandoned(shm) == [("a", 0)]
    assert list_run_files("a", shm) == [] and list_run_files("launched", shm) == ["launched.0.0", "launched.0.1"]


def test_snapshots_stay_while_a_process_that_inherited_the_lock_lives(shm: Path) -> None:
    """The saver still writes the snapshot of the killed training to disk."""
    fd = hold("a", 0, shm)
    Slots("a", 0, 1, folder=shm).write(filled(1))
    assert sweep_abandoned(shm) == [], "this process holds the lock"
    with subprocess.Popen(["sleep", "600"], pass_fds=[fd]) as saver:
        os.close(fd)
        assert sweep_abandoned(shm) == [] and len(list_run_files("a", shm)) == 3
        saver.kill()
    assert sweep_abandoned(shm) == [("a", 0)]


def test_restarted_rank_is_not_swept_by_its_predecessor(shm: Path) -> None:
    before = hold("a", 0, shm)
    assert is_current(before, "a", 0, shm)
    now = hold("a", 0, shm)
    assert is_current(now, "a", 0, shm) and not is_current(before, "a", 0, shm)
    os.close(before)
    assert sweep_abandoned(shm) == []
    os.close(now)


@pytest.mark.cluster  # processes with torch: too slow for the unit part
def test_training_without_a_launcher_leaves_nothing_once_another_starts(tmp_path: Path) -> None:
    """End to end, in this user's real folder."""
    first = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "one")], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert first.stdout is not None
    folder, *names = first.stdout.readline().split()
    assert [name.rpartition(".")[2] for name in names] == ["0", "1", "2", "alive"]
    assert all((Path(folder) / name).exists() for name in names)
    savers = subprocess.run(["pgrep", "-P", str(first.pid)], capture_output=True, text=True, check=False).stdout.split()
    for pid in (*map(int, savers), first.pid):  # the saver is killed first, because it would clean up
        os.kill(pid, signal.SIGKILL)
    first.wait()
    assert all((Path(folder) / name).exists() for name in names)
    second = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "two")], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert second.stdout is not None and second.stdout.readline()
    assert not any((Path(folder) / name).exists() for name in names)
    second.send_signal(signal.SIGTERM)
    second.kill()
    second.wait()
