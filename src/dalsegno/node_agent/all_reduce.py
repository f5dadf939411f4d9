"""All-reduces with known sums. Import this only in a separate process, because torch uses much memory and can hang.

Two nodes need a store to exchange their addresses. `ChannelStore` uses the connection on which they have authenticated
each other; torch's own store would open a port to which anyone can connect. The numbers are derived from the test's
secret, so an intruder can make the test fail, but cannot make it pass.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from dalsegno.node_agent.loads import may_have_gpus, pattern
from dalsegno.wire.frames import BadFrame, Reader, send


class ChannelStore(dist.Store):  # type: ignore[misc]
    """A store that two ranks share over a connection: each rank sends a copy of its own entries to the other rank."""

    def __init__(self, channel: socket.socket) -> None:
        super().__init__()
        self._channel, self._known = channel, dict[str, bytes]()
        self._news, self._open = threading.Condition(), True
        threading.Thread(target=self._listen, daemon=True).start()

    def set(self, key: str, value: bytes | str) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        with self._news:
            self._known[key] = data
            self._news.notify_all()
            send(self._channel, {"key": key, "value": data.hex()})

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._known[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set; raise OSError if the peer disconnects or `timeout` expires. Without `timeout`,
        the wait ends at the latest when the parent process kills this process."""
        with self._news:
            most_s = None if timeout is None else timeout.total_seconds()
            self._news.wait_for(lambda: self.check(keys) or not self._open, most_s)
            if not self.check(keys):
                raise OSError("the other node did not answer" if self._open else "the other node has left")

    def check(self, keys: list[str]) -> bool:
        return all(key in self._known for key in keys)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return the total. Counters are local to this side."""
        with self._news:
            total = int(self._known.get(key, b"0")) + amount
            self._known[key] = b"%d" % total
            return total

    def _listen(self) -> None:
        reader = Reader()
        try:
            while data := self._channel.recv(65536):
                for message in reader.feed(data):
                    self._learn(str(message["key"]), bytes.fromhex(message["value"]))
        except (OSError, BadFrame, KeyError, TypeError, ValueError):
            pass  # stop reading: the message is invalid, or the connection is lost
        with self._news:
            self._open = False
            self._news.notify_all()

    def _learn(self, key: str, value: bytes) -> None:
        with self._news:
            self._known[key] = value
            self._news.notify_all()


# The all-reduces that test the network


GLOO, NCCL = "gloo", "nccl"
BYTES = {GLOO: 16 << 20, NCCL: 256 << 20}
ROUNDS = 3
_SMALL = 0x03FFFFFF  # largest number to add; the sum of 32 such numbers still fits into 32 bits

_kept = list[object]()  # keeps groups alive: NCCL may take long to destroy one, and the process is killed anyway

Numbers = Callable[[bytes, int], torch.Tensor]  # returns one MiB of numbers for a secret and a rank


@dataclass(frozen=True)
class ReducedSums:
    """The result: the number of wrong sums on this node, whether the sums on the peer are right, and the time of the
    fastest round."""

    kind: str
    ranks: int
    wrong: int
    took_s: float
    theirs_right: bool = True

    @property
    def size(self) -> int:
        return BYTES[self.kind]


def kind() -> str:
    """Return the backend of this node's collectives; "" if torch was built without them."""
    if not dist.is_available():
        return ""
    if may_have_gpus() and torch.cuda.is_available() and dist.is_nccl_available():
        return NCCL
    return GLOO if dist.is_gloo_available() else ""


def numbers(secret: bytes, rank: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(pattern(secret + b" rank %d" % rank)), dtype=torch.int32) & _SMALL


def on_this_node(kind: str, within_s: float) -> ReducedSums:
    """Reduce over all GPUs of the node.

    With fewer than two GPUs, or without NCCL, reduce between two ranks on the CPU, over the loopback interface.
    """
    secret = os.urandom(16)
    if kind == NCCL and torch.cuda.device_count() > 1:
        return _on_all_gpus(secret)
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        ranks = [pool.submit(_with_gloo, store, rank, "127.0.0.1", secret, numbers, within_s) for rank in (0, 1)]
        both = [rank.result() for rank in ranks]
    return ReducedSums(GLOO, 2, sum(wrong for wrong, _ in both), max(took_s for _, took_s in both))


