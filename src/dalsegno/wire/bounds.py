"""Limits on what peers may use of a server: connections, time and requests."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar


class HeldConnection(Protocol):
    """A connection that is held for a peer."""

    @property
    def owner(self) -> Hashable:
        """The address or user that the connection counts against."""

    @property
    def until(self) -> float:
        """The deadline of the connection (monotonic)."""


H = TypeVar("H", bound=HeldConnection)


class WaitingConnections(Generic[H]):
    """Connections with a deadline, the oldest first.

    When the limit is reached, the owner with the most connections loses its oldest one. A flood from one address or
    user displaces its own connections; an owner with a single connection loses it last.
    """

    def __init__(self, most: int, most_each: int | None = None) -> None:
        self._most, self._most_each = most, most if most_each is None else most_each
        self._held: list[H] = []

    def __contains__(self, one: H) -> bool:
        return any(each is one for each in self._held)

    def __len__(self) -> int:
        return len(self._held)

    def all(self) -> list[H]:
        return list(self._held)

    def add(self, one: H) -> H | None:
        """Add a connection; return the one that must be closed for it, if any."""
        self._held.append(one)
        own = [each for each in self._held if each.owner == one.owner]
        if len(own) > self._most_each:
            return own[0]
        if len(self._held) <= self._most:
            return None
        ((largest, _),) = Counter(each.owner for each in self._held).most_common(1)
        return next(each for each in self._held if each.owner == largest)

    def remove(self, one: H) -> None:
        """Remove a connection. It is no error if it was removed already."""
        self._held = [each for each in self._held if each is not one]

    def oldest(self) -> H | None:
        return self._held[0] if self._held else None

    def overdue(self, now: float) -> list[H]:
        return [each for each in self._held if each.until <= now]

    def next_deadline(self) -> float | None:
        return min((each.until for each in self._held), default=None)


@dataclass
class Allowance:
    """A token bucket: `burst` at once, then `per_s`."""

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
        """Take tokens, below zero if necessary; return False if there were not enough."""
        self._fill()
        self._tokens -= amount
        return self._tokens >= 0

    def ready_in_s(self) -> float:
        """Return the time until tokens are available again; 0.0 for now."""
        self._fill()
        return 0.0 if self._tokens > 0 else -self._tokens / self.per_s + 0.001


class Allowances:
    """One allowance per owner. Only the most recently used ones are remembered."""

    def __init__(
        self, burst: float, per_s: float, most: int = 4096, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._burst, self._per_s, self._clock, self._most = burst, per_s, clock, most
        self._known: OrderedDict[Hashable, Allowance] = OrderedDict()

    def of(self, owner: Hashable) -> Allowance:
        one = self._known.pop(owner, None) or Allowance(self._burst, self._per_s, self._clock)
        self._known[owner] = one
        if len(self._known) > self._most:
            self._known.popitem(last=False)
        return one
