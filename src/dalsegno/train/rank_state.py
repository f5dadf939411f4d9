"""The state that belongs to one rank: random states, the position in the data, and the script's per-rank objects."""

from __future__ import annotations

import gc
import hashlib
import itertools
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from dalsegno.train.errors import CheckpointError

# Random states


def take_randomness() -> dict[str, Any]:
    """Return the states of the random generators of Python and torch, and of numpy and the GPU if they are used."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        states["numpy"] = numpy.random.get_state()
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_randomness(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "numpy" in states:
        import numpy

        numpy.random.set_state(states["numpy"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def digest(states: Mapping[str, Any] | None) -> str:
    """Return a digest of torch's random state. Ranks with the same digest draw the same numbers."""
    torchs = bytes(states["torch"].tolist()) if states else b""
    return hashlib.sha256(torchs).hexdigest()


def seed_for(rank: int, saved: Sequence[str], world_then: int, now: Sequence[str]) -> int | None:
    """Return the seed for a rank that did not exist when the state was saved.

    `saved` contains the digests of the ranks' saved random states. `now` contains the digests of their present states,
    which the script has just seeded. Return None for a rank with a saved state. Also return None if all ranks drew the
    same numbers, both then and now, because some scripts require that.
    """
    alike = len(set(saved[:world_then])) == 1 and len(set(now)) == 1
    if rank < world_then or alike:
        return None
    return int.from_bytes(hashlib.sha256(f"{saved[0]} {rank}".encode()).digest()[:4], "big")


def reseed(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)


# Position in the data. After a restart, the sampler skips the samples that the run has already used


def find_place(data: Any) -> DataPlace | None:
    """Return the `DataPlace` of a sampler, a batch sampler or a loader.

    Return None for other objects, for objects with their own state_dict, and for a loader of an IterableDataset.
    """
    if hasattr(data, "state_dict"):
        return None
    if isinstance(data, DataLoader):
        return _place_in_loader(data)
    if isinstance(data, BatchSampler):
        return _place_in_batches(data)
    return DataPlace(data) if isinstance(data, Sampler) else None


def _place_in_loader(loader: Any) -> DataPlace | None:
    if isinstance(loader.dataset, IterableDataset):
        return None
    if loader.batch_size is not None:
        return DataPlace(loader.sampler, loader.batch_size)
    return DataPlace(loader.sampler, 1) if loader.batch_sampler is None else _place_in_batches(loader.batch_sampler)


def _place_in_batches(batches: Any) -> DataPlace:
    """Return the `DataPlace` of a batch sampler.

    torch's own BatchSampler only groups the samples of another sampler. That sampler is tracked instead.
    """
    if type(batches) is BatchSampler:
        return DataPlace(batches.sampler, batches.batch_size)
    return DataPlace(batches, 1, batches=True)


