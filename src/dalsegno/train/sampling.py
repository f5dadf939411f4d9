"""A sampler that knows its place: after a restart it leaves out what the run has seen already.

A sampler of PyTorch has no place. A loader asks it for indices ahead of the training (its workers prefetch), so what
it has handed out is not what was trained on; the place is counted in finished steps instead. Passes over the data that
were finished before a restart are empty, the one that was interrupted lacks its beginning.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from dalsegno.train.errors import CheckpointError


def find_place(data: Any) -> Place | None:
    """In what a script gives us: a sampler, a batch sampler, or their loader. None if it tells its place itself."""
    if hasattr(data, "state_dict"):
        return None
    if isinstance(data, DataLoader):
        return _place_in_loader(data)
    if isinstance(data, BatchSampler):
        return _place_in_batches(data)
    return Place(data) if isinstance(data, Sampler) else None


def _place_in_loader(loader: Any) -> Place | None:
    if isinstance(loader.dataset, IterableDataset):
        return None
    if loader.batch_size is not None:
        return Place(loader.sampler, loader.batch_size)
    return Place(loader.sampler, 1) if loader.batch_sampler is None else _place_in_batches(loader.batch_sampler)


def _place_in_batches(batches: Any) -> Place:
    """torch's own only cuts what its sampler gives, and that one knows the epochs."""
    if type(batches) is BatchSampler:
        return Place(batches.sampler, batches.batch_size)
    return Place(batches, 1, batches=True)


class Place:
    """Where a run is in its data: which pass, and how much of it this rank has trained on.

    It is counted in what the sampler gives: samples, or whole batches. `each_step`: how many of those a step takes, 0
    if that has to be found out.
    """

    def __init__(self, sampler: Any, each_step: int = 0, batches: bool = False) -> None:
        self.sampler = sampler
        self._batches = batches
        self.numbered = False  # the script numbers its passes itself, by set_epoch
        self.epoch = 0
        self.samples = 0
        self.seed: Any = None  # torch's random state when the pass began: some samplers draw their order from it
        self._resume: dict[str, Any] | None = None
        self._begun = False
        self._each_step = each_step
        _teach(sampler, self)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "samples": self.samples, "seed": self.seed, "random": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.samples, self.seed = state["epoch"], state["samples"], state["seed"]
        self._resume, self._begun = dict(state), False

    def number(self, epoch: int) -> None:
        """The next pass is this one."""
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def finish(self, epoch: int) -> None:
        """This pass is over, and all that the script does after one."""
        self.epoch, self.samples, self.seed = epoch + 1, 0, None
        self._resume, self._begun = None, False

    def step_done(self, samples: int | None) -> None:
        if samples is not None and not self._batches:
            self.samples += samples
            return
        self._each_step = self._each_step or self._batch()
        self.samples += self._each_step

    def pass_over(self, draw: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """One pass over the data, or what is left of it."""
        epoch = int(getattr(self.sampler, "epoch", 0)) if self.numbered else self.epoch + (1 if self._begun else 0)
        if self._resume is not None and epoch < self._resume["epoch"]:
            return iter(())
        left = self._resume if self._resume is not None and epoch == self._resume["epoch"] else None
        left = None if left is not None and left["seed"] is None else left  # it had not begun
        self._resume, self._begun = None, True
        self.epoch, self.samples = epoch, left["samples"] if left else 0
        self.seed = left["seed"] if left else torch.get_rng_state()
        return itertools.islice(_drawn_again(draw, left) if left else draw(), self.samples, None)

    def _batch(self) -> int:
        """Of whoever draws batches from our sampler."""
        found = {each.batch_size for each in _owners(self.sampler) if isinstance(each, BatchSampler)}
        if len(found) != 1:
            raise CheckpointError(
                "cannot tell how many samples a step takes from the sampler",
                hint="give the loader, data=loader, or say it: done(step, samples=len(batch)), those of this rank",
            )
        return int(found.pop())


def _drawn_again(draw: Callable[[], Iterator[Any]], state: dict[str, Any]) -> Iterator[Any]:
    """A sampler draws its order with its first index. What it and its loader draw now they drew already before the
    restart: afterwards the random state is again that of the interrupted run."""
    indices = draw()
    if state["seed"] is not None:
        torch.set_rng_state(state["seed"])
    first = next(indices, None)
    torch.set_rng_state(state["random"])
    return indices if first is None else itertools.chain([first], indices)


def _owners(sampler: Any) -> list[Any]:
    holders = gc.get_referrers(sampler)
    return holders + [owner for each in holders if isinstance(each, dict) for owner in gc.get_referrers(each)]


def _teach(sampler: Any, place: Place) -> None:
    """The sampler the script holds, and its loader with it, goes on to be the same object."""
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
