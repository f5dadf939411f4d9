"""Second rung: one all-reduce per parameter, after the backward pass.

All-reduce leaves the sum on every rank and needs no rank in the middle: each sends and receives about twice the size
of the gradient, however many ranks there are. But a model has hundreds of parameters, most of them small (biases,
norms), and every call costs its latency, however few bytes it carries.
"""

from __future__ import annotations

from .rung import Rung


class PerParameter(Rung):
    def average(self) -> None:
        for each in self.parameters:
            # Divided before it is summed, as DDP does it: the sum of many half-precision numbers could overflow.
            gradient = each.grad.div_(self.wire.size).contiguous()
            self.wire.all_reduce(gradient).wait()
            each.grad.copy_(gradient)  # nothing to do where `contiguous` was the gradient itself
