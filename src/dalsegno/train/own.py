"""What only this rank has: its random numbers, its place in the data, and what the script calls its own."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from dalsegno.train.errors import CheckpointError
from dalsegno.train.randomness import give_randomness, reseed, take_randomness
from dalsegno.train.sampling import find_place


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
