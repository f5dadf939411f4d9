"""No sample is seen twice or left out, wherever a run is interrupted and however its loop is written."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")


from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, RandomSampler

from dalsegno.train.errors import CheckpointError
from dalsegno.train.rank_state import DataPlace, RankOwnState, find_place

DATA = list(range(22))


def random_loader() -> tuple[Any, DataPlace]:
    sampler = RandomSampler(DATA)
    return DataLoader(DATA, batch_size=4, sampler=sampler), DataPlace(sampler)


def loader(workers: int = 0, drop_last: bool = False) -> tuple[Any, DataPlace]:
    sampler = DistributedSampler(DATA, num_replicas=2, rank=1, shuffle=True, seed=5)
    loaded = DataLoader(DATA, batch_size=4, sampler=sampler, num_workers=workers, drop_last=drop_last)
    return loaded, DataPlace(sampler)


def numbered(batches: Any) -> Iterator[list[int]]:
    """Loop over the data without end, as many scripts do."""
    for epoch in itertools.count():
        batches.sampler.set_epoch(epoch)
        for batch in batches:
            yield batch.tolist()


def unnumbered(batches: Any) -> Iterator[list[int]]:
    while True:
        for batch in batches:
            yield batch.tolist()


def one_pass(batches: Any) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


def train(stream: Iterator[list[int]], place: DataPlace, steps: int) -> list[list[int]]:
    seen = []
    for _ in range(steps):
        seen.append(next(stream))
        place.step_done(len(seen[-1]))
    return seen


@pytest.mark.parametrize("loop", [numbered, unnumbered])
@pytest.mark.parametrize("stop", range(9))
def test_resumed_run_sees_the_same_data_as_an_uninterrupted_one(loop: Any, stop: int) -> None:
    batches, place = loader()
    whole = train(loop(batches), place, 9)
    batches, place = loader()
    first = train(loop(batches), place, stop)
    kept = place.state_dict()
    batches, place = loader()
    place.load_state_dict(kept)
    assert first + train(loop(batches), place, 9 - stop) == whole


@pytest.mark.parametrize("stop", [1, 5, 6, 7])
def test_sampler_order_from_torch_is_reproduced(stop: int) -> None:
    torch.manual_seed(3)
    batches, place = random_loader()
    whole = train(unnumbered(batches), place, 9)
    torch.manual_seed(3)
    batches, place = random_loader()
    first = train(unnumbered(batches), place, stop)
    kept, drawn = place.state_dict(), torch.get_rng_state()
    torch.manual_seed(99)
    batches, place = random_loader()
    place.load_state_dict(kept)
    torch.set_rng_state(drawn)
    assert first + train(unnumbered(batches), place, 9 - stop) == whole


@pytest.mark.parametrize("make", [loader, random_loader])
def test_finished_epoch_is_not_repeated(make: Any) -> None:
    torch.manual_seed(3)
    batches, place = make()
    place.number(0)
    train(iter(one_pass(batches)), place, len(batches))
    place.finish(0)
    kept, drawn = place.state_dict(), torch.get_rng_state()
    second = one_pass(batches)
    assert (kept["epoch"], kept["samples"]) == (1, 0)
    batches, place = make()
    place.load_state_dict(kept)
    torch.set_rng_state(drawn)
    assert one_pass(batches) == second


def test_prefetched_samples_do_not_count() -> None:
    batches, place = loader(workers=2)
    seen = train(numbered(batches), place, 1)
    kept = place.state_dict()
    batches, place = loader()
    place.load_state_dict(kept)
    again = train(numbered(batches), place, 2)
    assert (kept["epoch"], kept["samples"]) == (0, 4)
    samples = [sample for batch in seen + again for sample in batch]
    assert len(samples) == len(set(samples))


def test_batch_size_is_found_in_the_batch_sampler() -> None:
    batches, place = loader(drop_last=True)
    stream = numbered(batches)
    next(stream)
    place.step_done(None)
    assert place.samples == 4


def test_sampler_without_a_batch_sampler_needs_the_number_of_samples() -> None:
    place = DataPlace(RandomSampler(DATA))
    with pytest.raises(CheckpointError, match="samples="):
        place.step_done(None)


def test_tracked_sampler_keeps_its_type_and_length() -> None:
    batches, _place = loader()
    assert isinstance(batches.sampler, DistributedSampler)
    assert len(batches) == 3
    assert type(batches.sampler).__name__ == "DistributedSampler"


class Pairs(BatchSampler):
    """A custom batch sampler that keeps neighbours together."""

    def __init__(self) -> None:
        super().__init__(range(0, len(DATA), 2), 1, False)

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[first, first + 1] for first in range(0, len(DATA), 2)])


def loader_alone() -> Any:
    return DataLoader(DATA, batch_size=4)


def with_own_batches() -> Any:
    return DataLoader(DATA, batch_sampler=Pairs())


def with_plain_batches() -> Any:
    return DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 4, drop_last=True))


@pytest.mark.parametrize("make", [loader_alone, with_own_batches, with_plain_batches])
@pytest.mark.parametrize("give", [lambda batches: batches, lambda batches: batches.batch_sampler])
@pytest.mark.parametrize("samples", [None, 4])
def test_position_is_found_in_a_loader_and_in_a_batch_sampler(make: Any, give: Any, samples: int | None) -> None:
    """A custom batch sampler is counted in batches, whatever number of samples the script passes."""
    torch.manual_seed(3)
    batches = make()
    place, stream = find_place(give(batches)), unnumbered(batches)
    assert place is not None
    whole = []
    for step in range(5):
        whole.append(next(stream))
        place.step_done(samples)
        if step == 2:
            kept, drawn = place.state_dict(), torch.get_rng_state()
    batches = make()
    again = find_place(give(batches))
    assert again is not None
    again.load_state_dict(kept)
    torch.set_rng_state(drawn)
    stream = unnumbered(batches)
    assert [next(stream), next(stream)] == whole[3:]


def test_iterable_dataset_has_no_position() -> None:
    class Stream(IterableDataset):  # type: ignore[type-arg,misc]
        def __iter__(self) -> Iterator[int]:
            return iter(DATA)

    assert find_place(DataLoader(Stream(), batch_size=4)) is None
    with pytest.raises(CheckpointError, match="StatefulDataLoader"):
        RankOwnState(DataLoader(Stream(), batch_size=4))
