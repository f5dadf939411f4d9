"""Fifth rung: the all-reduce itself, written with send and receive.

The ranks form a ring, and the buffer is cut into N chunks. First *reduce-scatter*: in N-1 rounds every rank sends a
chunk to its right neighbour and adds the one from the left to its own. Each rank then holds one chunk of the whole sum.
Then *all-gather*: in N-1 rounds the finished chunks are passed around the ring, until every rank has all of them.

A rank sends 2(N-1) chunks of 1/N each, which is 2(N-1)/N of the buffer: less than twice its size for any number of
ranks. Every link is busy all the time. Without a switch that adds, no algorithm can send less.
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
    chunks = flat.tensor_split(wire.size)  # uneven if the size does not divide; some are empty if it is tiny
    right, left = (wire.rank + 1) % wire.size, (wire.rank - 1) % wire.size
    from_left = torch.empty_like(chunks[0])  # the first chunk is the longest
    for round_ in range(wire.size - 1):  # reduce-scatter: send the chunk that was added to in the last round
        mine, theirs = (chunks[(wire.rank - round_ - back) % wire.size] for back in (0, 1))
        arrived = from_left[: theirs.numel()]
        wire.exchange(mine, right, arrived, left)
        theirs += arrived
    for round_ in range(wire.size - 1):  # all-gather: the chunk with the right neighbour's number is finished here
        mine, theirs = (chunks[(wire.rank + 1 - round_ - back) % wire.size] for back in (0, 1))
        wire.exchange(mine, right, theirs, left)
