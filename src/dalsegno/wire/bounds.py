"""Per-peer limits on a server's connections, time and requests."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar


class HeldConnection(Protocol):
    """A connection that a server keeps open for a peer."""

    @property
    def owner(self) -> Hashable:
        """The address or user whose connection limit applies."""

    @property
    def until(self) -> float:
        """The monotonic time at which the server closes the connection."""


H = TypeVar("H", bound=HeldConnection)


class WaitingConnections(Generic[H]):
    """Connections with a deadline, in the order of arrival.

    An owner that exceeds `max_per_owner` loses its own oldest connection. If the total exceeds `max_total`, the owner
    with the most connections loses its oldest one. A flood from one address or user therefore displaces its own
    connections. Only connections for which `may_close` returns true are displaced; it must be true for a new one.
    """

    def __init__(
        self, max_total: int, max_per_owner: int | None = None, may_close: Callable[[H], bool] = lambda each: True
    ) -> None:
        self._max_total, self._max_per_owner = max_total, max_total if max_per_owner is None else max_per_owner
        self._may_close = may_close
        self._held: list[H] = []

    def __contains__(self, connection: H) -> bool:
        return any(each is connection for each in self._held)

    def __len__(self) -> int:
        return len(self._held)

    def all(self) -> list[H]:
        return list(self._held)

    def add(self, connection: H) -> H | None:
        """Add a connection; return the connection that must be closed to make room, if any. It can be the new one."""
        self._held.append(connection)
        counts = Counter(each.owner for each in self._held)
        if counts[connection.owner] > self._max_per_owner:
            largest: list[Hashable] = [connection.owner]
        elif len(self._held) > self._max_total:
            largest = [owner for owner, _ in counts.most_common()]
        else:
            return None
        closable = (each for owner in largest for each in self._held if each.owner == owner and self._may_close(each))
        return next(closable)

    def remove(self, connection: H) -> None:
        """Remove a connection. It is not an error if it was removed already."""
        self._held = [each for each in self._held if each is not connection]

    def oldest(self) -> H | None:
        return self._held[0] if self._held else None

    def overdue(self, now: float) -> list[H]:
        return [each for each in self._held if each.until <= now]

    def next_deadline(self) -> float | None:
        return min((each.until for each in self._held), default=None)


@dataclass
class Allowance:
    """A token bucket that holds at most `burst` tokens and gains `per_s` tokens per second."""

    burst: float
    per_s: float
    clock: Callable[[], float] = time.monotonic
    _tokens: float = field(init=False)
    _at: float = field(init=False)

    def __post_init__(self) -> None:
        self._tokens, self._at = self.burst, self.clock()

    def _fill(self) -> None:
        now = self.clock()
        self._tokens, self._at = min(self._tokens + (now - self._at) * self.per_s, self.burst), now

    def spend(self, amount: float = 1.0) -> bool:
        """Take tokens and return whether there were enough. If not, the balance becomes negative."""
        self._fill()
        self._tokens -= amount
        return self._tokens >= 0

    def ready_in_s(self) -> float:
        """Return the seconds until the balance is positive; 0.0 if it is positive now."""
        self._fill()
        return 0.0 if self._tokens > 0 else -self._tokens / self.per_s + 0.001


class Allowances:
    """One allowance per owner. Only the `max_owners` most recently used ones are kept."""

    def __init__(
        self, burst: float, per_s: float, max_owners: int = 4096, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._burst, self._per_s, self._clock, self._max_owners = burst, per_s, clock, max_owners
        self._known: OrderedDict[Hashable, Allowance] = OrderedDict()

    def of(self, owner: Hashable) -> Allowance:
        allowance = self._known.pop(owner, None) or Allowance(self._burst, self._per_s, self._clock)
        self._known[owner] = allowance
        if len(self._known) > self._max_owners:
            self._known.popitem(last=False)
        return allowance
