"""The limits on recovery: nodes out of service at a time, nodes per hour, reboots, replacements. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from dalsegno.recovery.decisions.facts import SERVER_AWAY_KEY, NodeFacts
from dalsegno.recovery.decisions.phase import HeldAction
from dalsegno.recovery.decisions.policy import Policy
from dalsegno.recovery.decisions.records import DAY_S, HOUR_S, MarkKind, NodeRecords
from dalsegno.wire.cloud_notice import CHECK as CLOUD_NOTICE


@dataclass(frozen=True)
class Refusal:
    why: str
    held: HeldAction


def find_restraint(records: NodeRecords, policy: Policy, partitions: Collection[str]) -> Refusal | None:
    """Return why no action is carried out on a node in these partitions; None if actions are allowed."""
    if records.paused:
        return Refusal("paused", HeldAction.PAUSED)
    return Refusal("only observing", HeldAction.OBSERVING) if policy.observes(partitions) else None


class OutOfService:
    """The number of nodes out of service in each partition, kept up to date during one round of decisions.

    While recovery is paused or only observes, a node that would be taken out is counted as out. Nodes that wait for a
    file server are counted separately, because they must not keep other nodes from being repaired.
    """

    def __init__(self, nodes: Iterable[NodeFacts], records: NodeRecords, policy: Policy, now: float) -> None:
        self.records, self.policy, self.now = records, policy, now
        self.size: dict[str, int] = {}
        self.out: dict[str, int] = {}
        self.waiting: dict[str, int] = {}
        self.taken: dict[str, int] = {}
        self._changed: set[str] = set()  # partitions from which this round has taken a node
        for node in nodes:
            if node.name in policy.spares:  # spares are not part of the partition's capacity
                continue
            own = records.get(node.name)
            for partition in node.slurm.partitions:
                self.size[partition] = self.size.get(partition, 0) + 1
                self.out[partition] = self.out.get(partition, 0) + own.counts
                self.waiting[partition] = self.waiting.get(partition, 0) + own.waits_for_server

    def limit(self, partition: str) -> int:
        return max_out(self.policy, self.size.get(partition, 0))

    def refusal(self, node: NodeFacts) -> Refusal | None:
        """Return why this node may not be taken out; None if it may."""
        for partition in node.slurm.partitions:
            if refusal := self._no_room(node, partition, self.out.get(partition, 0)):
                return refusal
            hour = count_taken_last_hour(self.records, partition, self.now) + self.taken.get(partition, 0)
            if hour >= self.policy.per_hour:
                were = "would be" if self._is_dry_run(node) and self.taken.get(partition) else "were"
                more = "`dalsegno automation resume` resets this limit"
                text = f"{hour} nodes of {partition} {were} taken out of service within the hour; {more}"
                observing = self.policy.observes(node.slurm.partitions)
                return Refusal(text, HeldAction.OBSERVING if observing else HeldAction.HOUR)
        return None

    def refusal_to_wait(self, node: NodeFacts) -> Refusal | None:
        """Return why this node may not be taken out until its file server answers; None if it may.

        One server can be the cause on all nodes, so these nodes have no limit per hour. Too many at a time would end
        all service for a server that may only be overloaded.
        """
        outs = ((each, self.out.get(each, 0) + self.waiting.get(each, 0)) for each in node.slurm.partitions)
        return next((refusal for each, out in outs if (refusal := self._no_room(node, each, out))), None)

    def _no_room(self, node: NodeFacts, partition: str, out: int) -> Refusal | None:
        if node.name in self.policy.spares or out < self.limit(partition):
            return None
        are = "would be" if self._is_dry_run(node) and partition in self._changed else "are"
        text = f"{out} of {self.size[partition]} nodes of {partition} {are} out of service already"
        observing = self.policy.observes(node.slurm.partitions)
        return Refusal(text, HeldAction.OBSERVING if observing else HeldAction.OUT)

    def _is_dry_run(self, node: NodeFacts) -> bool:
        return self.records.paused or self.policy.observes(node.slurm.partitions)

    def take_to_wait(self, node: NodeFacts) -> None:
        self._changed.update(node.slurm.partitions)
        for partition in node.slurm.partitions:
            self.waiting[partition] = self.waiting.get(partition, 0) + (node.name not in self.policy.spares)

    def take(self, node: NodeFacts) -> None:
        self._changed.update(node.slurm.partitions)
        for partition in node.slurm.partitions:
            self.out[partition] = self.out.get(partition, 0) + (node.name not in self.policy.spares)
            self.taken[partition] = self.taken.get(partition, 0) + 1


def budget_left(records: NodeRecords, policy: Policy, partition: str, nodes: Collection[str], now: float) -> int:
    """Return how many more nodes of a partition could be taken out of service now. `nodes` are all of its nodes."""
    counted = [name for name in nodes if name not in policy.spares]
    limit = max_out(policy, len(counted)) - sum(records.get(name).counts for name in counted)
    return max(0, min(limit, policy.per_hour - count_taken_last_hour(records, partition, now)))


def max_out(policy: Policy, size: int) -> int:
    """Return how many nodes of a partition may be out: at least one, so that small partitions are repaired too."""
    return max(1, int(policy.max_out * size + 1e-9))


def count_taken_last_hour(records: NodeRecords, partition: str, now: float) -> int:
    """Return how many nodes of a partition were taken out in the last hour, or since recovery was last resumed.

    Instances that the cloud provider ends do not count, and neither do nodes whose file server did not answer.
    """
    since = max(now - HOUR_S, resumed_at(records))
    return sum(
        mark.kind is MarkKind.TAKEN
        and mark.at > since
        and partition in mark.partitions
        and mark.key.partition("[")[0] != CLOUD_NOTICE
        and mark.key != SERVER_AWAY_KEY
        for mark in records.marks
    )


def reboot_refusal(records: NodeRecords, node: str, key: str, policy: Policy, now: float) -> str:
    """Return why a node may not be rebooted now; "" if it may."""
    for_it = records.count(MarkKind.REBOOTED, now - DAY_S, node=node, key=key)
    if for_it >= policy.reboots_per_fault:
        return f"it was rebooted {for_it} times for this fault within a day, the limit"
    today = records.count(MarkKind.REBOOTED, now - DAY_S, node=node)
    if today >= policy.reboots_per_day:
        return f"it was rebooted {today} times within a day, the limit"
    if records.count(MarkKind.REBOOTED, now - policy.reboots_apart_s, node=node):
        return f"it was rebooted less than {policy.reboots_apart_s / HOUR_S:g} h ago"
    return ""


def find_tripped_breaker(records: NodeRecords, partitions: Collection[str], policy: Policy) -> str:
    """Return the partition in which too many replacements in a row have failed; "" if there is none."""
    for partition in partitions:
        good = [m.at for m in records.marks if m.kind is MarkKind.REPLACED_WELL and partition in m.partitions]
        since = max([*good, resumed_at(records)])
        if records.count(MarkKind.REPLACED_BADLY, since, partition=partition) >= policy.breaker:
            return partition
    return ""


def resumed_at(records: NodeRecords) -> float:
    """Return when an administrator last resumed recovery, which resets the limits; -1 if never."""
    return max((mark.at for mark in records.marks if mark.kind is MarkKind.RESUMED), default=-1.0)
