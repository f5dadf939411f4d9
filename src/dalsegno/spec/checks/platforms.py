"""What one cloud platform or another will not take."""

from __future__ import annotations

import re

from dalsegno.hardware import did_you_mean
from dalsegno.spec.aws import HyperPod, ParallelCluster
from dalsegno.spec.checks.report import Report
from dalsegno.spec.model import ClusterSpec
from dalsegno.spec.oci import Oci
from dalsegno.spec.section import Section

_QUEUE_NAME = re.compile(r"[a-z][a-z0-9-]{0,24}")
_HYPHENS_ONLY = ("parallelcluster", "hyperpod", "oci")


def check_platforms(spec: ClusterSpec, report: Report) -> None:
    """Names and settings that ParallelCluster, HyperPod or OCI would refuse, most of them only after minutes."""
    if not report.whole("target"):
        return
    if spec.target in _HYPHENS_ONLY:
        _names(spec, report)
    if spec.target == "parallelcluster" and spec.parallelcluster:
        _parallelcluster(spec.parallelcluster, spec, report)
    if spec.target == "hyperpod" and spec.hyperpod:
        _hyperpod(spec.hyperpod, spec, report)
    if spec.target == "oci" and spec.oci:
        _oci(spec.oci, report)


def _names(spec: ClusterSpec, report: Report) -> None:
    if "_" in spec.name:
        what = f"a cluster on {spec.target} cannot be called `{spec.name}`"
        report.add(spec, "name", what, f"write `{spec.name.replace('_', '-')}`")
    for partition in spec.partitions:
        if not _QUEUE_NAME.fullmatch(partition.name):
            what = f"a partition on {spec.target} cannot be called `{partition.name}`"
            hint = "use lowercase letters, digits and `-`, starting with a letter, at most 25"
            report.add(partition, "name", what, hint)


def _parallelcluster(settings: ParallelCluster, spec: ClusterSpec, report: Report) -> None:
    _partitions_named(settings, "queues", list(settings.queues), spec, report)
    if settings.subnets and not settings.head_subnet:
        what = "`parallelcluster.subnets` is given without `head_subnet`"
        report.add(settings, "subnets", what, "add `head_subnet:`, or leave both out", reads=("head_subnet",))
    if settings.capacity_type == "CAPACITY_BLOCK" and not settings.capacity_reservation:
        _block_without_id(settings, "parallelcluster", report)
    for name, queue in settings.queues.items():
        reserved = queue.capacity_reservation or settings.capacity_reservation
        if queue.capacity_type == "CAPACITY_BLOCK" and not reserved:
            _block_without_id(queue, f"parallelcluster.queues.{name}", report)
        _grows(name, queue.max_count, queue, spec, report)


def _block_without_id(section: Section, whose: str, report: Report) -> None:
    what = f"`{whose}` buys a CAPACITY_BLOCK without saying which"
    hint = "add `capacity_reservation: cr-…`"
    report.add(section, "capacity_type", what, hint, reads=("capacity_reservation",))


def _grows(name: str, most: int | None, queue: Section, spec: ClusterSpec, report: Report) -> None:
    always = next((partition.nodes for partition in spec.partitions if partition.name == name), None)
    if most is not None and isinstance(always, int) and most < always:
        what = f"queue `{name}` may grow to {most} nodes, but partition `{name}` always has {always}"
        report.add(queue, "max_count", what, f"write at least {always}, or leave it out")


def _hyperpod(settings: HyperPod, spec: ClusterSpec, report: Report) -> None:
    _partitions_named(settings, "groups", list(settings.groups), spec, report)
    if bool(settings.subnets) != bool(settings.security_groups):
        given = "subnets" if settings.subnets else "security_groups"
        what = "`hyperpod.subnets` and `hyperpod.security_groups` go together"
        report.add(settings, given, what, "give both or neither", reads=("subnets", "security_groups"))
    for name in {settings.controller_group, settings.login_group} & {each.name for each in spec.partitions}:
        partition = next(each for each in spec.partitions if each.name == name)
        what = f"partition `{name}` has the name of HyperPod's own instance group `{name}`"
        report.add(partition, "name", what, "give the partition another name")


def _partitions_named(section: Section, field: str, names: list[str], spec: ClusterSpec, report: Report) -> None:
    known = [partition.name for partition in spec.partitions]
    for name in names:
        if name not in known and report.unnamed(name, "partitions"):
            what = f"`{spec.target}.{field}` names `{name}`, which is no partition"
            report.add(section, f"{field}.{name}", what, did_you_mean(name, known))


def _oci(settings: Oci, report: Report) -> None:
    subnets = [field for field in ("public_subnet", "private_subnet") if getattr(settings, field)]
    if subnets and not settings.vcn:
        what = f"`oci.{subnets[0]}` is given without the `vcn` it belongs to"
        report.add(settings, subnets[0], what, "add `vcn:`, or leave the subnets out", reads=("vcn",))