def with_other(
    channel: socket.socket, rank: int, kind: str, secret: bytes, within_s: float, numbers: Numbers = numbers
) -> ReducedSums:
    """Reduce between two nodes that are connected by `channel`. Each node reports to the other whether its sums are
    correct."""
    store = ChannelStore(channel)
    if kind == NCCL and _same_gpu(store, rank):
        kind = GLOO
    reduce = _with_nccl if kind == NCCL else _with_gloo
    wrong, took_s = reduce(store, rank, str(channel.getsockname()[0]), secret, numbers, within_s)
    store.set(f"right {rank}", b"no" if wrong else b"yes")
    return ReducedSums(kind, 2, wrong, took_s, store.get(f"right {1 - rank}") == b"yes")


def _with_gloo(
    store: dist.Store, rank: int, address: str, secret: bytes, numbers: Numbers, within_s: float
) -> tuple[int, float]:
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timedelta(seconds=within_s)
    group = dist.ProcessGroupGloo(store, rank, 2, options)
    mine, whole = _terms(secret, rank, numbers, GLOO, "cpu")
    return _rounds([mine], whole, lambda tensors: group.allreduce(tensors).wait())


def _with_nccl(
    store: dist.Store, rank: int, address: str, secret: bytes, numbers: Numbers, within_s: float
) -> tuple[int, float]:
    """Reduce with the first GPU of each node. Return the number of wrong sums, and the seconds of the fastest round.

    NCCL chooses the network itself, as it does for a job.
    """
    torch.cuda.set_device(0)
    group = dist.ProcessGroupNCCL(store, rank, 2, timedelta(seconds=within_s))
    _kept.append(group)
    mine, whole = _terms(secret, rank, numbers, NCCL, "cuda:0")
    return _rounds([mine], whole, lambda tensors: group.allreduce(tensors).wait())


def _same_gpu(store: ChannelStore, rank: int) -> bool:
    """Return whether both ranks have the same GPU: virtual hosts share GPUs, and NCCL needs one for each rank."""
    uuid = getattr(torch.cuda.get_device_properties(0), "uuid", rank)  # torch before 2.5 has no uuid
    store.set(f"gpu {rank}", str(uuid))
    return store.get("gpu 0") == store.get("gpu 1")


def _on_all_gpus(secret: bytes) -> ReducedSums:
    count = torch.cuda.device_count()
    mine = [_repeated(numbers(secret, rank), NCCL, f"cuda:{rank}") for rank in range(count)]
    whole = _repeated(sum((numbers(secret, rank) for rank in range(count)), torch.tensor(0)), NCCL, "cuda:0")
    wrong, took_s = _rounds(mine, whole.to(torch.int32), torch.cuda.nccl.all_reduce)
    return ReducedSums(NCCL, count, wrong, took_s)


def _terms(
    secret: bytes, rank: int, numbers_here: Numbers, kind: str, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    whole = numbers(secret, 0) + numbers(secret, 1)
    return _repeated(numbers_here(secret, rank), kind, device), _repeated(whole, kind, device)


def _repeated(block: torch.Tensor, kind: str, device: str) -> torch.Tensor:
    return block.to(device).repeat(BYTES[kind] >> 20)


def _rounds(
    mine: Sequence[torch.Tensor], whole: torch.Tensor, reduce: Callable[[list[torch.Tensor]], object]
) -> tuple[int, float]:
    """Return the number of wrong sums in all rounds, and the seconds of the fastest round. The first round is slower,
    because it also opens the connections."""
    wrong, took_s = 0, float("inf")
    for _ in range(ROUNDS):
        tensors = [each.clone() for each in mine]
        _wait_for_gpus(tensors)
        began = time.monotonic()
        reduce(tensors)
        _wait_for_gpus(tensors)
        took_s = min(took_s, time.monotonic() - began)
        wrong += sum(int((each.to(whole.device) != whole).sum()) for each in tensors)
    return wrong, took_s


def _wait_for_gpus(tensors: Sequence[torch.Tensor]) -> None:
    for each in tensors:
        if each.is_cuda:
            torch.cuda.synchronize(each.device)
