"""The plan for a cluster on ParallelCluster: what it creates or changes, what that costs, and what must exist. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from dalsegno.errors import TargetError
from dalsegno.hardware import instances
from dalsegno.slurm.facts import JobInfo
from dalsegno.spec.aws_facts import PclusterSettings, SlurmQueue
from dalsegno.spec.facts import Cluster
from dalsegno.targets.base import Removal
from dalsegno.targets.cloud.consequences import CapacityCheck, ChangeEffect, CloudPlan, Minutes, taken_at
from dalsegno.targets.cloud.cost import CostLine, HourlyCost, PriceTable
from dalsegno.targets.parallelcluster.folder import PclusterState
from dalsegno.targets.parallelcluster.prerequisites import (
    DEFAULT_LUSTRE_THROUGHPUT,
    OPENZFS_THROUGHPUT,
    Prerequisites,
    settings_of,
    stack_name,
)
from dalsegno.targets.parallelcluster.references import bucket_of
from dalsegno.targets.parallelcluster.stack_changes import FILE_SYSTEM
from dalsegno.targets.sides import homes_on_machines, named_sources

PRICED_REGION = "us-east-1"
CREATION, UPDATE, FILE_SYSTEMS = Minutes(15, 20), Minutes(3, 10), Minutes(10, 15)


@dataclass(frozen=True)
class PclusterPlan(CloudPlan):
    """The plan of one `up`: its consequences, and the template, ids and config that `apply` needs."""

    # ids in the cluster file and in the stacks it names, and a bucket that an earlier `up` left
    external: Prerequisites = field(default_factory=Prerequisites)
    known: Prerequisites = field(default_factory=Prerequisites)  # `external` plus the outputs of our own stack
    template: Mapping[str, Any] = field(default_factory=dict)
    new_stack: bool = False
    changed_stack: bool = False
    leaving: Mapping[str, str] = field(default_factory=dict)  # file systems that leave the stack: id -> id to mount
    new_key: bool = False
    removes_failed: bool = False  # whether the remains of a failed creation or deletion are deleted first
    new_scripts: bool = False
    fleet_stopped: bool = False
    missing_repositories: tuple[str, ...] = ()  # S3 addresses whose FSx association must be created or repaired
    missing_buckets: tuple[str, ...] = ()  # buckets of data repositories that do not exist yet
    ends: Mapping[str, float] = field(default_factory=dict)  # queue -> time when EC2 starts to take back its machines
    unfinished: bool = False  # whether an earlier `up` was interrupted, or failed
    new_accounts: bool = False  # whether accounts, users or QOS are new, or differ from those of the last `up`

    @property
    def empty(self) -> bool:
        missing = self.missing_buckets or self.missing_repositories
        changed = self.changed_stack or self.new_scripts or missing or self.new_accounts
        return super().empty and not (changed or self.unfinished)

    @property
    def import_images(self) -> tuple[str, ...]:
        return () if self.empty else self.cluster.containers.images

    def _sentences(self) -> Iterator[str]:
        yield from super()._sentences()
        if self.changed_stack:
            yield f"updates the stack {stack_name(self.cluster.name)}"
        if self.unfinished and not self.fresh and not self.resumes:
            yield "finishes what an earlier `up` began"
        if self.new_scripts and not self.fresh:
            yield "runs the new set-up scripts on machines that run already; jobs continue"
        if self.new_accounts and not self.fresh:
            yield "changes accounts, users or QOS in Slurm's accounting"


@dataclass(frozen=True)
class CapacityReservation:
    """A capacity reservation or a capacity block, as EC2 describes it."""

    id: str
    instance_type: str
    zone: str
    zone_id: str
    total: int
    available: int
    active: bool
    block: bool = False
    placement_group: str = ""  # the placement group that it was created in
    ends_at: float | None = None  # when it ends, in seconds since 1970; None if it does not end


def parse_reservation(answer: Mapping[str, Any]) -> CapacityReservation:
    end = answer.get("EndDate")
    return CapacityReservation(
        str(answer.get("CapacityReservationId", "")),
        str(answer.get("InstanceType", "")),
        str(answer.get("AvailabilityZone", "")),
        str(answer.get("AvailabilityZoneId", "")),
        int(answer.get("TotalInstanceCount", 0)),
        int(answer.get("AvailableInstanceCount", 0)),
        answer.get("State") in ("active", "scheduled"),
        answer.get("ReservationType") == "capacity-block",
        str(answer.get("PlacementGroupArn", "")).rpartition("/")[2],
        end.timestamp() if isinstance(end, datetime) else None,
    )


def queue_ends(own: PclusterSettings, found: Mapping[str, CapacityReservation]) -> dict[str, float]:
    """Return, for each queue, when EC2 starts to take back the machines of its capacity block. Other reservations are
    left out, because their machines stay when the reservation ends."""
    blocks = {queue.name: found.get(queue.capacity_reservation) for queue in own.queues}
    return {
        name: taken_at(block.ends_at, block.instance_type)
        for name, block in blocks.items()
        if block is not None and block.block and block.ends_at is not None
    }


def check_reservations(
    own: PclusterSettings, found: Mapping[str, CapacityReservation], zones: Mapping[str, str], *, running: bool
) -> list[CapacityCheck]:
    """Compare each queue with its reservation. `zones` has the availability zone of each known subnet.

    `running` says that the cluster's own nodes may already use the reservation.
    """
    checks = []
    for queue in own.queues:
        if queue.capacity_reservation:
            wanted = f"{queue.max_count} x {queue.instances[0]}"
            there = found.get(queue.capacity_reservation)
            fault = _reservation_fault(queue, there, zones, running) if there else "it does not exist in this account"
            checks.append(CapacityCheck(f"capacity reservation {queue.capacity_reservation}", wanted, fault))
    return checks


def _reservation_fault(queue: SlurmQueue, there: CapacityReservation, zones: Mapping[str, str], running: bool) -> str:
    if there.instance_type != queue.instances[0]:
        return f"it holds {there.instance_type}, but queue `{queue.name}` has {queue.instances[0]}"
    if not there.active:
        return "it is not active"
    if there.block != (queue.capacity_type == "CAPACITY_BLOCK"):
        needed = "CAPACITY_BLOCK" if there.block else "ONDEMAND"
        return f"queue `{queue.name}` needs `capacity_type: {needed}` for it"
    if there.placement_group and queue.placement_group_name != there.placement_group:
        needed = f"`placement_group_name: {there.placement_group}`"
        return f"it is in a placement group: queue `{queue.name}` needs {needed} for it"
    if queue.max_count > there.total:
        return f"it holds {there.total} machines, but queue `{queue.name}` has {queue.max_count}"
    if not running and queue.min_count > there.available:
        return f"only {there.available} of its {there.total} machines are free, and {queue.min_count} are needed"
    for subnet, zone in zones.items():
        if zone not in (there.zone, there.zone_id):
            return f"it is in {there.zone}, but {subnet} is in {zone}"
    return ""


def check_key(own: PclusterSettings, kind: str, private: Path) -> list[CapacityCheck]:
    """Check the type of a key pair that exists in EC2, and whether its private key is on this machine.

    ParallelCluster refuses RSA keys on Ubuntu, but only after the network has been created. `kind` is the type of the
    key pair, "" if `up` creates it. `private` is the file that should have the private key.
    """
    if kind == "rsa" and own.os.startswith("ubuntu"):
        fault = f"it is an RSA key, which ParallelCluster refuses with {own.os}; name an ed25519 key, or one that "
        return [CapacityCheck(f"key pair {own.key}", "", f"{fault}does not exist, which `up` then creates")]
    if kind and not private.exists():
        return [CapacityCheck(f"the private key of {own.key}", f"ssh expects it in {private}, or in its agent")]
    return []


def zone_of_network(own: PclusterSettings, found: Mapping[str, CapacityReservation]) -> str:
    """Return the availability zone for a new network: that of the file, or else that of the reservations; "" for any
    zone."""
    zones = {each.zone for each in found.values() if each.zone}
    if len(zones) > 1:
        raise TargetError(
            f"the capacity reservations are in different availability zones: {', '.join(sorted(zones))}",
            hint="use one cluster per zone, or name the subnets of each queue with `head_subnet` and `queues`",
        )
    if own.availability_zone and zones and own.availability_zone not in zones:
        ids = {each.zone_id for each in found.values()}
        if own.availability_zone not in ids:
            raise TargetError(
                f"the network would be in {own.availability_zone}, but the reserved capacity is in {zones.pop()}",
                hint="change `availability_zone`, or remove it: the reservation's zone is used",
            )
    return own.availability_zone or next(iter(zones), "")


# vCPU quotas of EC2: instance family -> quota code for on-demand, quota code for spot, name.
_QUOTAS = {
    "p": ("L-417A185B", "L-7212CCBC", "P instances"),
    "g": ("L-DB2E81BA", "L-3819A6DF", "G and VT instances"),
    "trn": ("L-2C3B7624", "L-6B0D517C", "Trn instances"),
    "hpc": ("L-F7808C92", "", "HPC instances"),
    "": ("L-1216C47A", "L-34B43A08", "standard instances"),
}


@dataclass(frozen=True)
class QuotaNeed:
    """The vCPUs of one instance family that the cluster needs at its largest size. `code` identifies the quota."""

    code: str
    name: str
    vcpus: int


def quota_needs(own: PclusterSettings) -> list[QuotaNeed]:
    """Return the quotas that the cluster needs at its largest size. Reservations count towards them, capacity blocks do
    not."""
    needs: dict[tuple[str, str], int] = {}
    machines = [(own.head_instance, 1, False), (own.login_instance, own.login_count, False)]
    for queue in own.queues:
        if queue.capacity_type != "CAPACITY_BLOCK":
            machines.append((queue.instances[0], queue.max_count, queue.capacity_type == "SPOT"))
    for name, count, spot in machines:
        known = instances().get(name)
        family = next((each for each in _QUOTAS if each and name.startswith(each)), "")
        on_demand, for_spot, noun = _QUOTAS[family]
        code = for_spot if spot else on_demand
        if known and known.cpus and count and code:
            key = (code, f"{'Spot' if spot else 'On-Demand'} {noun}")
            needs[key] = needs.get(key, 0) + known.cpus * count
    return [QuotaNeed(code, name, vcpus) for (code, name), vcpus in needs.items()]


def check_quota(need: QuotaNeed, allowed: float | None) -> CapacityCheck:
    """Compare a need with the account's quota `allowed`, which is None if it cannot be read."""
    what = f"quota {need.code} ({need.name})"
    if allowed is not None and allowed < need.vcpus:
        return CapacityCheck(what, "", f"the cluster needs {need.vcpus} vCPUs, and {allowed:g} are allowed")
    known = "" if allowed is None else f", and {allowed:g} are allowed"
    return CapacityCheck(what, f"the cluster needs {need.vcpus} vCPUs{known}")


