"""How fast copies may go: below the speed at which they would be in the training's way."""

from __future__ import annotations

import time
from collections.abc import Callable

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
