"""Bounds on what peers may take from a server: how many connections, for how long, and how many requests."""

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
        """Who takes the room: an address, or a user."""

    @property
    def until(self) -> float:
        """When its time is over (monotonic)."""


H = TypeVar("H", bound=HeldConnection)


class WaitingConnections(Generic[H]):
    """Connections that may stay for a limited time, the oldest first.

    When there is no room, the owner with the most of them loses its oldest one. A flood from one address or user
    drives out its own connections; somebody who has only one loses it last.
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
        """Take one in; returns the one that has to go for it."""
        self._held.append(one)
        own = [each for each in self._held if each.owner == one.owner]
        if len(own) > self._most_each:
            return own[0]
        if len(self._held) <= self._most:
            return None
        ((largest, _),) = Counter(each.owner for each in self._held).most_common(1)
        return next(each for each in self._held if each.owner == largest)

    def remove(self, one: H) -> None:
        """Let one go; gone already is fine."""
        self._held = [each for each in self._held if each is not one]

    def oldest(self) -> H | None:
        return self._held[0] if self._held else None

    def overdue(self, now: float) -> list[H]:
        return [each for each in self._held if each.until <= now]

    def next_deadline(self) -> float | None:
        return min((each.until for each in self._held), default=None)


@dataclass
class Allowance:
    """A bucket of tokens: `burst` at once, then `per_s`."""

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
        """Take tokens, on credit if need be; False if there were not enough."""
        self._fill()
        self._tokens -= amount
        return self._tokens >= 0

    def ready_in_s(self) -> float:
        """How long until something may be spent again; 0.0 for now."""
        self._fill()
        return 0.0 if self._tokens > 0 else -self._tokens / self.per_s + 0.001


class Allowances:
    """An allowance for each owner; only so many are remembered, those used last."""

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
