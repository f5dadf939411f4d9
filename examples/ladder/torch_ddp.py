"""Top rung: torch's DistributedDataParallel, which is the fourth rung in C++.

It keeps flat buckets in reverse order, hooks every parameter, and starts a bucket's all-reduce when it is full.
`bucket_cap_mb` is the number to tune: small buckets start early but are many, large ones are few but start late.
By default the cap is 25 MiB and the first bucket 1 MiB, so that communication starts early.
"""

# No `from __future__ import annotations` here: DDP checks the annotations of its hook, and needs real types.

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from .rung import Rung
from .wire import Wire, bytes_of


class TorchDDP(Rung):
    def __init__(
        self, model: Any, wire: Wire, *, bucket_cap_mb: float | None = None, find_unused: bool = False
    ) -> None:
        super().__init__(model, wire)
        self.ddp = DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb, find_unused_parameters=find_unused)

    def __call__(self, batch: Any) -> Any:
        return self.ddp(batch)

    def after_backward(self) -> None:
        """Do nothing: when `backward()` returns, DDP has averaged."""

    def count_buckets(self) -> None:
        """Start to count buckets. A hook in Python costs time, so timed steps are not counted."""
        self.ddp.register_comm_hook(self.wire, _counted)


def _counted(wire: Wire, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    size = bytes_of(bucket.buffer())
    wire.count_all_reduce(size)
    span = wire.watch.begin("communicate", f"all-reduce {size} B")

    def arrived(sum_: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        wire.watch.end(span)
        return sum_.value()

    return allreduce_hook(None, bucket).then(arrived)
