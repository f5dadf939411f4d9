"""The plan of a HyperPod cluster: what `up` will create or change, with its consequences. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from dalsegno.errors import TargetError
from dalsegno.spec.facts import Cluster, Storage
from dalsegno.targets.base import named
from dalsegno.targets.cloud.consequences import CapacityCheck, ChangeEffect, CloudPlan, CloudResource, Minutes
from dalsegno.targets.cloud.cost import CostLine, HourlyCost, PriceTable
from dalsegno.targets.hyperpod.answers import ClusterDescription, HyperPodStatus
from dalsegno.targets.hyperpod.folder import HyperPodState
from dalsegno.targets.hyperpod.requests import SharedFileSystem, find_changes, planned_groups, settings_of

CREATION, CHANGE = Minutes(15, 30), Minutes(10, 20)


@dataclass(frozen=True)
class HyperPodPlan(CloudPlan):
    """The plan of one `up`."""

    found: ClusterDescription | None = None
    state: HyperPodState | None = None
    shared: tuple[SharedFileSystem, ...] = ()  # file systems that exist
    new_storage: tuple[Storage, ...] = ()
    new_bucket: bool = False
    files: Mapping[str, bytes] = field(default_factory=dict)  # of the lifecycle folder
    upload: tuple[str, ...] = ()  # names of files that are new or have changed
    recreates: bool = False  # an earlier creation failed, and HyperPod cannot change such a cluster
    unfinished: bool = False

    @property
    def empty(self) -> bool:
        return super().empty and not (self.upload or self.recreates or self.unfinished)

    def sentences(self) -> list[str]:
        said = super().sentences()
        if self.recreates:
            said.insert(0, f"deletes {self.cluster.name}, whose creation failed, and creates it again")
        elif self.unfinished and not self.fresh:
            said.insert(0, "finishes what an earlier `up` began")
        return said

    def _sentences(self) -> Iterator[str]:
        yield from super()._sentences()
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
) -> HyperPodPlan:
    """Return the plan that turns the cluster that was found into that of the file."""
    failed = found is not None and found.status is HyperPodStatus.FAILED and not found.groups_in_service
    fresh = found is None or failed
    before = state.uploaded if state else {}
    upload = tuple(name for name, digest in digests.items() if before.get(name) != digest)
    moving = found is not None and found.status.moving
    plan = HyperPodPlan(
        cluster,
        fresh=fresh,
        resumes=f"HyperPod's {found.status.value}" if found and moving else "",
        resources=tuple(_resources(cluster, new_storage, new_bucket)) if fresh or new_storage else (),
        changes=() if fresh or found is None else find_changes(cluster, found),
        cost=cost_of(cluster, prices),
        cost_before=None if fresh or found is None else _cost_before(found, cluster, prices),
        time=CREATION if fresh else CHANGE,
        checks=tuple(_checks(cluster, found if not fresh else None)),
        notes=("its own recovery stays on: our runs restart by themselves, without `--auto-resume`",) if fresh else (),
        found=found,
        state=state,
        shared=tuple(shared),
        new_storage=tuple(new_storage),
        new_bucket=new_bucket,
        files=files,
        upload=upload,
        recreates=failed,
        unfinished=unfinished,
    )
    return plan


def _resources(cluster: Cluster, storage: Sequence[Storage], bucket: bool) -> Iterator[CloudResource]:
    groups = [f"{group.name}: {group.count} x {group.instance_type}" for group in planned_groups(cluster)]
    yield CloudResource("instance group", tuple(groups))
    for each in storage:
        yield CloudResource("FSx for Lustre file system", (each.name,), data=True)
    if bucket:
        yield CloudResource("S3 bucket", (settings_of(cluster).bucket,))


def cost_of(cluster: Cluster, prices: PriceTable) -> HourlyCost:
    """Return what the cluster costs per hour, with the file systems that `up` creates."""
    counts: dict[str, int] = {}
    for group in planned_groups(cluster):
        counts[group.instance_type] = counts.get(group.instance_type, 0) + group.count
    lines = [prices.instance(name, count) for name, count in counts.items()]
    return HourlyCost((*lines, *_storage_cost(cluster, prices)))


def _storage_cost(cluster: Cluster, prices: PriceTable) -> Iterator[CostLine]:
    for each in cluster.storage:
        if each.type == "lustre" and not each.source:
            yield prices.resource(
                f"aws-fsx-lustre-{each.throughput_mb_per_s_per_tib or 250}", (each.size_mib or 0) / 1024
            )


def _cost_before(found: ClusterDescription, cluster: Cluster, prices: PriceTable) -> HourlyCost:
    counts: dict[str, int] = {}
    for group in found.groups:
        counts[group.instance_type] = counts.get(group.instance_type, 0) + group.target_count
    lines = [prices.instance(name, count) for name, count in counts.items()]
    return HourlyCost((*lines, *_storage_cost(cluster, prices)))


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


def refuse_unbuilt(cluster: Cluster) -> None:
    """Raise for parts of the cluster file that nothing sets up on HyperPod, so that nobody relies on them."""
    own = settings_of(cluster)
    parts = {
        "`spares`": any(node.spare for node in cluster.nodes),
        "`slurm.backup_controller`": cluster.slurm.backup_controller,
        "`slurm.rest`": cluster.slurm.rest,
        "`slurm.topology`": bool(cluster.slurm.topology),
        "`reservations`": bool(cluster.reservations),
        "`containers.images`": bool(cluster.containers.images),
    }
    if found := [name for name, used in parts.items() if used]:
        raise TargetError(
            f"{' and '.join(found)} {'is' if len(found) == 1 else 'are'} not built yet for `target: hyperpod`",
            hint="remove it from the cluster file; `dalsegno run --spares N` keeps spare nodes for one run",
        )
    machines = {"head": own.head_instance, **({"login": own.login_instance} if cluster.logins else {})}
    for name, instance in machines.items():
        if not instance:
            raise TargetError(f"`{name}` has no instance type", hint=f"add `{name}: {{instance: ml.m5.2xlarge}}`")
    if any(each.type == "lustre" and not each.source for each in cluster.storage) and not own.subnets:
        raise TargetError(
            "a new FSx for Lustre file system needs `hyperpod.subnets` and `hyperpod.security_groups`",
            hint="add them, or name an existing file system with `source: fs-…`",
        )


def refuse_impossible(plan: HyperPodPlan) -> None:
    """Raise if HyperPod cannot make a change on a running cluster."""
    for change in plan.changes:
        if change.effect is ChangeEffect.NEEDS_NEW_CLUSTER:
            raise TargetError(f"{change.path}: {change.old} cannot become {change.new}", hint=change.detail)
