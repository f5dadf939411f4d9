"""Who hears a signal, and what it does to children that the script has forked."""

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

from dalsegno.train.signals import SaveWish


@pytest.fixture
def wish() -> Iterator[SaveWish]:
    heard = SaveWish()
    heard.listen((signal.SIGUSR1,))
    yield heard
    heard.stop_listening()


class Slow:
    """Data that tells who loads it, and takes its time."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, number: int) -> int:
        time.sleep(0.2)
        return os.getpid()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_is_only_noted(wish: SaveWish, number: int) -> None:
    os.kill(os.getpid(), number)
    assert wish.heard == number


def test_a_second_interrupt_does_not_wait(wish: SaveWish) -> None:
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_a_child_that_is_told_to_end_ends(wish: SaveWish) -> None:
    """Or `Pool.terminate` would wait for ever."""
    context = multiprocessing.get_context("fork")
    runs = context.Event()
    for _ in range(5):  # told while it is about to wait, too
        child = context.Process(target=lambda: (runs.set(), time.sleep(600)), daemon=True)
        child.start()
        assert runs.wait(60)
        child.terminate()
        child.join(60)
        assert child.exitcode == -signal.SIGTERM and wish.heard is None
        runs.clear()


def test_who_loads_the_data_for_the_step_in_flight_goes_on(wish: SaveWish) -> None:
    """A terminal sends an interrupt to all processes. (SIGTERM ends a loader's workers: torch sees to that.)"""
    loader: Any = DataLoader(Slow(), batch_size=1, num_workers=1, multiprocessing_context="fork")  # type: ignore[arg-type]
    batches = iter(loader)
    worker = int(next(batches))
    for number in (signal.SIGINT, signal.SIGUSR2):
        os.kill(worker, number)
    assert int(next(batches)) == worker
