"""What the threads of a keeper share: the orders, what was sent, and how the agent is told."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from dalsegno.train.keeper.holdings import StoredSnapshot, holdings
from dalsegno.train.keeper.plan import KeeperAddress, KeepOrder, Sent, key_of, spent
from dalsegno.train.memory.files import SlotName, safe_name, slots_of
from dalsegno.train.memory.safe import Safe, read_safe
from dalsegno.wire.frames import Message

Tell = Callable[[Message], None]


class Books:
    """What is held is read from the folder each time: it alone knows, and outlives us."""

    def __init__(self, folder: Path, tell: Tell) -> None:
        self.folder, self.tell = folder, tell
        self.changed = threading.Condition(threading.RLock())
        self.keep: KeepOrder | None = None
        self._sent: dict[Sent, KeeperAddress] = {}
        self._told: list[Message] | None = None
        self._trouble = ""

    def order(self, keep: KeepOrder) -> None:
        with self.changed:
            self.keep = keep
            self.look()

    def wait_for_orders(self, timeout_s: float) -> KeepOrder | None:
        """A keeper's port is known before its agent has spoken to it."""
        with self.changed:
            self.changed.wait_for(lambda: self.keep is not None, timeout_s)
            return self.keep

    def look(self) -> None:
        """Something has changed: whoever waits looks again, and the agent is told what there is now."""
        with self.changed:
            self.remove(one.name for one in spent(self.held(), self.safe()))
            self.changed.notify_all()
            kept = [one.told(not one.copy and key_of(one) in self.sent()) for one in self.held()]
            if kept != self._told:
                self.tell({"kept": kept})
                self._told = kept

    def complain(self, why: str) -> None:
        """Of what goes on going wrong the agent hears once."""
        with self.changed:
            if why != self._trouble:
                self.tell({"trouble": why})
                self._trouble = why

    def held(self) -> list[StoredSnapshot]:
        return holdings(self.keep.run, self.folder) if self.keep else []

    def sent(self) -> set[Sent]:
        """What the present buddy has."""
        buddy = self.keep.buddy if self.keep else None
        return {key for key, address in self._sent.items() if address == buddy}

    def note_sent(self, one: StoredSnapshot, buddy: KeeperAddress) -> None:
        with self.changed:
            here = {key_of(held) for held in self.held()}
            self._sent = {key: address for key, address in self._sent.items() if key in here}
            self._sent[key_of(one)] = buddy
            self.look()

    def safe(self) -> Safe | None:
        return read_safe(self.folder / safe_name(self.keep.run)) if self.keep else None

    def path(self, rank: int, slot: int) -> Path:
        """Where a copy goes. Its name is made of numbers and the agent's own word: nothing that a caller said."""
        assert self.keep is not None
        return self.folder / str(SlotName(self.keep.run, rank, slot, copy=True))

    def path_of(self, one: StoredSnapshot) -> Path:
        return self.folder / str(one.name)

    def remove(self, names: Iterable[SlotName]) -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                (self.folder / str(name)).unlink()

    def drop(self, ranks: Collection[int]) -> None:
        """All copies of these ranks, half-made ones too."""
        if self.keep is not None:
            with self.changed:
                self.remove(name for name in slots_of(self.keep.run, self.folder) if name.copy and name.rank in ranks)
                self.look()


# ---- How fast copies may go: below the speed at which they would be in the training's way.


CHUNK = 4 << 20
_LEAST = 64 << 10


class Pace:
    """A bucket of tokens, one for each byte, filled at the rate; it holds a quarter of a second's worth."""

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
        """Bytes to send at once: on a slow way the other side should not wait long for the next ones."""
        return max(_LEAST, min(CHUNK, int(self.rate / 8)))

    def take(self, count: int) -> None:
        """Wait until so many bytes may go. More than the bucket holds is lent, and paid for at once."""
        now = self._clock()
        self._tokens = min(self.rate / 4, self._tokens + (now - self._at) * self.rate) - count
        self._at = now
        if self._tokens < 0:
            self._sleep(-self._tokens / self.rate)


def unlimited() -> Pace:
    """Nobody trains while a rank's state is fetched."""
    return Pace(float(1 << 60))
