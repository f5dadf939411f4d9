"""Check for settings that HyperPod would refuse, often only after minutes, and for missing settings that it needs."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dalsegno.hardware import Instance, instances
from dalsegno.spec.checks.parallelcluster import LUSTRE_THROUGHPUTS
from dalsegno.spec.checks.report import Problems
from dalsegno.spec.checks.targets import is_below, partitions_named
from dalsegno.spec.layout import catalog_instance, login_nodes, own_nodes
from dalsegno.spec.model import ClusterSpec, MachineSpec, StorageSpec
from dalsegno.spec.platform_facts import NOT_OFFERED
from dalsegno.spec.targets import HyperPod

# Limits of a CreateCluster request
MAX_NODES, MAX_GROUPS, MAX_VOLUME_GIB, MAX_TAG_KEY = 6758, 100, 16_384, 128
_TAG = re.compile(r"[\w\s.:/=+\-@]*")
_FILE_SYSTEM = re.compile(r"fs-[0-9a-f]{8,17}")
_EXAMPLE = "p5.48xlarge"


def check_hyperpod(spec: ClusterSpec, report: Problems) -> None:
    """Check the section `hyperpod`, and the settings of other sections that HyperPod limits or needs."""
    own = spec.hyperpod
    if spec.target != "hyperpod" or own is None or not report.whole("target"):
        return
    _check_groups(own, spec, report)
    _check_machines(spec, report)
    _check_place(own, spec, report)
    _check_limits(own, spec, report)
    _check_images(own, spec, report)


def _check_groups(own: HyperPod, spec: ClusterSpec, report: Problems) -> None:
    partitions_named(own, "groups", list(own.groups), spec, report)
    for name in {own.controller_group, own.login_group} & {each.name for each in spec.partitions}:
        partition = next(each for each in spec.partitions if each.name == name)
        what = f"partition `{name}` has the name of HyperPod's own instance group `{name}`"
        report.add(partition, "name", what, "give the partition another name")
    if own.controller_group == own.login_group:
        what = f"`controller_group` and `login_group` are both `{own.login_group}`"
        report.add(own, "login_group", what, "give one of them another name", reads=("controller_group",))
    for partition in spec.partitions:
        if partition.name.endswith("-"):
            what = f"a partition on hyperpod cannot be called `{partition.name}`"
            report.add(partition, "name", what, "end the name with a letter or a digit")


def _machines(spec: ClusterSpec) -> Iterator[tuple[MachineSpec, str]]:
    yield spec.head, "the head node"
    if login_nodes(spec):
        yield spec.login, "a login node"
    for partition in spec.partitions:
        if not partition.nodes_from:
            yield partition, f"partition `{partition.name}`"


def _check_machines(spec: ClusterSpec, report: Problems) -> None:
    for machine, whose in _machines(spec):
        known = catalog_instance(machine)
        if not machine.instance and machine in (spec.head, spec.login):
            what = f"{whose} needs an `instance`: hyperpod rents machines by type"
            report.add(machine, "instance", what, "add `instance: ml.m5.2xlarge`")
        elif known and known.name in NOT_OFFERED:
            what = f"{whose} has the instance type `{machine.instance}`, which HyperPod does not offer"
            report.add(machine, "instance", what, f"use for example `ml.{_offered(known)}`")


def _offered(like: Instance) -> str:
    """Return an instance type that HyperPod offers: one with the same GPUs, or else one of the same size."""
    there = [each for each in instances().values() if each.provider == "aws" and each.name not in NOT_OFFERED]
    same_gpus = [each for each in there if like.gpu and (each.gpu, each.gpus) == (like.gpu, like.gpus)]
    same_size = [each for each in there if not like.gpu and not each.gpu and each.cpus == like.cpus]
    same_size.sort(key=lambda each: not each.name.startswith("m"))
    return next((each.name for each in [*same_gpus, *same_size]), _EXAMPLE)


def _check_place(own: HyperPod, spec: ClusterSpec, report: Problems) -> None:
    """Check the network and the file systems, and that training plans are in the cluster's region."""
    if bool(own.subnets) != bool(own.security_groups):
        given = "subnets" if own.subnets else "security_groups"
        what = "`hyperpod.subnets` and `hyperpod.security_groups` must be given together"
        report.add(own, given, what, "give both or neither", reads=("subnets", "security_groups"))
    for name, group in own.groups.items():
        region = (group.training_plan or "").split(":")[3:4]
        if region and region != [own.region] and report.whole("hyperpod", "region"):
            what = f"the training plan of `{name}` is in region `{region[0]}`, but `hyperpod.region` is `{own.region}`"
            hint = f"name a training plan in {own.region}, or write `region: {region[0]}`"
            report.add(group, "training_plan", what, hint)
    for storage in spec.storage:
        if storage.source and not _FILE_SYSTEM.fullmatch(storage.source):
            what = f"the source of storage `{storage.name}` is not an id of FSx: `{storage.source}`"
            report.add(storage, "source", what, "it looks like `fs-0123456789abcdef0`", reads=("type",))
        if storage.type == "lustre" and not storage.source and not own.subnets:
            what = f"storage `{storage.name}` is new, and needs `hyperpod.subnets` and `hyperpod.security_groups`"
            hint = "add them, or name an existing file system with `source: fs-…`"
            if report.whole("hyperpod", "subnets"):
                report.add(storage, "type", what, hint, reads=("source",))
        _check_throughput(storage, report)


