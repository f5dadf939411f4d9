"""How much may be done: nodes out at a time, nodes an hour, reboots, replacements. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from dalsegno.recovery.book import DAY_S, HOUR_S, Book, MarkKind
from dalsegno.recovery.facts import NodeFacts
from dalsegno.recovery.phase import HeldAction
from dalsegno.recovery.policy import AUTO, Policy


@dataclass(frozen=True)
class Refusal:
    why: str
    held: HeldAction


def restraint(book: Book, policy: Policy) -> Refusal | None:
    """Why nothing at all is done just now, only said; None where things are done."""
    if book.paused:
        return Refusal("paused", HeldAction.PAUSED)
    return None if policy.mode == AUTO else Refusal("only observing", HeldAction.OBSERVING)


class Outs:
    """How many nodes of each partition are out by our hand, and may be, while one round is decided.

    Paused, or told only to observe, what would be taken out counts as if it were: so it would be.
    """

    def __init__(self, nodes: Iterable[NodeFacts], book: Book, policy: Policy, now: float) -> None:
        self.book, self.policy, self.now = book, policy, now
        self.size: dict[str, int] = {}
        self.out: dict[str, int] = {}
        self.taken: dict[str, int] = {}
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

    def refusal(self, node: NodeFacts) -> Refusal | None:
        """Why not this one too; None where it may be."""
        observing = self.policy.mode != AUTO
        only_said = self.book.paused or observing
        for partition in node.slurm.partitions:
            if node.name not in self.policy.spares and self.out.get(partition, 0) >= self.most(partition):
                are = "would be" if only_said and self.taken.get(partition) else "are"
                said = f"{self.out[partition]} of {self.size[partition]} nodes of {partition} {are} out already"
                return Refusal(said, HeldAction.OBSERVING if observing else HeldAction.OUT)
            hour = taken_within_the_hour(self.book, partition, self.now) + self.taken.get(partition, 0)
            if hour >= self.policy.per_hour:
                were = "would be" if only_said and self.taken.get(partition) else "were"
                more = "`dalsegno automation resume` allows as many again"
                said = f"{hour} nodes of {partition} {were} taken out within the hour; {more}"
                return Refusal(said, HeldAction.OBSERVING if observing else HeldAction.HOUR)
        return None

    def take(self, node: NodeFacts) -> None:
        for partition in node.slurm.partitions:
            self.out[partition] = self.out.get(partition, 0) + (node.name not in self.policy.spares)
            self.taken[partition] = self.taken.get(partition, 0) + 1


def taken_within_the_hour(book: Book, partition: str, now: float) -> int:
    """Or since somebody last said that things may go on."""
    return book.count(MarkKind.TAKEN, max(now - HOUR_S, resumed_at(book)), partition=partition)


def reboot_refusal(book: Book, node: str, key: str, policy: Policy, now: float) -> str:
    """Why a node is not rebooted now; "" where it may be."""
    for_it = book.count(MarkKind.REBOOTED, now - DAY_S, node=node, key=key)
    if for_it >= policy.reboots_per_fault:
        return f"it was rebooted for that {for_it} times within a day: no more reboots"
    today = book.count(MarkKind.REBOOTED, now - DAY_S, node=node)
    if today >= policy.reboots_per_day:
        return f"it was rebooted {today} times within a day: no more reboots"
    if book.count(MarkKind.REBOOTED, now - policy.reboots_apart_s, node=node):
        return f"it was rebooted less than {policy.reboots_apart_s / HOUR_S:g} h ago: not again so soon"
    return ""


def breaker(book: Book, partitions: Collection[str], policy: Policy) -> str:
    """The partition whose replacements have failed too often, one after the other; "" if there is none."""
    for partition in partitions:
        good = [m.at for m in book.marks if m.kind is MarkKind.REPLACED_WELL and partition in m.partitions]
        since = max([*good, resumed_at(book)])
        if book.count(MarkKind.REPLACED_BADLY, since, partition=partition) >= policy.breaker:
            return partition
    return ""


def resumed_at(book: Book) -> float:
    """When somebody last said that things may go on, whatever had been spent by then; -1: never."""
    return max((mark.at for mark in book.marks if mark.kind is MarkKind.RESUMED), default=-1.0)
