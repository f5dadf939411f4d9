"""The lock allows one run per folder."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")

from dalsegno.train.disk.folder import FolderLock, lock_folder
from dalsegno.train.errors import CheckpointError
from tests.train.disk.child import fork, wait


def held_by_a_child(folder: Path, run: str, then: Callable[[], None] = signal.pause) -> int:
    ready, notify = os.pipe()

    def hold() -> None:
        lock_folder(folder, run, warn=pytest.fail)
        os.write(notify, b"!")
        then()

    child = fork(hold)
    os.close(notify)
    assert os.read(ready, 1) == b"!"
    os.close(ready)
    return child


def end(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    wait(child)


def take(folder: Path, run: str, wait_s: float = 10.0) -> FolderLock:
    return lock_folder(folder, run, pytest.fail, wait_s)


def test_second_run_is_refused_with_the_name_of_the_first(tmp_path: Path) -> None:
    child = held_by_a_child(tmp_path, "run-a")
    try:
        with pytest.raises(CheckpointError, match=rf"in use by run-a \(host \S+, process {child}, since 20"):
            take(tmp_path, "run-b")
    finally:
        end(child)
    take(tmp_path, "run-b").release()


def test_lock_ends_with_its_process_even_if_children_remain(tmp_path: Path) -> None:
    orphan, notify = os.pipe()

    def fork_and_pause() -> None:
        grandchild = fork(signal.pause)
        os.write(notify, f"{grandchild}\n".encode())
        signal.pause()

    child = held_by_a_child(tmp_path, "run-a", then=fork_and_pause)
    grandchild = int(os.read(orphan, 20))
    end(child)
    try:
        take(tmp_path, "run-b", wait_s=0).release()
    finally:
        os.kill(grandchild, signal.SIGKILL)


def test_same_run_waits_for_its_old_process_to_exit(tmp_path: Path) -> None:
    def die_in_a_second() -> None:
        signal.alarm(1)
        signal.pause()

    child = held_by_a_child(tmp_path, "run-a", then=die_in_a_second)
    lock = take(tmp_path, "run-a")
    assert os.waitstatus_to_exitcode(os.waitpid(child, os.WNOHANG)[1]) == -signal.SIGALRM
    lock.release()


def test_old_process_of_the_same_run_that_does_not_exit_is_named(tmp_path: Path) -> None:
    child = held_by_a_child(tmp_path, "run-a")
    try:
        with pytest.raises(CheckpointError, match=f"in use by run-a .*process {child}"):
            take(tmp_path, "run-a", wait_s=0.1)
    finally:
        end(child)


def test_stale_lock_of_a_lost_host_does_not_stop_its_own_run(tmp_path: Path) -> None:
    child = held_by_a_child(tmp_path, "run-a")
    try:
        record = tmp_path / ".dalsegno.lock"
        record.write_text(record.read_text().replace(os.uname().nodename, "gpu-7-that-was"))
        warned: list[str] = []
        lock_folder(tmp_path, "run-a", warned.append, wait_s=0.1).release()
        assert "still locked by an earlier process of this run" in warned[0] and "gpu-7-that-was" in warned[0]
    finally:
        end(child)


def test_process_may_lock_twice_for_one_run_but_not_for_two(tmp_path: Path) -> None:
    first, second = take(tmp_path, "run-a"), take(tmp_path, "run-a")
    with pytest.raises(CheckpointError, match="in use by run-a"):
        take(tmp_path, "run-b")
    first.release()

    def refused() -> None:
        with pytest.raises(CheckpointError):
            take(tmp_path, "run-b")

    assert wait(fork(refused)) == 0, "still held by the second"
    second.release()
    take(tmp_path, "run-b").release()


def test_missing_folder_cannot_be_locked(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the folder no longer exists"):
        take(tmp_path / "nowhere", "run-a")
