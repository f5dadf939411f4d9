"""What an agent does in processes of its own: look at its checks, and carry out orders."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from dalsegno.health.agent.errands import Send
from dalsegno.health.report import Finding, Gpu
from dalsegno.health.words import Order
from dalsegno.train.frames import Message


class NoChecks:
    """Until there are checks."""

    def names(self) -> Iterable[str]:
        return ()

    def look(self, without: frozenset[str]) -> Iterator[str | Finding]:
        return iter(())

    def gpus(self) -> Iterable[Gpu] | None:
        return None


@dataclass
class Duties:
    node: str
    boot: str
    findings: Callable[[], tuple[Finding, ...]] = field(default=tuple)

    def looks(self, settings: Message) -> NoChecks:
        return NoChecks()

    def do(self, order: Order, send: Send) -> None:
        raise NotImplementedError(order.do)
