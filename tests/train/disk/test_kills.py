"""Savers killed at any moment: the loaded checkpoint is one complete step, never older than the last committed one.

The suite runs a short form; DALSEGNO_LONG=1 makes it ten times as long.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from dalsegno.train.disk.format import parse_step, step_name
from dalsegno.train.disk.load import find_newest
from dalsegno.train.disk.verify import faults_of
from tests.train.disk.child import fork, wait
from tests.train.disk.states import commit, filled, names, save, share_of, write_share, yes

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
LONG = bool(os.environ.get("DALSEGNO_LONG"))
ROUNDS = 400 if LONG else 20
STRIDE = 1 if LONG else 4
WORLD = 2
TOUCHING = (
    "open",
    "os.mkdir",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.symlink",
    "os.scandir",
    "os.listdir",
    "fcntl.",
)


def loaded_step(folder: Path) -> int:
    """Return the step of the newest checkpoint, after checking that every number in it is the step."""
    found = find_newest(folder, warn=pytest.fail)
    assert found
    with found:
        tensors = {key: torch.empty(size, dtype=dtype) for key, (size, dtype) in found.sizes.items()}
        found.fill(tensors)
        numbers = {float(number) for tensor in tensors.values() for number in tensor.flatten()}
        assert numbers == {float(found.step)} and found.value("epoch") == found.step
        return found.step


def saver(folder: Path, rank: int, generation: int, start: int, committed: int) -> None:
    """Save step after step. Rank 0 writes each committed step to the pipe."""
    step = start
    while True:
        step += 1
        write_share(folder, share_of(filled(step), step, rank, WORLD), "run-a", generation)
        if rank == 0:
            commit(folder, step, WORLD, "run-a", generation, yes, keep=2, every=10)
            os.write(committed, f"{step}\n".encode())
        while not (folder / step_name(step)).exists():
            time.sleep(0.001)


def kill_savers(folder: Path, generation: int, start: int, after_s: float, chance: random.Random) -> int:
    """Kill both savers in random order. Return the last step reported as committed."""
    read, committed = os.pipe()
    pids = [fork(lambda rank=rank: saver(folder, rank, generation, start, committed)) for rank in range(WORLD)]  # type: ignore[misc]
    os.close(committed)
    time.sleep(after_s)
    for pid in chance.sample(pids, WORLD):
        os.kill(pid, signal.SIGKILL)
        time.sleep(chance.choice([0, 0, 0.01]))
    assert [wait(pid) for pid in pids] == [-signal.SIGKILL] * WORLD, "a saver failed by itself"
    with open(read) as lines:
        return max((int(line) for line in lines), default=start)


def test_savers_killed_at_random_moments_leave_a_complete_checkpoint(tmp_path: Path) -> None:
    chance = random.Random(os.environ.get("DALSEGNO_SEED", "da capo"))
    save(tmp_path, filled(1), 1, generation=0)  # this also imports all modules that savers need
    committed = 1
    for generation in range(1, ROUNDS + 1):
        committed = kill_savers(tmp_path, generation, committed, chance.uniform(0, 0.25), chance)
        step = loaded_step(tmp_path)
        assert step in (committed, committed + 1), "one complete step, not older than the last committed one"
        assert faults_of(tmp_path / "latest") == (), "`latest` never points at a partial checkpoint"
        assert 0 < (parse_step(os.readlink(tmp_path / "latest")) or 0) <= step
        committed = step
    save(tmp_path, filled(committed + 1), committed + 1, generation=ROUNDS + 1)
    assert [name for name in names(tmp_path) if name.startswith(".")] == [], "the next commit removes leftovers"
    assert committed > ROUNDS / 4, "the savers made progress"


@pytest.mark.parametrize("fault", ["none", "damaged"])
def test_saver_killed_before_each_file_system_call_leaves_a_complete_checkpoint(tmp_path: Path, fault: str) -> None:
    """Kill the saver before its first file-system call, then its second, and so on, or before every fourth one."""
    for number in range(1, 1000, STRIDE):
        folder = tmp_path / str(number)
        folder.mkdir()
        for step in (10, 20):
            save(folder, filled(step), step)
        if fault == "damaged":  # the same step exists already and is replaced
            (save(folder, filled(30), 30) / "__0_0.distcp").write_bytes(b"")
        code = wait(fork(lambda folder=folder, number=number: _die_at(folder, number)))  # type: ignore[misc]
        assert _step_of(folder) in (20, 30)
        save(folder, filled(40), 40, generation=3, keep=9)
        assert loaded_step(folder) == 40 and not [name for name in names(folder) if name.startswith(".")]
        if code == 0:
            return
        assert code == -signal.SIGKILL
    pytest.fail("the save never completed")


def _die_at(folder: Path, number: int) -> None:
    calls = 0

    def count(event: str, args: object) -> None:
        nonlocal calls
        if event.startswith(TOUCHING):
            calls += 1
            if calls == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    save(folder, filled(30), 30, generation=2, keep=1)


def _step_of(folder: Path) -> int:
    """Return the step of the newest checkpoint, skipping a damaged one."""
    found = find_newest(folder, warn=lambda text: None)
    assert found
    with found:
        assert found.value("epoch") == found.step
        return found.step
