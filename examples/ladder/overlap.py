"""Fourth rung: a bucket is sent as soon as its last gradient is complete, while the backward pass continues.

A hook on every parameter runs when its gradient is complete. The backward pass starts with the last layers, so the
buckets are made in reverse order: the first is full early, and is summed while earlier layers compute.

All ranks must start their all-reduces in the same order, or different buckets would be added. Ranks may use different
parameters, and then different buckets are full first. So bucket n waits for bucket n-1. A bucket that is not full after
the backward pass, because a parameter got no gradient, is sent then.
"""

from __future__ import annotations

from typing import Any

from .flat_buckets import FlatBuckets
from .wire import Pending


class Overlapped(FlatBuckets):
    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._bucket_of = {each: index for index, bucket in enumerate(self.buckets) for each in bucket.parameters}
        self._hooks = [each.register_post_accumulate_grad_hook(self._ready) for each in self.parameters]
        self._reset()

    def _reset(self) -> None:
        self._missing = [len(bucket.parameters) for bucket in self.buckets]
        self._sums: list[Pending] = []

    def _ready(self, parameter: Any) -> None:
        self._missing[self._bucket_of[parameter]] -= 1
        while len(self._sums) < len(self.buckets) and not self._missing[len(self._sums)]:
            self._send_next()

    def _send_next(self) -> None:
        bucket = self.buckets[len(self._sums)]
        self._sums.append(self.wire.all_reduce(bucket.fill(self.wire.size)))

    def average(self) -> None:
        while len(self._sums) < len(self.buckets):
            self._send_next()
        for bucket, sum_ in zip(self.buckets, self._sums, strict=True):
            sum_.wait()
            bucket.spread()
        self._reset()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