class DataPlace:
    """The position of a run in its data: the epoch, and how much of the epoch this rank has used.

    The unit is what the sampler yields: samples or whole batches. `each_step` is how many of them a step uses; 0 if
    unknown.
    """

    def __init__(self, sampler: Any, each_step: int = 0, batches: bool = False) -> None:
        self.sampler = sampler
        self._batches = batches
        self.numbered = False  # whether the script itself sets the epoch's number, with set_epoch
        self.epoch = 0
        self.samples = 0
        # torch's random state at the start of the epoch. Some samplers draw their order from it.
        self.seed: Any = None
        self._resume: dict[str, Any] | None = None
        self._begun = False
        self._each_step = each_step
        _track(sampler, self)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "samples": self.samples, "seed": self.seed, "random": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.samples, self.seed = state["epoch"], state["samples"], state["seed"]
        self._resume, self._begun = dict(state), False

    def number(self, epoch: int) -> None:
        """Set the number of the next epoch in the sampler, if it has `set_epoch`."""
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def finish(self, epoch: int) -> None:
        """Record that this epoch is complete, including the work that the script does after the last step."""
        self.epoch, self.samples, self.seed = epoch + 1, 0, None
        self._resume, self._begun = None, False

    def step_done(self, samples: int | None) -> None:
        if samples is not None and not self._batches:
            self.samples += samples
            return
        self._each_step = self._each_step or self._batch()
        self.samples += self._each_step

    def pass_over(self, draw: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Return an iterator over the next epoch, or over the rest of an interrupted one.

        The iterator is empty if the epoch was complete when the state was saved.
        """
        epoch = int(getattr(self.sampler, "epoch", 0)) if self.numbered else self.epoch + (1 if self._begun else 0)
        if self._resume is not None and epoch < self._resume["epoch"]:
            return iter(())
        left = self._resume if self._resume is not None and epoch == self._resume["epoch"] else None
        # If the interrupted epoch had drawn no sample yet, it starts from the beginning.
        left = None if left is not None and left["seed"] is None else left
        self._resume, self._begun = None, True
        self.epoch, self.samples = epoch, left["samples"] if left else 0
        self.seed = left["seed"] if left else torch.get_rng_state()
        return itertools.islice(_drawn_again(draw, left) if left else draw(), self.samples, None)

    def _batch(self) -> int:
        """Return the batch size of the batch samplers that use this sampler. Raise if it is unknown or ambiguous."""
        found = {each.batch_size for each in _owners(self.sampler) if isinstance(each, BatchSampler)}
        if len(found) != 1:
            raise CheckpointError(
                "the number of samples per step is unknown",
                hint="pass the loader (data=loader), or this rank's number: done(step, samples=len(batch))",
            )
        return int(found.pop())


def _drawn_again(draw: Callable[[], Iterator[Any]], state: dict[str, Any]) -> Iterator[Any]:
    """Draw the interrupted epoch's order again, then restore the random state of the interrupted run.

    The first index is read at once, because a sampler draws its order when its first index is read.
    """
    indices = draw()
    if state["seed"] is not None:
        torch.set_rng_state(state["seed"])
    first = next(indices, None)
    torch.set_rng_state(state["random"])
    return indices if first is None else itertools.chain([first], indices)


def _owners(sampler: Any) -> list[Any]:
    holders = gc.get_referrers(sampler)
    return holders + [owner for each in holders if isinstance(each, dict) for owner in gc.get_referrers(each)]


def _track(sampler: Any, place: DataPlace) -> None:
    """Make the sampler track its position. Change it in place, because the script and its loader refer to it."""
    kind = type(sampler)

    class Placed(kind):  # type: ignore[misc,valid-type]
        def __iter__(self) -> Iterator[Any]:
            return place.pass_over(super().__iter__)

    def set_epoch(self: Any, epoch: int) -> None:
        place.numbered = True
        kind.set_epoch(self, epoch)

    if hasattr(kind, "set_epoch"):
        Placed.set_epoch = set_epoch
    Placed.__name__, Placed.__qualname__ = kind.__name__, kind.__qualname__
    sampler.__class__ = Placed


def _call_after_iter(loader: Any, call: Callable[[], None]) -> None:
    """Make the loader call a function after it has created an iterator. Change it in place, as `_track` does."""
    kind = type(loader)

    class Resuming(kind):  # type: ignore[misc,valid-type]
        def __iter__(self) -> Iterator[Any]:
            made: Iterator[Any] = super().__iter__()
            call()
            return made

    Resuming.__name__, Resuming.__qualname__ = kind.__name__, kind.__qualname__
    loader.__class__ = Resuming


# All state of one rank


class RankOwnState:
    """The state that only this rank has.

    `data` is a loader or sampler of PyTorch, or any object with a state_dict, such as torchdata's StatefulDataLoader.
    `per_rank` contains, by name, the script's objects whose state differs between ranks.
    """

    def __init__(self, data: Any, per_rank: Mapping[str, Any] = MappingProxyType({})) -> None:
        self._per_rank = dict(per_rank)
        self.place = find_place(data)
        self._data = self.place if self.place is not None else data
        self._randomness: dict[str, Any] | None = None
        self._after_iter: dict[str, Any] | None = None
        self._seed: int | None = None
        if self.place is None and hasattr(type(data), "__iter__") and hasattr(data, "state_dict"):
            _call_after_iter(data, self._restore_after_iter)
        if data is not None and not hasattr(self._data, "state_dict"):
            raise CheckpointError(
                f"a {type(data).__name__} cannot save its position in the data",
                hint="for an IterableDataset use torchdata's StatefulDataLoader, or leave data= out",
            )

    def take(self, rank: int = 0) -> dict[str, Any]:
        taken = {"random": take_randomness(), "data": self._data.state_dict() if self._data is not None else None}
        if self._per_rank:
            states = {name: _on_cpu(each.state_dict()) for name, each in self._per_rank.items()}
            taken.update(per_rank=states, rank=rank)
        return taken

    def load_per_rank(self, own: Mapping[str, Any], rank: int) -> list[str]:
        """Restore the per-rank objects. Return the names of objects without a saved state for this rank."""
        saved = own.get("per_rank", {}) if own.get("rank") == rank else {}
        for name, each in self._per_rank.items():
            if name in saved:
                each.load_state_dict(saved[name])
        return [name for name in self._per_rank if name not in saved]

    def load(self, own: dict[str, Any], world_then: int, world: int, seed: int | None = None) -> None:
        """Restore the position in the data. Keep the random states for `restore_randomness`.

        If the number of ranks has changed, a position in PyTorch's own loaders and samplers is converted. Any other
        data object then starts from the beginning. `seed` comes from `seed_for`.
        """
        data = own.get("data")
        if self.place is not None and data is not None:
            data = dict(data, samples=data["samples"] * world_then // world)
        if self._data is not None and data is not None and (self.place is not None or world == world_then):
            self._data.load_state_dict(data)
            # Creating an iterator draws a seed. The saved random state already includes the interrupted epoch's draw,
            # so it is restored after the iterator is created.
            within_epoch = isinstance(data, dict) and not data.get("_iterator_finished", False)
            self._after_iter = own.get("random") if self.place is None and within_epoch else None
        self._randomness, self._seed = own.get("random"), seed

    def restore_randomness(self) -> None:
        """Restore the saved random states, or seed a rank that did not exist when the state was saved.

        Call this when the loop begins, because a script draws random numbers during its setup.
        """
        if self._seed is not None:
            reseed(self._seed)
        elif self._randomness is not None:
            restore_randomness(self._randomness)
        self._randomness = self._seed = None

    def _restore_after_iter(self) -> None:
        if self._after_iter is not None:
            restore_randomness(self._after_iter)
        self._after_iter = None

    def step_done(self, samples: int | None) -> None:
        if self.place is not None:
            self.place.step_done(samples)


def _on_cpu(state: Any) -> Any:
    """Return the state with all tensors on the CPU, because the rank may resume on another node and GPU."""
    if isinstance(state, torch.Tensor):
        return state.detach().cpu()
    if isinstance(state, dict):
        return {name: _on_cpu(each) for name, each in state.items()}
    return type(state)(map(_on_cpu, state)) if type(state) in (list, tuple) else state