def estimate_cost(cluster: Cluster, prices: PriceTable) -> HourlyCost:
    """Return the price of the cluster per hour, without the nodes that are started on demand."""
    own = settings_of(cluster)
    lines: list[CostLine] = [prices.instance(own.head_instance)]
    if own.login_count:
        lines.append(prices.instance(own.login_instance, own.login_count))
    lines += [prices.instance(queue.instances[0], queue.min_count) for queue in own.queues if queue.min_count]
    disks = own.head_root_volume_gib + sum(queue.root_volume_gib * queue.min_count for queue in own.queues)
    lines.append(prices.resource("aws-ebs-gp3", disks, "GiB of root volumes"))
    if not (own.head_subnet or own.stacks):
        lines.append(prices.resource("aws-nat-gateway", 1, "NAT gateway"))
    for storage in cluster.storage:
        gib = (storage.size_mib or 0) // 1024
        if storage.source or not gib:
            continue
        if storage.type == "lustre":
            per_tib = storage.throughput_mb_per_s_per_tib or DEFAULT_LUSTRE_THROUGHPUT
            lines.append(prices.resource(f"aws-fsx-lustre-{per_tib}", gib, f"GiB of FSx for Lustre ({storage.name})"))
        elif storage.type == "openzfs":
            lines.append(prices.resource("aws-fsx-openzfs", gib, f"GiB of FSx for OpenZFS ({storage.name})"))
            speed = storage.throughput_mb_per_s_per_tib or OPENZFS_THROUGHPUT
            lines.append(prices.resource("aws-fsx-openzfs-throughput", speed, "MB/s of FSx for OpenZFS"))
        elif storage.type == "ebs":
            lines.append(prices.resource("aws-ebs-gp3", gib, f"GiB of EBS ({storage.name})"))
    return HourlyCost(tuple(lines))


