"""The training loop that drives every rung, and a model to train."""

from __future__ import annotations

from math import sqrt
from typing import Any

import torch
from torch import nn

from .rung import Rung


def train_step(rung: Rung, inputs: Any, targets: Any, optimizer: Any) -> None:
    """Run one step. Except for `after_backward`, it is the same as without data parallelism."""
    watch = rung.wire.watch
    watch.start_step()
    optimizer.zero_grad()
    with watch.span("forward"):
        loss = nn.functional.mse_loss(rung(inputs), targets)
    with watch.span("backward"):
        loss.backward()
    rung.after_backward()
    with watch.span("update"):
        optimizer.step()


def make_model(mib: float, layers: int, seed: int = 0) -> Any:
    """Return `layers` square linear layers with biases and ReLU between them, about `mib` MiB of float32 in all."""
    width = width_of(mib, layers)
    torch.manual_seed(seed)
    parts = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*parts[:-1])


def width_of(mib: float, layers: int) -> int:
    return max(1, round(sqrt(mib * 2**20 / 4 / layers)))
