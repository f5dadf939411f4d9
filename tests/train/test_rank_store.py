"""The rank store of a run: all ranks read what one writes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

import pytest

torch = pytest.importorskip("torch")

from dalsegno.train.ranks import LocalRankStore, RankStore, TorchRankStore


def ranks(world: int) -> list[RankStore]:
    store = torch.distributed.HashStore()
    return [TorchRankStore(store, rank, world) for rank in range(world)]


def at_once(calls: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)


def test_entry_of_one_rank_is_read_by_others() -> None:
    one, other = ranks(2)
    one.write("disk", 12)
    other.write("memory", [3, 1])
    assert one.read() == other.read() == {"disk": 12, "memory": [3, 1]}


def test_no_entry_is_lost_when_all_ranks_write_at_once() -> None:
    rank_stores = ranks(8)
    at_once(
        [
            lambda rank_store=rank_store, n=n: rank_store.write(f"entry{n}", n)
            for n, rank_store in enumerate(rank_stores)
        ]
    )  # type: ignore[misc]
    assert rank_stores[0].read() == {f"entry{n}": n for n in range(8)}


def test_first_write_of_stop_wins() -> None:
    rank_stores = ranks(8)
    calls = [
        lambda rank_store=rank_store, n=n: rank_store.write("stop", n, replace=False)
        for n, rank_store in enumerate(rank_stores)
    ]  # type: ignore[misc]
    at_once(calls)
    stop = rank_stores[0].read()["stop"]
    rank_stores[1].write("stop", 99, replace=False)
    assert stop in range(8)
    assert rank_stores[2].read()["stop"] == stop


def test_gather_returns_the_values_of_all_ranks() -> None:
    rank_stores, gathered = ranks(3), {}

    def gather(rank: int) -> None:
        gathered[rank] = rank_stores[rank].gather("subject", rank * 10)

    at_once([lambda rank=rank: gather(rank) for rank in range(3)])  # type: ignore[misc]
    assert gathered == {rank: [0, 10, 20] for rank in range(3)}


def test_single_rank_needs_no_store() -> None:
    rank_store = LocalRankStore()
    rank_store.write("stop", 1)
    rank_store.write("stop", 2, replace=False)
    assert (rank_store.read(), rank_store.gather("x", 5)) == ({"stop": 1}, [5])


def test_rank_stores_on_the_same_store_are_independent() -> None:
    store = torch.distributed.HashStore()
    first, second = (TorchRankStore(store, 0, 1, number) for number in range(2))
    first.write("stop", 7)
    assert first.gather("disk", "old") == ["old"]
    assert (second.read(), second.gather("disk", "new")) == ({}, ["new"])


def test_gather_waits_longer_than_the_timeout_for_collectives() -> None:
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(milliseconds=200))
    other = torch.distributed.TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(milliseconds=200))
    rank_stores, gathered = [TorchRankStore(store, 0, 2), TorchRankStore(other, 1, 2)], {}
    reading = threading.Event()

    def gather(rank: int) -> None:
        if rank == 0:
            reading.wait(0.6)
        gathered[rank] = rank_stores[rank].gather("disk", rank)

    at_once([lambda rank=rank: gather(rank) for rank in range(2)])  # type: ignore[misc]
    assert gathered == {0: [0, 1], 1: [0, 1]}
