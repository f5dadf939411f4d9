"""What only this rank has: its random numbers, and its place in the data."""

from __future__ import annotations

from typing import Any

from dalsegno.train.errors import CheckpointError
from dalsegno.train.randomness import give_randomness, reseed, take_randomness
from dalsegno.train.sampling import find_place


class Own:
    """`data`: a loader or sampler of PyTorch, or anything that tells its own place (torchdata's StatefulDataLoader)."""

    def __init__(self, data: Any) -> None:
        self.place = find_place(data)
        self._data = self.place if self.place is not None else data
        self._randomness: dict[str, Any] | None = None
        self._seed: int | None = None
        if data is not None and not hasattr(self._data, "state_dict"):
            raise CheckpointError(
                f"a {type(data).__name__} cannot tell its place in the data",
                hint="over an IterableDataset, torchdata's StatefulDataLoader can; or leave data= out",
            )

    def take(self) -> dict[str, Any]:
        return {"random": take_randomness(), "data": self._data.state_dict() if self._data is not None else None}

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