def notes(cluster: Cluster, prices: PriceTable) -> Sequence[str]:
    """Return consequences that are specific to ParallelCluster."""
    own = settings_of(cluster)
    found = []
    if own.region != PRICED_REGION:
        found.append(f"prices are those of {PRICED_REGION}; {own.region} may differ")
    dynamic = [queue for queue in own.queues if queue.max_count > queue.min_count]
    if dynamic:
        extra = sum(
            prices.instance(queue.instances[0], queue.max_count - queue.min_count).usd_per_hour or 0
            for queue in dynamic
        )
        count = sum(queue.max_count - queue.min_count for queue in dynamic)
        idle = own.scaledown_idletime_min
        found.append(
            f"starts up to {count} more nodes for jobs (up to {extra:,.2f} USD per hour), and stops them after "
            f"{idle} idle minutes"
        )
    if any(queue.capacity_type == "SPOT" for queue in own.queues):
        found.append("AWS may take SPOT nodes away with two minutes' notice; they cost less than the price above")
    if any(queue.capacity_type == "CAPACITY_BLOCK" for queue in own.queues):
        found.append("the nodes of a capacity block are paid in advance, and AWS stops them when the block ends")
    return found


def refuse_impossible(plan: PclusterPlan, stop: str) -> None:
    """Raise an error if the plan cannot be carried out. `stop` is the command that stops all compute nodes."""
    if plan.impossible:
        first = plan.impossible[0]
        because = f": {first.detail}" if first.path.startswith("stack/") else ""
        raise TargetError(
            f"{first.path} cannot change on a running cluster{because}",
            hint="undo the change in the cluster file, or `dalsegno down` and `dalsegno up`",
        )
    faults = [check for check in plan.checks if check.fault]
    if faults:
        raise TargetError(faults[0].sentence(), hint="`dalsegno plan` lists everything that must exist first")
    stopped = any(change.effect is ChangeEffect.STOPS_NODES for change in plan.changes)
    if stopped and not plan.fleet_stopped:
        raise TargetError(
            "this change needs all compute nodes stopped, which would end their jobs",
            hint=f"when no job runs, run `{stop}`, then `dalsegno up`, which starts them again",
        )


