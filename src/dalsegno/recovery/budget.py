"""How much may be done: nodes out at a time, nodes an hour, reboots, replacements. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from dalsegno.recovery.book import (
    DAY_S,
    HOUR_S,
    REBOOTED,
    REPLACED_BADLY,
    REPLACED_WELL,
    RESUMED,
    TAKEN,
    Book,
)
from dalsegno.recovery.facts import NodeFacts
from dalsegno.recovery.policy import Policy


class Outs:
    """How many nodes of each partition are out by our hand, and may be, while one round is decided."""

    def __init__(self, nodes: Iterable[NodeFacts], book: Book, policy: Policy, now: float) -> None:
        self.book, self.policy, self.now = book, policy, now
        self.size: dict[str, int] = {}
        self.out: dict[str, int] = {}
        self.taken: dict[str, int] = {}
        self._since = max(now - HOUR_S, resumed_at(book))
        for node in nodes:
            if node.name in policy.spares:  # beyond what the partition promises
                continue
            out = book.of(node.name).out
            for partition in node.slurm.partitions:
                self.size[partition] = self.size.get(partition, 0) + 1
                self.out[partition] = self.out.get(partition, 0) + out

    def most(self, partition: str) -> int:
        """One at least: a partition of two nodes has broken ones too."""
        return max(1, int(self.policy.max_out * self.size.get(partition, 0) + 1e-9))

    def refusal(self, node: NodeFacts) -> str:
        """Why not this one too; "" where it may be."""
        for partition in node.slurm.partitions:
            if node.name not in self.policy.spares and self.out.get(partition, 0) >= self.most(partition):
                return f"{self.out[partition]} of {self.size[partition]} nodes of {partition} are out already"
            hour = self.book.count(TAKEN, self._since, partition=partition) + self.taken.get(partition, 0)
            if hour >= self.policy.per_hour:
                more = "`dalsegno automation resume` allows as many again"
                return f"{hour} nodes of {partition} were taken out within the hour; {more}"
        return ""

    def take(self, node: NodeFacts) -> None:
        for partition in node.slurm.partitions:
            self.out[partition] = self.out.get(partition, 0) + (node.name not in self.policy.spares)
            self.taken[partition] = self.taken.get(partition, 0) + 1


def may_reboot(book: Book, node: str, key: str, policy: Policy, now: float) -> bool:
    return (
        book.count(REBOOTED, now - DAY_S, node=node, key=key) < policy.reboots_per_fault
        and book.count(REBOOTED, now - DAY_S, node=node) < policy.reboots_per_day
        and not book.count(REBOOTED, now - policy.reboots_apart_s, node=node)
    )


def breaker(book: Book, partitions: Collection[str], policy: Policy) -> str:
    """The partition whose replacements have failed too often, one after the other; "" if there is none."""
    for partition in partitions:
        good = [m.at for m in book.marks if m.kind == REPLACED_WELL and partition in m.partitions]
        since = max([*good, resumed_at(book)])
        if book.count(REPLACED_BADLY, since, partition=partition) >= policy.breaker:
            return partition
    return ""


def resumed_at(book: Book) -> float:
    """When somebody last said that things may go on, whatever had been spent by then; -1: never."""
    return max((mark.at for mark in book.marks if mark.kind == RESUMED), default=-1.0)
