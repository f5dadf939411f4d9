"""The plan of a HyperPod cluster: what `up` will create or change, with its consequences. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from dalsegno.errors import TargetError
from dalsegno.spec.facts import Cluster, Storage
from dalsegno.targets.base import named
from dalsegno.targets.cloud.consequences import CapacityCheck, ChangeEffect, CloudPlan, CloudResource, Minutes
from dalsegno.targets.cloud.cost import CostLine, HourlyCost, PriceTable
from dalsegno.targets.hyperpod.answers import ClusterDescription, HyperPodStatus, SharedFileSystem
from dalsegno.targets.hyperpod.changes import TagChange, find_changes
from dalsegno.targets.hyperpod.folder import HyperPodState
from dalsegno.targets.hyperpod.requests import planned_groups, settings_of

CREATION, CHANGE = Minutes(15, 30), Minutes(10, 20)


@dataclass(frozen=True)
class HyperPodPlan(CloudPlan):
    """The plan of one `up`."""

    found: ClusterDescription | None = None
    state: HyperPodState | None = None
    shared: tuple[SharedFileSystem, ...] = ()  # existing file systems that the instances mount
    new_storage: tuple[Storage, ...] = ()
    new_bucket: bool = False
    files: Mapping[str, bytes] = field(default_factory=dict)  # the lifecycle folder: name -> content of each file
    upload: tuple[str, ...] = ()  # names of files that are new or have changed
    tags: TagChange | None = None
    recreates: bool = False  # whether to delete the cluster and create it again, because its creation failed
    deleting: bool = False  # whether HyperPod is still deleting the cluster; `up` waits, then creates it again
    unfinished: bool = False
    ends: Mapping[str, float] = field(default_factory=dict)  # instance group -> when AWS takes back its machines

    @property
    def empty(self) -> bool:
        return super().empty and not (self.upload or self.recreates or self.unfinished or self.stale)

    @property
    def import_images(self) -> tuple[str, ...]:
        return () if self.empty else self.cluster.containers.images

    @property
    def stale(self) -> bool:
        """Return whether an earlier `up` has uploaded scripts that not all running instances have run yet."""
        return bool(self.state and self.state.stale) and not self.fresh

    def sentences(self) -> list[str]:
        said = super().sentences()
        if self.recreates:
            said.insert(0, f"deletes {self.cluster.name}, whose creation failed, and creates it again")
        elif self.deleting:
            said.insert(0, f"waits until HyperPod has deleted {self.cluster.name}, and creates it again")
        elif self.unfinished and not self.fresh:
            said.insert(0, "finishes what an earlier `up` began")
        return said

    def _sentences(self) -> Iterator[str]:
        yield from super()._sentences()
        if self.stale and not self.upload:
            yield "runs the newest lifecycle scripts on all instances, which an earlier `up` did not complete"
        if self.empty or not self.upload:
            return
        own = settings_of(self.cluster)
        yield f"uploads {named('file', self.upload)} to {own.source_uri}"
        if not self.fresh:
            key = "runs them on all instances" if own.ssh_key else "running instances need `sudo dalsegno-refresh`"
            yield f"the lifecycle scripts changed: HyperPod runs them on new and replaced instances; {key}"


def make_plan(
    cluster: Cluster,
    found: ClusterDescription | None,
    state: HyperPodState | None,
    shared: Sequence[SharedFileSystem],
    new_storage: Sequence[Storage],
    files: Mapping[str, bytes],
    digests: Mapping[str, str],
    prices: PriceTable,
    *,
    new_bucket: bool = False,
    unfinished: bool = False,
    tags: TagChange | None = None,
) -> HyperPodPlan:
    """Return the plan that turns the running cluster `found` into the cluster of the file. `found` is None if there is
    no cluster."""
    failed = found is not None and found.status is HyperPodStatus.FAILED and not found.groups_in_service
    deleting = found is not None and found.status is HyperPodStatus.DELETING
    fresh = found is None or failed or deleting
    before = state.uploaded if state else {}
    upload = tuple(name for name, digest in digests.items() if before.get(name) != digest)
    moving = found is not None and found.status.moving and not deleting
    plan = HyperPodPlan(
        cluster,
        fresh=fresh,
        resumes=f"HyperPod's {found.status.value}" if found and moving else "",
        resources=tuple(_resources(cluster, new_storage, new_bucket, fresh=fresh)),
        changes=() if fresh or found is None else find_changes(cluster, found, tags),
        cost=cost_of(cluster, prices),
        cost_before=None if fresh or found is None else _cost_before(found, cluster, state, prices),
        time=CREATION if fresh else CHANGE,
        checks=tuple(_checks(cluster, found if not fresh else None)),
        notes=tuple(_notes(cluster, state, fresh=fresh)),
        found=found,
        state=state,
        shared=tuple(shared),
        new_storage=tuple(new_storage),
        new_bucket=new_bucket,
        files=files,
        upload=upload,
        tags=None if fresh else tags,
        recreates=failed,
        deleting=deleting,
        unfinished=unfinished,
    )
    return plan


def _resources(cluster: Cluster, storage: Sequence[Storage], bucket: bool, *, fresh: bool) -> Iterator[CloudResource]:
    if fresh:
        groups = [f"{group.name}: {group.count} x {group.instance_type}" for group in planned_groups(cluster)]
        yield CloudResource("instance group", tuple(groups))
    for each in storage:
        yield CloudResource("FSx for Lustre file system", (each.name,))
    if bucket:
        yield CloudResource("S3 bucket", (settings_of(cluster).bucket,))


def _notes(cluster: Cluster, state: HyperPodState | None, *, fresh: bool) -> Iterator[str]:
    if fresh:
        recovery = "is off" if settings_of(cluster).node_recovery == "None" else "stays on"
        yield f"HyperPod's own recovery {recovery}: our runs restart by themselves, without `--auto-resume`"
    kept = [name for name in (state.created_storage if state else {}) if name not in _names(cluster)]
    if kept:
        yield f"keeps and pays {named('file system', kept)}, which left the file, until `dalsegno down` deletes it"


def _names(cluster: Cluster) -> set[str]:
    return {each.name for each in cluster.storage}


def cost_of(cluster: Cluster, prices: PriceTable) -> HourlyCost:
    """Return the price of the cluster per hour, including the file systems that `up` creates."""
    counts: dict[str, int] = {}
    for group in planned_groups(cluster):
        counts[group.instance_type] = counts.get(group.instance_type, 0) + group.count
    lines = [prices.instance(name, count) for name, count in counts.items()]
    return HourlyCost((*lines, *_storage_cost(cluster, prices)))


def _storage_cost(cluster: Cluster, prices: PriceTable) -> Iterator[CostLine]:
    for each in cluster.storage:
        if each.type == "lustre" and not each.source:
            yield _lustre_cost(each, prices)


def _lustre_cost(storage: Storage, prices: PriceTable) -> CostLine:
    return prices.resource(
        f"aws-fsx-lustre-{storage.throughput_mb_per_s_per_tib or 250}", (storage.size_mib or 0) / 1024
    )


def _cost_before(
    found: ClusterDescription, cluster: Cluster, state: HyperPodState | None, prices: PriceTable
) -> HourlyCost:
    """Return the present price per hour, without file systems that `up` has not created yet."""
    counts: dict[str, int] = {}
    for group in found.groups:
        counts[group.instance_type] = counts.get(group.instance_type, 0) + group.target_count
    lines = [prices.instance(name, count) for name, count in counts.items()]
    created = state.created_storage if state else {}
    lines += [_lustre_cost(each, prices) for each in cluster.storage if each.name in created]
    return HourlyCost(tuple(lines))


def _checks(cluster: Cluster, found: ClusterDescription | None) -> Iterator[CapacityCheck]:
    known = {group.name: group.target_count for group in found.groups} if found else {}
    wanted: dict[str, int] = {}
    for group in planned_groups(cluster):
        if group.count > known.get(group.name, 0):
            wanted[group.instance_type] = wanted.get(group.instance_type, 0) + group.count
    for name, count in wanted.items():
        yield CapacityCheck(f"the service quota `{name} for cluster usage`", f"at least {count}")
    for group in planned_groups(cluster):
        if group.own.training_plan:
            yield CapacityCheck(f"the training plan of {group.name}", f"{group.count} x {group.instance_type}, active")


def refuse_impossible(plan: HyperPodPlan) -> None:
    """Raise an error if the plan has a change that HyperPod cannot make on a running cluster."""
    for change in plan.changes:
        if change.effect is ChangeEffect.NEEDS_NEW_CLUSTER:
            raise TargetError(
                f"{change.path}: {change.old or 'none'} cannot become {change.new or 'none'}", hint=change.detail
            )
