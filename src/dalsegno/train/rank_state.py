"""What only this rank has: its random numbers, its place in the data, and what the script calls its own."""

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

# ---- The states of all random number generators a training script draws from.


def take_randomness() -> dict[str, Any]:
    """Those in use now: numpy's if it is loaded, the GPU's if one is in use."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        states["numpy"] = numpy.random.get_state()
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def give_randomness(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "numpy" in states:
        import numpy

        numpy.random.set_state(states["numpy"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def digest(states: Mapping[str, Any] | None) -> str:
    """By which ranks find out whether they draw the same numbers."""
    torchs = bytes(states["torch"].tolist()) if states else b""
    return hashlib.sha256(torchs).hexdigest()


def seed_for(rank: int, saved: Sequence[str], world_then: int, now: Sequence[str]) -> int | None:
    """For a rank that was not there when the state was saved, where each rank draws numbers of its own. By digests of
    what was saved, and of what the script has just seeded, on all ranks.

    None for the others: they go on with theirs. Where all ranks drew the same, as some scripts rely on, so do new ones.
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


# ---- A sampler that knows its place: after a restart it leaves out what the run has seen already.


def find_place(data: Any) -> DataPlace | None:
    """In what a script gives us: a sampler, a batch sampler, or their loader. None if it tells its place itself."""
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
    """torch's own only cuts what its sampler gives, and that one knows the epochs."""
    if type(batches) is BatchSampler:
        return DataPlace(batches.sampler, batches.batch_size)
    return DataPlace(batches, 1, batches=True)


class DataPlace:
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


def _teach(sampler: Any, place: DataPlace) -> None:
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


# ---- What only this rank has: its random numbers, its place in the data, and what the script calls its own.


class Own:
    """`data`: a loader or sampler of PyTorch, or anything that tells its own place (torchdata's StatefulDataLoader).

    `per_rank`: objects of the script whose state differs from rank to rank, by name.
    """

    def __init__(self, data: Any, per_rank: Mapping[str, Any] = MappingProxyType({})) -> None:
        self._per_rank = dict(per_rank)
        self.place = find_place(data)
        self._data = self.place if self.place is not None else data
        self._randomness: dict[str, Any] | None = None
        self._seed: int | None = None
        if data is not None and not hasattr(self._data, "state_dict"):
            raise CheckpointError(
                f"a {type(data).__name__} cannot tell its place in the data",
                hint="over an IterableDataset, torchdata's StatefulDataLoader can; or leave data= out",
            )

    def take(self, rank: int = 0) -> dict[str, Any]:
        taken = {"random": take_randomness(), "data": self._data.state_dict() if self._data is not None else None}
        if self._per_rank:
            states = {name: _on_cpu(each.state_dict()) for name, each in self._per_rank.items()}
            taken.update(per_rank=states, rank=rank)
        return taken

    def load_per_rank(self, own: Mapping[str, Any], rank: int) -> list[str]:
        """Put back what this rank had. The names of what it had not: another rank's is never taken instead."""
        saved = own.get("per_rank", {}) if own.get("rank") == rank else {}
        for name, each in self._per_rank.items():
            if name in saved:
                each.load_state_dict(saved[name])
        return [name for name in self._per_rank if name not in saved]

    def load(self, own: dict[str, Any], world_then: int, world: int, seed: int | None = None) -> None:
        """With another number of ranks each has another share of the data. `seed`: for numbers of this rank's own."""
        data = own.get("data")
        if self.place is not None and data is not None:
            data = dict(data, samples=data["samples"] * world_then // world)
        if self._data is not None and data is not None and (self.place is not None or world == world_then):
            self._data.load_state_dict(data)
        self._randomness, self._seed = own.get("random"), seed

    def give(self) -> None:
        """When the loop begins: what the script has drawn until then it drew in every life."""
        if self._seed is not None:
            reseed(self._seed)
        elif self._randomness is not None:
            give_randomness(self._randomness)
        self._randomness = self._seed = None

    def step_done(self, samples: int | None) -> None:
        if self.place is not None:
            self.place.step_done(samples)


def _on_cpu(state: Any) -> Any:
    """The rank may go on on another node, and there on another GPU."""
    if isinstance(state, torch.Tensor):
        return state.detach().cpu()
    if isinstance(state, dict):
        return {name: _on_cpu(each) for name, each in state.items()}
    return type(state)(map(_on_cpu, state)) if type(state) in (list, tuple) else state
