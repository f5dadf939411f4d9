"""The base class of all rungs: it wraps a model, is called like the model, and averages after `backward()`."""

from __future__ import annotations

from typing import Any

import torch

from .wire import Wire

DEFAULT_CAP_MB = 25.0  # the default of torch


class Rung:
    """The rung without communication: no gradient leaves the process. Subclasses replace `average`.

    Data-parallel training is correct when all ranks start from the same weights and apply the same gradient, the mean
    of what each found on its own part of the batch. The first is done here, once. The second is `average`.
    """

    whole_batch = False  # True if one process computes the whole batch: DataParallel

    def __init__(
        self, model: Any, wire: Wire, *, bucket_cap_mb: float | None = None, find_unused: bool = False
    ) -> None:
        self.model, self.wire, self.find_unused = model, wire, find_unused
        self.bucket_cap_bytes = int((bucket_cap_mb or DEFAULT_CAP_MB) * 2**20)
        self.parameters = [each for each in model.parameters() if each.requires_grad]
        for tensor in (*model.parameters(), *model.buffers()):
            wire.broadcast(tensor.detach())

    def __call__(self, batch: Any) -> Any:
        return self.model(batch)

    def my_part(self, batch: Any) -> Any:
        """Return this rank's share of a batch that all ranks have."""
        return batch if self.whole_batch else batch.tensor_split(self.wire.size)[self.wire.rank]

    def after_backward(self) -> None:
        """Average the gradients. A parameter that this rank did not use counts as zero: the others wait for it."""
        used = [each.grad is not None for each in self.parameters]
        for each in self.parameters:
            if each.grad is None:
                each.grad = torch.zeros_like(each)
        self.average()
        if self.find_unused:
            self._clear_unused(used)

    def average(self) -> None:
        """Replace every gradient by its mean over all ranks."""

    def _clear_unused(self, used: list[bool]) -> None:
        """Remove the gradient of parameters that no rank used, because momentum would still move them."""
        use_counts = torch.tensor(used, dtype=torch.int32, device=self.parameters[0].device)
        self.wire.all_reduce(use_counts).wait()
        for each, count in zip(self.parameters, use_counts.tolist(), strict=True):
            if not count:
                each.grad = None

    def close(self) -> None:
        """Release the model and restore its original behaviour."""
