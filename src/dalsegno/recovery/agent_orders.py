"""Orders to an agent and their answers, which come in parts: kept together within limits, and never waited for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from dalsegno.health.report import Report
from dalsegno.health.words import Reply

MOST_BYTES = 4 << 20  # of all files of one answer
MOST_FILES = 32
MOST_ORDERS = 8  # at a time, to one agent


@dataclass(frozen=True)
class Answer:
    """What came of an order. `error`: why it came to nothing, or only to a part."""

    node: str
    error: str = ""
    report: Report | None = None
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Pending:
    """An order under way."""

    node: str
    until: float  # monotonic
    done: Callable[[Answer], None]
    listens: Callable[[int], None]  # told the port on which the agent waits for another
    port_until: float | None = None  # by when that must be; None: it is so, or need not be
    report: Report | None = None
    files: dict[str, list[str]] = field(default_factory=dict)
    size: int = 0
    error: str = ""

    @property
    def due(self) -> float:
        return self.until if self.port_until is None else min(self.port_until, self.until)

    @property
    def late(self) -> str:
        """Why it is given up when it is due."""
        return "it took too long" if self.port_until is None else "it did not say in time where it listens"

    def take(self, reply: Reply) -> None:
        """One more part; what is too much is left out, and the answer says so."""
        self.report = reply.report or self.report
        self.error = self.error or reply.error
        if reply.file:
            self._keep(reply.file, reply.part)
        if reply.port and not reply.done:
            self.port_until = None
            self.listens(reply.port)

    def _keep(self, file: str, part: str) -> None:
        self.size += len(part)
        if self.size > MOST_BYTES or (file not in self.files and len(self.files) >= MOST_FILES):
            self.error = self.error or "it said more than fits; the rest was left out"
            return
        self.files.setdefault(file, []).append(part)

    def answer(self, error: str = "") -> Answer:
        files = {name: "".join(parts) for name, parts in self.files.items()}
        return Answer(self.node, error or self.error, self.report, files)


class Orders:
    """Those of all agents, by number. A number is never used twice."""

    def __init__(self, first: int) -> None:
        self._next, self._pending = first, dict[int, Pending]()

    def add(self, pending: Pending) -> int:
        self._next += 1
        self._pending[self._next] = pending
        return self._next

    def under_way(self, node: str) -> int:
        return sum(one.node == node for one in self._pending.values())

    def take(self, node: str, reply: Reply) -> bool:
        """False for an answer to what this node was not asked, or no longer."""
        pending = self._pending.get(reply.order)
        if pending is None or pending.node != node:
            return False
        pending.take(reply)
        if reply.done and reply.order in self._pending:
            del self._pending[reply.order]
            pending.done(pending.answer())
        return True

    def lost(self, node: str, why: str) -> None:
        """No answer can come from this node any more."""
        for number in [number for number, one in self._pending.items() if one.node == node]:
            self._fail(number, why)

    def wake(self, now: float) -> float | None:
        """Give up what takes too long; returns when the next one does."""
        for number, late in [(number, one.late) for number, one in self._pending.items() if one.due <= now]:
            self._fail(number, late)
        return min((one.due for one in self._pending.values()), default=None)

    def _fail(self, number: int, why: str) -> None:
        if pending := self._pending.pop(number, None):
            pending.done(pending.answer(why))
