"""Fifth rung: the all-reduce itself, written with send and receive.

The ranks stand in a ring, and the buffer is cut into N chunks. First *reduce-scatter*: in N-1 rounds every rank sends a
chunk to its right neighbour and adds the one that comes from the left to its own. Then each rank holds one chunk of the
whole sum. Then *all-gather*: in N-1 rounds the finished chunks travel on around the ring, until everybody has all.

A rank sends 2(N-1) chunks of 1/N each, so 2(N-1)/N of the buffer: less than twice its size however many ranks there
are, and every link is busy all the time. Ranks alone, without a switch that adds, cannot do with less.
"""

from __future__ import annotations

from typing import Any

import torch

from .flat_buckets import FlatBuckets
from .wire import Wire


class Ring(FlatBuckets):
    def average(self) -> None:
        for bucket in self.buckets:
            ring_all_reduce(bucket.fill(self.wire.size), self.wire)
            bucket.spread()


def ring_all_reduce(flat: Any, wire: Wire) -> None:
    """Replace a flat tensor by its sum over all ranks."""
    chunks = flat.tensor_split(wire.size)  # uneven where the size does not divide; some are empty where it is tiny
    right, left = (wire.rank + 1) % wire.size, (wire.rank - 1) % wire.size
    from_left = torch.empty_like(chunks[0])  # the first chunk is the longest
    for round_ in range(wire.size - 1):  # reduce-scatter: what I send now is what I added to in the round before
        mine, theirs = (chunks[(wire.rank - round_ - back) % wire.size] for back in (0, 1))
        arrived = from_left[: theirs.numel()]
        wire.exchange(mine, right, arrived, left)
        theirs += arrived
    for round_ in range(wire.size - 1):  # all-gather: the chunk to my right neighbour's number is finished here
        mine, theirs = (chunks[(wire.rank + 1 - round_ - back) % wire.size] for back in (0, 1))
        wire.exchange(mine, right, theirs, left)
