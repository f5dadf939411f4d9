"""Resolve the section `parallelcluster` into facts: each partition becomes a queue with its settings."""

from __future__ import annotations

from dalsegno.hardware import find_fabric
from dalsegno.hardware.catalog import instances
from dalsegno.spec import aws_facts
from dalsegno.spec.layout import own_nodes
from dalsegno.spec.model import ClusterSpec, PartitionSpec
from dalsegno.spec.targets import Database, DirectoryService, ParallelCluster, QueueSpec

DEFAULT_HEAD = "m5.2xlarge"  # head node of clusters whose file names no instance type
_GIB = 1024


def resolve_parallelcluster(spec: ClusterSpec, own: ParallelCluster) -> aws_facts.PclusterSettings:
    """Return the facts of a cluster on ParallelCluster."""
    head = spec.head.instance or DEFAULT_HEAD
    return aws_facts.PclusterSettings(
        region=own.region,
        version=own.version,
        os=own.os,
        head_instance=head,
        queues=tuple(_queue(each, own) for each in spec.partitions),
        login_instance=spec.login.instance or head,
        login_count=spec.login.count,
        stacks=tuple(own.stacks),
        availability_zone=own.availability_zone or "",
        head_subnet=own.head_subnet or "",
        subnets=tuple(own.subnets),
        security_groups=tuple(own.security_groups),
        key=own.key or "",
        allowed_ips=own.allowed_ips or "",
        scaledown_idletime_min=max(1, own.scaledown_idletime // 60),
        queue_update=own.queue_update,
        ami=own.ami or "",
        head_root_volume_gib=own.head_root_volume // _GIB,
        gpu_health_checks=own.gpu_health_checks,
        bucket=own.bucket or "",
        database=_database(own.database),
        directory=_directory(own.directory_service),
        actions=tuple(aws_facts.CustomAction(each.script, tuple(each.args), each.on, each.at) for each in own.actions),
        data_repositories=tuple(
            aws_facts.DataRepository(
                each.storage, each.path, each.s3, tuple(each.import_events), tuple(each.export_events)
            )
            for each in own.data_repositories
        ),
        policies=tuple(own.policies),
        tags=dict(own.tags),
    )


def _queue(partition: PartitionSpec, own: ParallelCluster) -> aws_facts.SlurmQueue:
    queue = own.queues.get(partition.name) or QueueSpec()
    types = tuple(dict.fromkeys((partition.instance, *queue.instances)))
    always = len(own_nodes(partition))
    kind = queue.capacity_type or own.capacity_type
    common = own.capacity_reservation if kind != "SPOT" else ""  # a capacity reservation cannot hold SPOT nodes
    reservation = queue.capacity_reservation or common or ""
    grouped = own.placement_group if queue.placement_group is None else queue.placement_group
    named = placement_group_of(queue, own)
    asked = bool(named) or queue.placement_group is not None or "placement_group" in own.model_fields_set
    return aws_facts.SlurmQueue(
        name=partition.name,
        instances=types,
        min_count=always,
        max_count=queue.max_count or always,
        capacity_type=kind,
        capacity_reservation=reservation,
        subnets=tuple(queue.subnets),
        security_groups=tuple(queue.security_groups),
        # By default, a queue with reserved capacity or with several instance types gets no placement group. Reserved
        # capacity is placed already, and a mix of types rarely fits into one placement group.
        placement_group=grouped and (asked or not (reservation or len(types) > 1)),
        placement_group_name=named,
        efa=all(has_efa(each) for each in types) if queue.efa is None else queue.efa,
        spot_price=queue.spot_price,
        root_volume_gib=(queue.root_volume or own.root_volume) // _GIB,
        ami=queue.ami or "",
    )


def placement_group_of(queue: QueueSpec, own: ParallelCluster) -> str:
    """Return the existing placement group of a queue; "" if the file names none.

    A queue with `placement_group: false` is not in the group that the file names for all queues.
    """
    common = own.placement_group_name if queue.placement_group is not False else None
    return queue.placement_group_name or common or ""


def has_efa(instance: str) -> bool:
    """Return whether an instance type has an Elastic Fabric Adapter; False for types that are not in the catalog."""
    found = instances().get(instance)
    return found is not None and find_fabric(found.fabric).provider == "aws"


def _database(own: Database | None) -> aws_facts.AccountingDatabase | None:
    return aws_facts.AccountingDatabase(own.uri, own.user, own.password_secret) if own else None


def _directory(own: DirectoryService | None) -> aws_facts.AwsDirectory | None:
    if own is None:
        return None
    return aws_facts.AwsDirectory(
        own.domain,
        own.address,
        own.password_secret,
        own.reader,
        own.ca_certificate or "",
        own.access_filter or "",
        own.create_ssh_keys,
    )
