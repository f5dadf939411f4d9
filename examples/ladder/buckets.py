"""Gradients in flat buffers: many small tensors become a few large messages."""

from __future__ import annotations

from typing import Any

import torch


class Bucket:
    """Parameters of one dtype on one device, and a flat buffer for all of their gradients."""

    def __init__(self, parameters: list[Any]) -> None:
        self.parameters = parameters
        sizes = [each.numel() for each in parameters]
        self.flat = torch.empty(sum(sizes), dtype=parameters[0].dtype, device=parameters[0].device)
        self._slots = self.flat.split(sizes)

    def fill(self, ranks: int) -> Any:
        """Copy the gradients into the buffer, each divided by the number of ranks."""
        for each, slot in zip(self.parameters, self._slots, strict=True):
            torch.div(each.grad, ranks, out=slot.view(each.shape))
        return self.flat

    def spread(self) -> None:
        """Copy the gradients from the buffer back to the parameters."""
        for each, slot in zip(self.parameters, self._slots, strict=True):
            each.grad.copy_(slot.view(each.shape))


def make_buckets(parameters: list[Any], cap_bytes: int) -> list[Bucket]:
    """Return buckets in the order in which they fill: the backward pass starts with the last parameters.

    A bucket is closed once it has reached the cap, so a parameter is never split and buckets differ in size. A buffer
    has one dtype, so parameters of different types go into different buckets.
    """
    closed: list[list[Any]] = []
    open_: dict[tuple[Any, Any], list[Any]] = {}
    for each in reversed(parameters):
        bucket = open_.setdefault((each.dtype, each.device), [])
        bucket.append(each)
        if sum(p.numel() * p.element_size() for p in bucket) >= cap_bytes:
            closed.append(open_.pop((each.dtype, each.device)))
    return [Bucket(each) for each in (*closed, *open_.values())]
