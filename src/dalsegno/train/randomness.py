"""The states of all random number generators a training script draws from."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch


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
