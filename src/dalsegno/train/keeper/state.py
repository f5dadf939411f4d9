"""The state that a keeper's threads share: its orders, the snapshots it has sent, and reports to the agent."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from dalsegno.train.keeper.holdings import StoredSnapshot, holdings
from dalsegno.train.keeper.plan import KeeperAddress, KeepOrder, Sent, find_unneeded, key_of
from dalsegno.train.memory.files import SlotName, list_slots, safe_name
from dalsegno.train.memory.safe_steps import SafeSteps, read_safe
from dalsegno.wire.frames import Message

Report = Callable[[Message], None]


class KeeperState:
    """The state of a keeper. Snapshots are listed from the folder each time, because the files outlive the keeper."""

    def __init__(self, folder: Path, report: Report) -> None:
        self.folder, self.report = folder, report
        self.changed = threading.Condition(threading.RLock())
        self.keep: KeepOrder | None = None
        self._sent: dict[Sent, KeeperAddress] = {}
        self._reported: list[Message] | None = None
        self._trouble = ""

    def order(self, keep: KeepOrder) -> None:
        with self.changed:
            self.keep = keep
            self.refresh()

    def wait_for_orders(self, timeout_s: float) -> KeepOrder | None:
        """Wait for an order to keep snapshots and return it; None after a timeout.

        The agent may send its first order after other keepers have connected.
        """
        with self.changed:
            self.changed.wait_for(lambda: self.keep is not None, timeout_s)
            return self.keep

    def refresh(self) -> None:
        """Remove unneeded snapshots, wake waiting threads, and report the remaining snapshots to the agent.

        Call this after each change to the snapshots or orders.
        """
        with self.changed:
            self.remove(one.name for one in find_unneeded(self.held(), self.safe()))
            self.changed.notify_all()
            kept = [one.to_message(not one.copy and key_of(one) in self.sent()) for one in self.held()]
            if kept != self._reported:
                self.report({"kept": kept})
                self._reported = kept

    def report_trouble(self, why: str) -> None:
        """Report a failure to the agent, unless it repeats the previous report."""
        with self.changed:
            if why != self._trouble:
                self.report({"trouble": why})
                self._trouble = why

    def held(self) -> list[StoredSnapshot]:
        return holdings(self.keep.run, self.folder) if self.keep else []

    def sent(self) -> set[Sent]:
        """Return the snapshots that the current buddy has received."""
        buddy = self.keep.buddy if self.keep else None
        return {key for key, address in self._sent.items() if address == buddy}

    def note_sent(self, one: StoredSnapshot, buddy: KeeperAddress) -> None:
        with self.changed:
            here = {key_of(held) for held in self.held()}
            self._sent = {key: address for key, address in self._sent.items() if key in here}
            self._sent[key_of(one)] = buddy
            self.refresh()

    def safe(self) -> SafeSteps | None:
        return read_safe(self.folder / safe_name(self.keep.run)) if self.keep else None

    def path(self, rank: int, slot: int) -> Path:
        """Return the path of a copy.

        Its name contains only numbers and the run id from the agent, never text from another keeper.
        """
        assert self.keep is not None
        return self.folder / str(SlotName(self.keep.run, rank, slot, copy=True))

    def path_of(self, one: StoredSnapshot) -> Path:
        return self.folder / str(one.name)

    def remove(self, names: Iterable[SlotName]) -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                (self.folder / str(name)).unlink()

    def drop(self, ranks: Collection[int]) -> None:
        """Remove all copies of these ranks, including partial ones."""
        if self.keep is not None:
            with self.changed:
                self.remove(name for name in list_slots(self.keep.run, self.folder) if name.copy and name.rank in ranks)
                self.refresh()


# Rate limit, so that copies do not slow down training

CHUNK = 4 << 20
_MIN_CHUNK = 64 << 10


class ByteRate:
    """A token bucket with one token per byte. It holds at most the tokens of a quarter of a second."""

    def __init__(
        self,
        rate: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.rate, self._clock, self._sleep = rate, clock, sleep
        self._tokens, self._at = rate / 4, clock()

    @property
    def chunk(self) -> int:
        """The number of bytes to send at once: fewer at a low rate, so that the receiver does not wait long."""
        return max(_MIN_CHUNK, min(CHUNK, int(self.rate / 8)))

    def take(self, count: int) -> None:
        """Wait until this many bytes may be sent. The number may exceed the bucket's size."""
        now = self._clock()
        self._tokens = min(self.rate / 4, self._tokens + (now - self._at) * self.rate) - count
        self._at = now
        if self._tokens < 0:
            self._sleep(-self._tokens / self.rate)


def unlimited() -> ByteRate:
    """Return a rate without a limit. Fetches use it, because no training runs during them."""
    return ByteRate(float(1 << 60))