def _check_throughput(storage: StorageSpec, report: Problems) -> None:
    if storage.throughput is None:
        return
    if storage.type == "openzfs" or storage.source:
        what = f"`throughput` of storage `{storage.name}` would have no effect"
        report.add(storage, "throughput", what, "remove it: only a new Lustre has it", reads=("type", "source"))
    elif storage.type == "lustre" and storage.throughput not in LUSTRE_THROUGHPUTS:
        what = f"storage `{storage.name}` cannot have the throughput {storage.throughput}"
        choices = ", ".join(map(str, LUSTRE_THROUGHPUTS))
        report.add(storage, "throughput", what, f"choose one of {choices}", reads=("type", "source"))


def _check_limits(own: HyperPod, spec: ClusterSpec, report: Problems) -> None:
    if spec.name.endswith("-"):
        what = f"a cluster on hyperpod cannot be called `{spec.name}`"
        report.add(spec, "name", what, "end the name with a letter or a digit")
    for partition in spec.partitions:
        count = len(own_nodes(partition))
        if count > MAX_NODES:
            what = f"partition `{partition.name}` has {count:,} nodes, but an instance group has at most {MAX_NODES:,}"
            report.add(partition, "nodes", what, "divide it into two partitions")
    groups = 1 + bool(login_nodes(spec)) + sum(not each.nodes_from for each in spec.partitions)
    if groups > MAX_GROUPS:
        what = f"the file has {groups} instance groups, the head node included, but HyperPod has at most {MAX_GROUPS}"
        report.add(spec, "partitions", what, "merge some partitions")
    if own.volume and own.volume > MAX_VOLUME_GIB * 1024:
        what = f"`volume` is {own.volume / 1024:,g} GiB, but HyperPod adds at most {MAX_VOLUME_GIB:,}"
        report.add(own, "volume", what, f"write at most `{MAX_VOLUME_GIB}G`")
    for key, value in own.tags.items():
        if not key or len(key) > MAX_TAG_KEY or not _TAG.fullmatch(key) or not _TAG.fullmatch(value):
            what = f"SageMaker does not accept the tag `{key}: {value}`"
            report.add(own, f"tags.{key}", what, "use letters, digits, spaces and `_.:/=+-@`, at most 128 in its name")
        elif key.lower().startswith("aws:"):
            report.add(own, f"tags.{key}", f"the tag `{key}` is reserved", "choose a name without that prefix")


def _check_images(own: HyperPod, spec: ClusterSpec, report: Problems) -> None:
    """Check that `up` can import the images into a folder that all instances see."""
    if not spec.containers.images:
        return
    if not is_below(spec.containers.folder, [each.mount for each in spec.storage]):
        what = "`images` need a `folder` on shared storage, where all instances find them"
        hint = "add storage with the mount point /fsx, and `folder: /fsx/images`"
        report.add(spec.containers, "images", what, hint, reads=("folder",))
    if own.ssh_key is None and report.whole("hyperpod", "ssh_key"):
        what = "`images` need `hyperpod.ssh_key`, because `up` imports them on the controller over ssh"
        hint = "add the key, or run `dalsegno image import` on the controller yourself"
        report.add(spec.containers, "images", what, hint)
