"""Signals in the script and in the children that it forks."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader

from dalsegno.train.signals import SaveSignal


@pytest.fixture
def wish() -> Iterator[SaveSignal]:
    wish = SaveSignal()
    wish.listen((signal.SIGUSR1,))
    yield wish
    wish.stop_listening()


class Slow:
    """A slow data set that returns the process id of its loader."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, number: int) -> int:
        time.sleep(0.2)
        return os.getpid()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2])
def test_signal_is_only_recorded(wish: SaveSignal, number: int) -> None:
    os.kill(os.getpid(), number)
    assert wish.received == number


def test_second_interrupt_raises_at_once(wish: SaveSignal) -> None:
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_forked_child_ends_on_sigterm(wish: SaveSignal) -> None:
    """Otherwise `Pool.terminate` would wait forever."""
    context = multiprocessing.get_context("fork")
    runs = context.Event()
    for _ in range(5):  # the signal may also arrive just before the child sleeps
        child = context.Process(target=lambda: (runs.set(), time.sleep(600)), daemon=True)
        child.start()
        assert runs.wait(60)
        child.terminate()
        child.join(60)
        assert child.exitcode == -signal.SIGTERM and wish.received is None
        runs.clear()


def test_data_loader_worker_ignores_interrupts(wish: SaveSignal) -> None:
    """A terminal sends SIGINT to all processes. SIGTERM ends a loader's workers; torch handles that."""
    loader: Any = DataLoader(Slow(), batch_size=1, num_workers=1, multiprocessing_context="fork")  # type: ignore[arg-type]
    batches = iter(loader)
    worker = int(next(batches))
    for number in (signal.SIGINT, signal.SIGUSR2):
        os.kill(worker, number)
    assert int(next(batches)) == worker
