"""Second rung: one all-reduce per parameter, after the backward pass.

All-reduce leaves the sum on every rank and needs no central rank: each sends and receives about twice the size of the
gradient, for any number of ranks. But a model has hundreds of parameters, most of them small (biases, norms), and every
call has a latency, however few bytes it carries.
"""

from __future__ import annotations

from .rung import Rung


class PerParameter(Rung):
    def average(self) -> None:
        for each in self.parameters:
            # Divide before summing, as DDP does: the sum of many half-precision numbers could overflow.
            gradient = each.grad.div_(self.wire.size).contiguous()
            self.wire.all_reduce(gradient).wait()
            each.grad.copy_(gradient)  # no copy if `contiguous` returned the gradient itself
