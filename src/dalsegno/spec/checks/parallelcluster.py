"""Check for settings that ParallelCluster or AWS would refuse, often only after minutes, or that have no effect."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator

from dalsegno.hardware import did_you_mean, instances
from dalsegno.hardware.catalog import Instance
from dalsegno.spec.checks.report import Problems
from dalsegno.spec.layout import own_nodes
from dalsegno.spec.model import ClusterSpec, PartitionSpec
from dalsegno.spec.resolve_aws import has_efa, placement_group_of
from dalsegno.spec.section import Section
from dalsegno.spec.targets import ParallelCluster, QueueSpec

OLDEST_VERSION = (3, 13)
MAX_QUEUES, MAX_SCRIPTS, MAX_TAGS = 50, 10, 40
MIN_ROOT_GIB = 40
# Settings that ParallelCluster writes itself, in lower case
OWN_SETTINGS = frozenset({
    "epilog", "grestypes", "launchparameters", "prolog", "reconfigflags", "resumefailprogram", "resumeprogram",
    "resumetimeout", "slurmctldhost", "slurmctldlogfile", "slurmctldparameters", "slurmdlogfile", "slurmuser",
    "suspendexcnodes", "suspendprogram", "suspendtime", "taskplugin", "treewidth", "accountingstoragetype",
    "accountingstoragehost", "accountingstorageport", "accountingstorageuser", "jobacctgathertype",
})  # fmt: skip
OWN_QUEUE_SETTINGS = frozenset({"nodes", "partitionname", "resumetimeout", "state", "suspendtime", "oversubscribe"})
_ON_THE_HEAD = "`dalsegno shell` opens a shell on the head node, where you can add it"
_UNUSED_IN_PARTITION = {
    "spares": "a drained node is replaced there; set `max_count` of the queue, or use `dalsegno run --spares`",
    "nodes_from": "a node of ParallelCluster is in one queue; give the partition an instance type of its own",
    "features": "ParallelCluster sets the features of nodes itself",
    "oversubscribe": "ParallelCluster sets it itself",
}


def check_parallelcluster(spec: ClusterSpec, report: Problems) -> None:
    """Check the section `parallelcluster`, and settings in other sections that work differently on ParallelCluster."""
    own = spec.parallelcluster
    if spec.target != "parallelcluster" or own is None or not report.whole("target"):
        return
    _check_network(own, report)
    _check_cluster(own, spec, report)
    _check_without_effect(spec, own, report)
    _check_users(spec, own, report)
    _check_monitoring(spec, own, report)
    _check_images(spec, own, report)
    for partition in spec.partitions:
        _check_partition(partition, own, report)
    _check_scripts(own, report)
    _check_repositories(own, spec, report)
    _check_raw(spec, report)


def _check_network(own: ParallelCluster, report: Problems) -> None:
    zone = own.availability_zone
    if zone and "-az" not in zone and zone[:-1] != own.region:
        what = f"the availability zone `{zone}` is not in region `{own.region}`"
        report.add(own, "availability_zone", what, f"write for example `{own.region}a`", reads=("region",))
    if zone and own.head_subnet:
        what = "`availability_zone` is for a new network, but `head_subnet` names an existing one"
        report.add(own, "availability_zone", what, "remove one of them", reads=("head_subnet",))
    if own.stacks and own.head_subnet:
        what = "both `stacks` and `head_subnet` say where the cluster is"
        report.add(own, "head_subnet", what, "remove `head_subnet`, or the stack with the network", reads=("stacks",))
    if own.allowed_ips and not own.allowed_ips.startswith("pl-"):
        try:
            ipaddress.IPv4Network(own.allowed_ips)
        except ValueError:
            what = f"`allowed_ips` is not a range of addresses: `{own.allowed_ips}`"
            report.add(own, "allowed_ips", what, "write `203.0.113.0/24`, or `203.0.113.7/32` for one address")
    if own.key and not own.allowed_ips:
        what = "with a `key` but without `allowed_ips`, the whole internet could reach the head node's sshd"
        hint = "add `allowed_ips: 203.0.113.0/24` with your addresses, or remove `key` and connect with SSM"
        report.add(own, "key", what, hint, reads=("allowed_ips",))
    if own.allowed_ips and not own.key:
        what = "`allowed_ips` has no effect without a `key`"
        report.add(own, "allowed_ips", what, "add `key: my-key`, or remove it", reads=("key",))


def _check_cluster(own: ParallelCluster, spec: ClusterSpec, report: Problems) -> None:
    version = tuple(map(int, own.version.split(".")))
    if version[:2] < OLDEST_VERSION:
        what = f"ParallelCluster {own.version} is too old"
        report.add(own, "version", what, "use 3.13.0 or later; 3.16.1 is tested")
    if len(spec.partitions) > MAX_QUEUES:
        what = f"the file has {len(spec.partitions)} partitions, but ParallelCluster allows {MAX_QUEUES} queues"
        report.add(spec, "partitions", what, "merge some of them, or split the cluster")
    if own.scaledown_idletime < 60 or own.scaledown_idletime % 60:
        what = f"`scaledown_idletime` is {own.scaledown_idletime} s, but ParallelCluster counts whole minutes"
        report.add(own, "scaledown_idletime", what, "write `10m`")
    if own.os.startswith("rocky") and not own.ami:
        what = f"ParallelCluster publishes no image for `{own.os}`"
        report.add(own, "os", what, "add `ami:` with an image of your own (`pcluster build-image`)", reads=("ami",))
    _check_tags(own, report)
    for field, size in (("root_volume", own.root_volume), ("head_root_volume", own.head_root_volume)):
        _check_root(own, field, size, report)
    if own.placement_group_name and not own.placement_group:
        what = "`placement_group_name` has no effect with `placement_group: false`"
        report.add(own, "placement_group_name", what, "remove one of them", reads=("placement_group",))
    if own.directory_service and own.directory_service.address.startswith("ldap://"):
        what = "the directory is queried without encryption, which exposes the passwords of its users"
        report.add(own.directory_service, "address", what, "write `ldaps://`")


def _check_tags(own: ParallelCluster, report: Problems) -> None:
    if len(own.tags) > MAX_TAGS:
        what = f"there are {len(own.tags)} tags, but at most {MAX_TAGS} are possible"
        report.add(own, "tags", what, "remove some of them")
    for name in own.tags:
        if name.lower().startswith(("aws:", "parallelcluster:")):
            report.add(own, "tags", f"the tag `{name}` is reserved", "choose a name without that prefix")


def _check_root(section: Section, field: str, size_mib: int | None, report: Problems) -> None:
    if size_mib is not None and size_mib < MIN_ROOT_GIB * 1024:
        what = f"`{field}` is {size_mib / 1024:g} GiB, but the image needs {MIN_ROOT_GIB}"
        report.add(section, field, what, f"write at least `{MIN_ROOT_GIB}G`, or leave it out")


def _check_without_effect(spec: ClusterSpec, own: ParallelCluster, report: Problems) -> None:
    """Refuse parts of the file that have no effect on ParallelCluster, so that nobody relies on them."""
    if own.database is None:
        needs = "`slurm.accounting` on ParallelCluster needs a MySQL server of your own"
        hint = "add `database:` below `parallelcluster:`"
        if "accounting" in spec.slurm.model_fields_set and spec.slurm.accounting:
            report.add(spec.slurm, "accounting", needs, hint)
    elif not own.key and (spec.accounts or spec.slurm.qos):
        what = "accounts and QOS are added over ssh, which needs a `key`"
        report.add(own, "database", what, "add `key:` and `allowed_ips:` below `parallelcluster:`", reads=("key",))
    elif not spec.slurm.accounting:
        what = "there is a `database`, but accounting is turned off"
        report.add(own, "database", what, "remove one of them")
    parts: list[tuple[Section, str, object, str]] = [
        (spec.directory, "kind", spec.directory.kind == "ldap", "use `directory_service:` below `parallelcluster:`"),
        (spec, "reservations", spec.reservations, _ON_THE_HEAD),
        (spec.slurm, "topology", spec.slurm.topology, "ParallelCluster has its own topology"),
        (spec.slurm, "rest", spec.slurm.rest, _ON_THE_HEAD),
        (spec.head, "name", "name" in spec.head.model_fields_set, "ParallelCluster names the head node"),
        (spec.login, "names", spec.login.names, "write `count:`"),
    ]
    for section, field, given, hint in parts:
        if given:
            report.add(section, field, f"`{field}` is not possible on ParallelCluster", hint)


def _check_images(spec: ClusterSpec, own: ParallelCluster, report: Problems) -> None:
    if spec.containers.images and not own.key:
        what = "images are imported over ssh, which needs a `key`"
        hint = "add `key:` and `allowed_ips:` below `parallelcluster:`, or run `dalsegno image import` on the head node"
        report.add(spec.containers, "images", what, hint)


def _check_monitoring(spec: ClusterSpec, own: ParallelCluster, report: Problems) -> None:
    if spec.monitoring.prometheus and not own.os.startswith("ubuntu"):
        what = f"`{own.os}` has no packages of Prometheus"
        hint = "use `os: ubuntu2204`, or your own Prometheus: `dalsegno monitor config` writes its settings"
        report.add(spec.monitoring, "prometheus", what, hint)


def _check_users(spec: ClusterSpec, own: ParallelCluster, report: Problems) -> None:
    """Check that users come either from the file or from a directory service, and that none of them is an admin."""
    if own.directory_service and (spec.users or spec.groups):
        field = "users" if spec.users else "groups"
        what = f"both `{field}` and `directory_service` say who has an account"
        report.add(spec, field, what, "remove one of them")
    for user in spec.users:
        if user.admin:
            what = f"`admin` of user `{user.name}` is not possible on ParallelCluster"
            hint = "give the user sudo with `groups: [sudo]` and `allow_privileged: [sudo]`"
            report.add(user, "admin", what, hint)


def _check_partition(partition: PartitionSpec, own: ParallelCluster, report: Problems) -> None:
    for field, hint in _UNUSED_IN_PARTITION.items():
        if getattr(partition, field):
            what = f"`{field}` of partition `{partition.name}` is not possible on ParallelCluster"
            report.add(partition, field, what, hint)
    if partition.weight != 1:
        what = f"`weight` of partition `{partition.name}` is not possible on ParallelCluster"
        report.add(partition, "weight", what, "ParallelCluster sets the weight of nodes itself")
    queue = own.queues.get(partition.name)
    _check_capacity(partition, queue or QueueSpec(), own, queue or own, report)
    if queue is None:
        return
    _check_root(queue, "root_volume", queue.root_volume, report)
    _check_types(partition, queue, report)
    if queue.spot_price is not None and (queue.capacity_type or own.capacity_type) != "SPOT":
        what = f"queue `{partition.name}` has a `spot_price`, but its nodes are not SPOT"
        report.add(queue, "spot_price", what, "add `capacity_type: SPOT`, or remove it", reads=("capacity_type",))


def _check_capacity(
    partition: PartitionSpec, queue: QueueSpec, own: ParallelCluster, where: Section, report: Problems
) -> None:
    """Check the purchase option of a queue against its reservation, its placement group and its counts."""
    kind = queue.capacity_type or own.capacity_type
    own_reservation = queue.capacity_reservation or (own.capacity_reservation if not queue.capacity_type else None)
    if kind == "SPOT" and own_reservation:
        what = f"queue `{partition.name}` has SPOT nodes, which no capacity reservation holds"
        report.add(where, "capacity_reservation", what, "remove it, or use `capacity_type: ONDEMAND`")
    common = "placement_group" in own.model_fields_set and own.placement_group
    if kind == "CAPACITY_BLOCK" and (common if queue.placement_group is None else queue.placement_group):
        what = f"queue `{partition.name}` has a capacity block, which cannot be in a placement group"
        report.add(where, "placement_group", what, "remove `placement_group`: a block is in one place anyway")
    named = placement_group_of(queue, own)
    if kind == "CAPACITY_BLOCK" and named:
        what = f"queue `{partition.name}` has a capacity block, which cannot be in placement group `{named}`"
        report.add(where, "placement_group_name", what, "name the group below `queues:` for other partitions only")
    if queue.placement_group is False and queue.placement_group_name:
        what = f"queue `{partition.name}` names a placement group and turns placement groups off"
        report.add(queue, "placement_group_name", what, "remove one of them", reads=("placement_group",))
    if kind == "CAPACITY_BLOCK" and queue.max_count not in (None, len(own_nodes(partition))):
        what = f"queue `{partition.name}` has a capacity block, whose nodes all run from its start"
        report.add(where, "max_count", what, "remove `max_count`, and set `nodes` to the size of the block")
    subnets = queue.subnets or own.subnets
    efa = queue.efa if queue.efa is not None else has_efa(partition.instance)
    if len(subnets) > 1 and (efa or queue.placement_group or named):
        why = "EFA" if efa else "a placement group"
        what = f"queue `{partition.name}` has {len(subnets)} subnets, but {why} works in one availability zone only"
        report.add(where, "subnets", what, "keep one subnet")


def _check_types(partition: PartitionSpec, queue: QueueSpec, report: Problems) -> None:
    """Check the instance types of a queue. They must be alike, because Slurm treats them as one kind of node."""
    first = instances().get(partition.instance)
    for name in queue.instances:
        other = instances().get(name)
        if other is None:
            what = f"queue `{partition.name}` names the instance type `{name}`, which is not in the catalog"
            report.add(queue, "instances", what, did_you_mean(name, instances()))
        elif first is not None and (reason := _differs(first, other)):
            what = f"queue `{partition.name}` mixes `{first.name}` and `{name}`, which {reason}"
            report.add(queue, "instances", what, "use types with as many CPUs and GPUs of the same kind")
    if queue.instances and queue.capacity_reservation:
        what = f"queue `{partition.name}` has several instance types, but a reservation holds only one"
        report.add(queue, "capacity_reservation", what, "remove `instances`", reads=("instances",))
    types = (partition.instance, *queue.instances)
    lacking = [name for name in types if name in instances() and not has_efa(name)]
    if queue.efa and lacking:
        what = f"queue `{partition.name}` asks for EFA, which `{lacking[0]}` does not have"
        report.add(queue, "efa", what, "remove `efa: true`, or choose another instance type")


def _differs(one: Instance, other: Instance) -> str:
    if other.provider != one.provider:
        return f"belongs to {other.provider}"
    if (one.gpus, one.gpu) != (other.gpus, other.gpu):
        return "have different GPUs"
    return "have different numbers of CPUs" if one.cpus != other.cpus else ""


def _check_scripts(own: ParallelCluster, report: Problems) -> None:
    for action in own.actions:
        if action.at == "updated" and action.on not in ("head", "all"):
            what = f"`{action.script}` would run after an update, which only the head node does"
            report.add(action, "on", what, "write `on: head`", reads=("at",))
    for machine in ("head", "compute", "login"):
        for at in ("start", "configured", "updated"):
            scripts = [each for each in own.actions if each.on in (machine, "all") and each.at == at]
            if len(scripts) >= MAX_SCRIPTS:
                what = f"{len(scripts)} scripts run on {machine} nodes at `{at}`, but {MAX_SCRIPTS - 1} are possible"
                report.add(scripts[-1], "script", what, "merge some of them into one script")
                return


def _check_repositories(own: ParallelCluster, spec: ClusterSpec, report: Problems) -> None:
    kinds = {storage.name: storage.type for storage in spec.storage}
    taken: dict[str, str] = {}
    for each in own.data_repositories:
        if each.storage not in kinds and report.unnamed(each.storage, "storage"):
            what = f"a data repository names the storage `{each.storage}`, which the file does not have"
            report.add(each, "storage", what, did_you_mean(each.storage, kinds, "add it below `storage:`"))
        elif kinds.get(each.storage, "lustre") != "lustre":
            what = f"storage `{each.storage}` is of type `{kinds[each.storage]}`, which cannot mirror a bucket"
            report.add(each, "storage", what, "use a storage of type `lustre`")
        if not each.import_events and not each.export_events:
            what = f"the data repository `{each.s3}` neither imports nor exports"
            report.add(each, "import_events", what, "leave both out to get all events")
        for path in _parents(each.path, taken, each.storage):
            what = f"the data repositories `{taken[f'{each.storage}:{path}']}` and `{each.s3}` overlap in `{path}`"
            report.add(each, "path", what, "use folders that do not contain each other")
        taken.setdefault(f"{each.storage}:{each.path}", each.s3)


def _parents(path: str, taken: dict[str, str], storage: str) -> Iterator[str]:
    for key in taken:
        name, _, other = key.partition(":")
        if name == storage and (f"{path}/".startswith(f"{other}/") or f"{other}/".startswith(f"{path}/")):
            yield other
            return


def _check_raw(spec: ClusterSpec, report: Problems) -> None:
    for name in spec.slurm.extra:
        if name.lower() in OWN_SETTINGS:
            what = f"`{name}` in `slurm.extra` is a setting that ParallelCluster writes itself"
            report.add(spec.slurm, f"extra.{name}", what, "remove it")
    for partition in spec.partitions:
        for name in partition.extra:
            if name.lower() in OWN_QUEUE_SETTINGS:
                what = f"`{name}` in `extra` of partition `{partition.name}` is a setting of ParallelCluster's own"
                report.add(partition, f"extra.{name}", what, "remove it")


SOURCES = {
    "lustre": (re.compile(r"fs-[0-9a-f]{17}"), "fs-0123456789abcdef0"),
    "openzfs": (re.compile(r"fsvol-[0-9a-f]{17}"), "fsvol-0123456789abcdef0"),
    "efs": (re.compile(r"fs-([0-9a-f]{8}|[0-9a-f]{17})"), "fs-0123456789abcdef0"),
    "ebs": (re.compile(r"vol-([0-9a-f]{8}|[0-9a-f]{17})"), "vol-0123456789abcdef0"),
}
LUSTRE_THROUGHPUTS = (125, 250, 500, 1000)
OPENZFS_THROUGHPUTS = (64, 128, 256, 512, 1024, 2048, 3072, 4096)
OPENZFS_FIRST_GIB = 64


def check_aws_storage(spec: ClusterSpec, report: Problems) -> None:
    """Check the file systems of a cluster on ParallelCluster."""
    own = spec.parallelcluster
    if spec.target != "parallelcluster" or own is None or not report.whole("target"):
        return
    for storage in spec.storage:
        new = storage.type in ("lustre", "openzfs") and not storage.source
        if new and own.head_subnet and not own.security_groups:
            what = f"storage `{storage.name}` is new, but nothing says which security group lets the nodes reach it"
            hint = "add `security_groups:` below `parallelcluster:`, or leave `head_subnet` out for a new network"
            report.add(storage, "type", what, hint)
        form, example = SOURCES.get(storage.type, (None, ""))
        if form and storage.source and not form.fullmatch(storage.source):
            what = f"the source of storage `{storage.name}` is not an id of {storage.type}: `{storage.source}`"
            report.add(storage, "source", what, f"it looks like `{example}`", reads=("type",))
        if storage.options:
            what = f"`options` of storage `{storage.name}` would have no effect: ParallelCluster mounts it"
            report.add(storage, "options", what, "remove `options`")
        if storage.required:
            what = f"`required` of storage `{storage.name}` would have no effect on ParallelCluster"
            report.add(storage, "required", what, "remove `required`")
        known = {"lustre": LUSTRE_THROUGHPUTS, "openzfs": OPENZFS_THROUGHPUTS}.get(storage.type, ())
        if storage.throughput is not None and storage.throughput not in known:
            what = f"storage `{storage.name}` cannot have the throughput {storage.throughput}"
            choices = ", ".join(map(str, known))
            hint = f"choose one of {choices}" if known else f"remove it: {storage.type} has no such setting"
            report.add(storage, "throughput", what, hint, reads=("type",))
        if storage.home and storage.mount != "/home":
            what = f"storage `{storage.name}` holds the home folders, which are in /home on ParallelCluster"
            report.add(storage, "home", what, "write `mount: /home`", reads=("mount",))
        if storage.type == "openzfs" and storage.size and storage.size < OPENZFS_FIRST_GIB * 1024:
            what = f"storage `{storage.name}` is {storage.size / 1024:g} GiB, but OpenZFS starts at {OPENZFS_FIRST_GIB}"
            report.add(storage, "size", what, f"write at least `{OPENZFS_FIRST_GIB}G`", reads=("type",))
