"""Orders to an agent and their answers, which come in parts: kept together within limits, and never waited for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from dalsegno.health.messages import Reply, Report

MOST_BYTES = 4 << 20  # of all files of one answer
MOST_FILES = 32
MOST_ORDERS = 8  # at a time, to one agent


class OrderEnd(Enum):
    """How an order to an agent ended; the values are what people are told."""

    ANSWERED = ""
    FAILED = "its agent could not do it"  # the agent says why
    TRUNCATED = "it said more than fits; the rest was left out"
    LATE = "it took too long"
    NO_PORT = "it did not say in time where it listens"
    OVERLOADED = "its agent has too much to do"
    CONTROLLER_BUSY = "the controller is busy"
    NOT_CONNECTED = "its agent is not connected"
    DISCONNECTED = "its connection broke"
    AGENT_RESTARTED = "its agent was restarted"
    NODE_GONE = "it is gone"
    NODE_REMOVED = "it is no node of the cluster any more"

    @property
    def undecided(self) -> bool:
        """Whether the order got lost on the way, which says nothing about the node: it may be given again."""
        return self in _LOST


_LOST = (OrderEnd.NOT_CONNECTED, OrderEnd.DISCONNECTED, OrderEnd.AGENT_RESTARTED, OrderEnd.NODE_GONE)


@dataclass(frozen=True)
class Answer:
    """What came of an order. `detail` is the agent's own account of a failure."""

    node: str
    end: OrderEnd = OrderEnd.ANSWERED
    detail: str = ""
    report: Report | None = None
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def error(self) -> str:
        """Return why it came to nothing, or only to a part; "" if it was done."""
        return self.detail or self.end.value


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
    end: OrderEnd = OrderEnd.ANSWERED
    detail: str = ""

    @property
    def due(self) -> float:
        return self.until if self.port_until is None else min(self.port_until, self.until)

    @property
    def late(self) -> OrderEnd:
        """Return how it ends when it is due and no answer has come."""
        return OrderEnd.LATE if self.port_until is None else OrderEnd.NO_PORT

    def take(self, reply: Reply) -> None:
        """One more part; what is too much is left out, and the answer says so."""
        self.report = reply.report or self.report
        if reply.error and self.end is OrderEnd.ANSWERED:
            self.end, self.detail = OrderEnd.FAILED, reply.error
        if reply.file:
            self._keep(reply.file, reply.part)
        if reply.port and not reply.done:
            self.port_until = None
            self.listens(reply.port)

    def _keep(self, file: str, part: str) -> None:
        self.size += len(part)
        if self.size > MOST_BYTES or (file not in self.files and len(self.files) >= MOST_FILES):
            self.end = OrderEnd.TRUNCATED if self.end is OrderEnd.ANSWERED else self.end
            return
        self.files.setdefault(file, []).append(part)

    def answer(self, end: OrderEnd = OrderEnd.ANSWERED) -> Answer:
        """Return what has come so far; `end` says why no more will come."""
        files = {name: "".join(parts) for name, parts in self.files.items()}
        if end is not OrderEnd.ANSWERED:
            return Answer(self.node, end, "", self.report, files)
        return Answer(self.node, self.end, self.detail, self.report, files)


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

    def lost(self, node: str, why: OrderEnd) -> None:
        """End all orders of a node from which no answer can come any more."""
        for number in [number for number, one in self._pending.items() if one.node == node]:
            self._fail(number, why)

    def wake(self, now: float) -> float | None:
        """Give up what takes too long; returns when the next one does."""
        for number, late in [(number, one.late) for number, one in self._pending.items() if one.due <= now]:
            self._fail(number, late)
        return min((one.due for one in self._pending.values()), default=None)

    def _fail(self, number: int, why: OrderEnd) -> None:
        if pending := self._pending.pop(number, None):
            pending.done(pending.answer(why))
