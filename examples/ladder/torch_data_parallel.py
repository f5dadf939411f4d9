"""Beside the ladder: torch's DataParallel, one process with a thread per GPU.

In every step it copies the model to all GPUs, splits the batch, gathers the outputs on the first GPU and sums the
gradients there. This is the star of the first rung, inside one process and its interpreter lock. It needs several GPUs
in one machine. On a CPU, or with one GPU, the model itself is the only replica, and there is nothing to measure.
"""

from __future__ import annotations

from typing import Any

from torch.nn import DataParallel

from .rung import Rung


class TorchDataParallel(Rung):
    whole_batch = True

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.replicated = DataParallel(self.model)

    def __call__(self, batch: Any) -> Any:
        return self.replicated(batch)

    def after_backward(self) -> None:
        """Do nothing: there is one model, and its gradient is that of the whole batch."""


def why_not_measured(gpus: int) -> str:
    """Return why DataParallel cannot be measured with so many GPUs, or an empty string if it can."""
    if gpus > 1:
        return ""
    return f"DataParallel needs several GPUs in one process; here there {'is one' if gpus else 'are none'}"
