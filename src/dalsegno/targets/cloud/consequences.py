"""The consequences of a plan for a cloud, as values: resources, minutes, quotas, and what a change ends or deletes.

Each cloud target computes these values and adds the requests that `apply` sends. This module turns the values into
text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from dalsegno.spec.facts import Cluster
from dalsegno.targets.base import counted, named
from dalsegno.targets.cloud.cost import HourlyCost


class ChangeEffect(Enum):
    """The effect that a change of one setting has on a running cluster, in order of severity."""

    IN_PLACE = "changes in place"
    AS_JOBS_END = "replaces nodes as their jobs end"
    ENDS_JOBS = "replaces nodes at once, and ends the jobs on them"
    STOPS_NODES = "needs all compute nodes stopped first"
    LOSES_DATA = "deletes data"
    NEEDS_NEW_CLUSTER = "is not possible on a running cluster"

    @property
    def rank(self) -> int:
        return list(ChangeEffect).index(self)


@dataclass(frozen=True)
class SettingChange:
    """A difference between the running cluster and the file. `path` names the platform's setting."""

    path: str
    old: str
    new: str
    effect: ChangeEffect
    detail: str = ""  # what is lost, or what to do instead

    def sentence(self) -> str:
        detail = f": {self.detail}" if self.detail else ""
        return f"{self.path}: {self.old or 'none'} → {self.new or 'none'}; {self.effect.value}{detail}"


@dataclass(frozen=True)
class CloudResource:
    """The resources of one kind that a plan creates."""

    noun: str  # the provider's name for this kind, such as "FSx for Lustre" or "VPC"
    names: tuple[str, ...]


@dataclass(frozen=True)
class Minutes:
    """The time that an operation usually takes, in minutes."""

    least: int
    most: int

    def sentence(self) -> str:
        return f"takes about {self.least} to {self.most} minutes"


# EC2 starts to take back the machines of a capacity block half an hour before its end. UltraServers are taken back an
# hour before it. Training plans of SageMaker are made of capacity blocks.
TAKEN_BEFORE_S, ULTRASERVER_BEFORE_S = 1800.0, 3600.0
_ULTRASERVERS = ("p6e-gb", "trn2u.")


def taken_at(end: float, instance_type: str) -> float:
    """Return when AWS starts to take back machines of reserved capacity that ends at `end`."""
    ultra = instance_type.removeprefix("ml.").startswith(_ULTRASERVERS)
    return end - (ULTRASERVER_BEFORE_S if ultra else TAKEN_BEFORE_S)


@dataclass(frozen=True)
class CapacityCheck:
    """Something that must exist or suffice for the plan, such as a quota, a reservation or a bucket.

    `fault` says why it does not. Without a fault, the user must check that it is as `wanted` says.
    """

    what: str
    wanted: str
    fault: str = ""

    def sentence(self) -> str:
        return f"{self.what}: {self.fault}" if self.fault else f"check {self.what}: {self.wanted}"


@dataclass(frozen=True)
class CloudPlan:
    """The consequences of a plan for a cloud. The plan class of each target adds the data that `apply` needs."""

    cluster: Cluster
    fresh: bool = False
    resumes: str = ""  # an operation of an earlier command that still runs; this `up` first waits for it
    resources: tuple[CloudResource, ...] = ()
    changes: tuple[SettingChange, ...] = ()
    cost: HourlyCost = field(default_factory=lambda: HourlyCost(()))
    cost_before: HourlyCost | None = None
    time: Minutes = field(default_factory=lambda: Minutes(0, 0))
    checks: tuple[CapacityCheck, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def empty(self) -> bool:
        return not (self.fresh or self.resumes or self.resources or self.changes)

    @property
    def only_user(self) -> str:
        return ""

    @property
    def import_images(self) -> tuple[str, ...]:
        return ()

    @property
    def impossible(self) -> tuple[SettingChange, ...]:
        return tuple(change for change in self.changes if change.effect is ChangeEffect.NEEDS_NEW_CLUSTER)

    def sentences(self) -> list[str]:
        return list(self._sentences())

    def _sentences(self) -> Iterator[str]:
        if self.empty:
            yield "nothing to do: the cluster is as the file says"
            return
        if self.resumes:
            yield f"follows {self.resumes}, which an earlier command started"
        if self.fresh:
            yield describe_cluster(self.cluster)
        for resource in self.resources:
            yield f"creates {named_resource(resource)}"
        for change in sorted(self.changes, key=lambda each: -each.effect.rank):
            yield change.sentence()
        yield self._price()
        if self.time.most:
            yield self.time.sentence()
        yield from (check.sentence() for check in self.checks if check.fault)
        yield from self.notes

    def _price(self) -> str:
        if self.cost_before is None:
            return self.cost.sentence()
        difference = self.cost.usd_per_hour - self.cost_before.usd_per_hour
        return f"{self.cost.sentence()} ({difference:+,.2f} USD per hour)"

    def details(self) -> list[str]:
        """Return the price of each part, and what to check before `up`."""
        return [*self.cost.details(), *(check.sentence() for check in self.checks if not check.fault)]


def describe_cluster(cluster: Cluster) -> str:
    """Return the sentence that describes a new cluster."""
    nodes = [node for node in cluster.nodes if not node.spare]
    spares = len(cluster.nodes) - len(nodes)
    with_spares = f" and {counted(spares, 'spare')}" if spares else ""
    kinds = ", ".join(dict.fromkeys(node.instance for node in cluster.nodes if node.instance))
    size = f"{counted(len(nodes), 'node')}{with_spares} ({kinds}) in {counted(len(cluster.partitions), 'partition')}"
    return f"creates {cluster.name} on {cluster.target}: {size}"


def named_resource(resource: CloudResource) -> str:
    return named(resource.noun, resource.names)


def compare_settings(old: object, new: object, path: str = "") -> Iterator[tuple[str, object, object]]:
    """Yield the path, the old value and the new value of each difference between two trees of mappings and lists.

    List entries that have a `Name` are compared by name. So an added queue is one difference.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys([*old, *new]):
            yield from compare_settings(old.get(key), new.get(key), f"{path}/{key}" if path else str(key))
    elif _is_named(old) and _is_named(new):
        before, after = _by_name(old), _by_name(new)
        for name in dict.fromkeys([*before, *after]):
            yield from compare_settings(before.get(name), after.get(name), f"{path}[{name}]")
    elif old != new:
        yield path, old, new


def _is_named(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, dict) and "Name" in each for each in value)


def _by_name(value: object) -> dict[str, object]:
    assert isinstance(value, list)
    return {str(each["Name"]): each for each in value}


def show_setting(value: object) -> str:
    """Return a value of a setting as short text."""
    if value is None:
        return ""
    if isinstance(value, dict):
        return str(value.get("Name") or "set")
    if isinstance(value, list):
        return ", ".join(show_setting(each) for each in value[:3]) + (" …" if len(value) > 3 else "")
    return str(value)
