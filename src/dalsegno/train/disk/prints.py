"""Prints of tensors: a few numbers of each, so that it shows where ranks do not hold the same.

What every rank holds is divided among the ranks when it is written. A tensor that looks the same everywhere and is not
(a share that a script keeps without telling torch, a forgotten broadcast) would be put together from different ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dalsegno.train.disk.part import Part
from dalsegno.train.state import State

SAMPLES = 1024  # elements of each tensor that are looked at
_FACTOR = 0x9E3779B97F4A7C1  # odd, and large: neighbours that are swapped show


def prints_of(state: State) -> dict[str, int]:
    """Of all that every rank holds; of nothing where there is only one."""
    shared = [piece for piece in state.pieces if piece.shared] if state.world > 1 else []
    return {piece.key: print_of(piece.tensor) for piece in shared}


def print_of(tensor: torch.Tensor) -> int:
    flat = tensor.detach().flatten()
    some = flat[:: max(1, flat.numel() // SAMPLES)].cpu().resolve_conj().resolve_neg().contiguous()
    numbers = some.view(torch.uint8).to(torch.int64)
    return int((numbers * (torch.arange(len(numbers)) * 2 + 1) * _FACTOR).sum())


def differing(parts: Sequence[Part]) -> str:
    """What is to be said of it; nothing if all ranks hold the same."""
    first = min(parts, key=lambda part: part.rank)
    unlike = {key: part.rank for part in parts for key, value in part.prints.items() if first.prints.get(key) != value}
    if not unlike:
        return ""
    (key, rank), others = next(iter(unlike.items())), len(unlike) - 1
    also = f" and {others} more" if others else ""
    return (
        f"ranks {first.rank} and {rank} do not hold the same {key}{also}: a checkpoint has every tensor once, parts of"
        " it from different ranks. Give what belongs to one rank as per_rank={'name': object}, or as a DTensor (FSDP2)"
    )
