"""All communication with the other processes. All rungs use it, so every message is counted in one place.

`send` and `receive` are counted exactly. The backend sends the messages of a collective, where they cannot be counted.
For those, the count is what a ring all-reduce needs by the formula, and the tally says so (`computed`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from .watch import Watch


@dataclass
class Tally:
    """The counts of one rank. `calls`: operations it started; `messages`: messages it sent to other processes."""

    calls: int = 0
    messages: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    computed: bool = False


@dataclass
class Pending:
    """An all-reduce in progress; the tensor holds the sum after `wait`."""

    work: Any
    watch: Watch
    span: Any

    def wait(self) -> None:
        self.work.wait()
        self.watch.end(self.span)  # in case the callback has not run yet


class Wire:
    """The operations that a rung may use to communicate within the default group."""

    def __init__(self, watch: Watch | None = None) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.watch = watch or Watch()
        self.tally = Tally()

    def broadcast(self, tensor: Any) -> None:
        """Send the values of rank 0 to all ranks. This happens only at the start, so it is not counted."""
        dist.broadcast(tensor, 0)

    def all_reduce(self, tensor: Any) -> Pending:
        """Start to replace the tensor by its sum over all ranks, and return at once."""
        self.count_all_reduce(bytes_of(tensor))
        span = self.watch.begin("communicate", f"all-reduce {bytes_of(tensor)} B")
        work = dist.all_reduce(tensor, async_op=True)
        self.watch.ends_with(span, work)
        return Pending(work, self.watch, span)

    def send(self, tensor: Any, to: int) -> None:
        with self.watch.span("communicate", f"send {bytes_of(tensor)} B to {to}"):
            dist.send(tensor, to)
        self._count(1, bytes_of(tensor), 0)

    def receive(self, tensor: Any, source: int) -> None:
        with self.watch.span("communicate", f"receive {bytes_of(tensor)} B from {source}"):
            dist.recv(tensor, source)
        self._count(0, 0, bytes_of(tensor))

    def exchange(self, outgoing: Any, to: int, incoming: Any, source: int) -> None:
        """Send one tensor while receiving another. Empty tensors are not sent: both ends know their size."""
        asked = [dist.P2POp(dist.isend, outgoing, to)] if outgoing.numel() else []
        asked += [dist.P2POp(dist.irecv, incoming, source)] if incoming.numel() else []
        with self.watch.span("communicate", f"send {bytes_of(outgoing)} B to {to}"):
            for work in dist.batch_isend_irecv(asked) if asked else []:
                work.wait()
        self._count(int(outgoing.numel() > 0), bytes_of(outgoing), bytes_of(incoming), calls=len(asked))

    def count_all_reduce(self, size: int) -> None:
        """Count an all-reduce as a ring does it: 2(N-1) messages with 2(N-1)/N of the tensor out and as much in."""
        moved = 2 * (self.size - 1) * size // self.size
        self._count(2 * (self.size - 1), moved, moved)
        self.tally.computed = True

    def _count(self, messages: int, sent: int, received: int, calls: int = 1) -> None:
        self.tally.calls += calls
        self.tally.messages += messages
        self.tally.sent_bytes += sent
        self.tally.received_bytes += received


def bytes_of(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())
