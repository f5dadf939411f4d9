"""First rung: every rank sends its gradients to rank 0, which averages them and sends the mean back.

This is the simplest way, and it is correct. But all bytes pass through one rank: with N ranks it receives N-1 gradients
and sends N-1, one after the other, while the rest wait. Twice the ranks take twice the time.
"""

from __future__ import annotations

from typing import Any

import torch

from .rung import Rung


class GatherToFirst(Rung):
    def average(self) -> None:
        for each in self.parameters:
            gradient = each.grad.contiguous()
            if self.wire.rank == 0:
                self._collect(gradient)
            else:
                self.wire.send(gradient, 0)
                self.wire.receive(gradient, 0)
            each.grad.copy_(gradient)

    def _collect(self, gradient: Any) -> None:
        others = range(1, self.wire.size)
        theirs = torch.empty_like(gradient)
        for rank in others:
            self.wire.receive(theirs, rank)
            gradient += theirs
        gradient /= self.wire.size
        for rank in others:
            self.wire.send(gradient, rank)
