"""Third rung: gradients copied into flat buckets, one all-reduce per bucket, after the backward pass.

This sends the same bytes in far fewer messages. It costs two copies. The network is still idle during the backward
pass, and the processor is idle while the network works.
"""

from __future__ import annotations

from typing import Any

from .buckets import make_buckets
from .rung import Rung


class FlatBuckets(Rung):
    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.buckets = make_buckets(self.parameters, self.bucket_cap_bytes)

    def average(self) -> None:
        sums = [self.wire.all_reduce(bucket.fill(self.wire.size)) for bucket in self.buckets]
        for bucket, sum_ in zip(self.buckets, sums, strict=True):
            sum_.wait()
            bucket.spread()