# What `down` deletes and what it keeps: file systems, home folders, disks and the bucket


_MANAGED = {"efs": "EFS file system", "ebs": "EBS volume"}  # created and kept by ParallelCluster


def removal_of(
    state: PclusterState | None, applied: Cluster | None, template: Mapping[str, Any], jobs: Sequence[JobInfo]
) -> Removal:
    """Return what `down` does. `template` is the template of the stack, which names the file systems."""
    resources = template.get("Resources", {}).values()
    return Removal(
        tuple(jobs),
        homes_on_machines(applied, state.login_user) if state is not None else (),
        tuple(_file_system(each) for each in resources if each.get("Type") == FILE_SYSTEM),
        tuple(_kept(state, applied)),
        needs_yes=True,
    )


def _kept(state: PclusterState | None, applied: Cluster | None) -> Iterator[str]:
    if state is not None and state.bucket:
        yield f"bucket {state.bucket}"
    own = applied.parallelcluster if applied is not None else None
    data = {bucket_of(each.s3) for each in own.data_repositories} if own is not None else set()
    yield from (f"bucket {name}" for name in sorted(data) if state is None or name != state.bucket)
    yield from named_sources(applied)
    stores = applied.storage if applied is not None else ()
    for each in stores:
        if each.type in _MANAGED and not each.source:
            yield f"{_MANAGED[each.type]} of storage {each.name}"
    for id, named in state.kept.items() if state is not None else ():
        if named not in (each.source for each in stores):
            yield f"file system {id}, which the cluster file does not have any more"


def _file_system(resource: Mapping[str, Any]) -> str:
    """Return the name and size of a file system in a template."""
    own = resource.get("Properties", {})
    name = next((each["Value"] for each in own.get("Tags", ()) if each.get("Key") == "Name"), "?")
    return f"{name} (FSx {own.get('FileSystemType', '')}, {own.get('StorageCapacity', 0)} GiB)"
