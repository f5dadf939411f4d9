"""Shared storage: where it is mounted, and whether the target has that kind."""

from __future__ import annotations

import posixpath

from dalsegno.spec.checks.report import Report
from dalsegno.spec.model import ClusterSpec
from dalsegno.spec.storage import Storage

_TYPES = {
    "local": ("folder",),
    "ssh": ("folder", "nfs", "lustre"),
    "parallelcluster": ("lustre", "openzfs", "efs", "ebs"),
    "hyperpod": ("lustre", "openzfs"),
    "oci": ("fss", "nfs", "lustre"),
}
# A machine would not start, or lose its own files, with something else mounted there …
_SYSTEM = {"/", "/boot", "/dev", "/etc", "/opt", "/proc", "/root", "/run", "/sys", "/tmp", "/usr", "/var"}
_SYSTEM |= {"/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/usr/bin", "/usr/lib", "/usr/sbin", "/var/lib"}
# … or anywhere below.
_SYSTEM_TREES = ("/boot/", "/dev/", "/etc/", "/proc/", "/sys/", "/bin/", "/sbin/", "/lib/", "/lib64/", "/run/")
_LUSTRE_FIRST_GIB, _LUSTRE_STEP_GIB = 1200, 2400


def check_storage(spec: ClusterSpec, report: Report) -> None:
    """Mounts apart from each other and from the system, types the target has, sizes it sells."""
    for storage in spec.storage:
        _mount(storage, report)
        _type(storage, spec, report)
        _source_or_size(storage, spec, report)
    _overlaps(spec, report)
    _homes(spec, report)


def _mount(storage: Storage, report: Report) -> None:
    straight = posixpath.normpath(storage.mount)
    if straight != storage.mount:
        what = f"storage `{storage.name}` is mounted at `{storage.mount}`"
        report.add(storage, "mount", what, f"write it straight: `{straight}`")
    elif storage.mount in _SYSTEM or f"{storage.mount}/".startswith(_SYSTEM_TREES):
        what = f"storage `{storage.name}` would be mounted over the system's own `{storage.mount}`"
        report.add(storage, "mount", what, "choose a place of its own, such as `/fsx` or `/shared`")


def _type(storage: Storage, spec: ClusterSpec, report: Report) -> None:
    types = _TYPES[spec.target]
    if storage.type not in types and report.whole("target"):
        what = f"storage `{storage.name}` is of type `{storage.type}`, which target `{spec.target}` does not have"
        report.add(storage, "type", what, f"use {' or '.join(f'`{each}`' for each in types)}")


def _source_or_size(storage: Storage, spec: ClusterSpec, report: Report) -> None:
    if not report.whole("target"):
        return
    if storage.type == "nfs" and ":/" not in storage.source:
        what = f"storage `{storage.name}` needs the server it comes from"
        report.add(storage, "source", what, "add `source: server:/export`")
    elif storage.type == "openzfs" and spec.target == "parallelcluster" and not storage.source:
        what = f"storage `{storage.name}` needs a volume that exists: ParallelCluster makes no OpenZFS"
        report.add(storage, "source", what, "add `source: fsvol-0123456789abcdef0`")
    elif storage.type in ("lustre", "openzfs", "ebs") and spec.target != "local":
        _size(storage, spec, report)


def _size(storage: Storage, spec: ClusterSpec, report: Report) -> None:
    if not storage.source and storage.size is None:
        what = f"storage `{storage.name}` needs a `size`, or the `source` of one that exists"
        report.add(storage, "size", what, "add `size: 1200G`", reads=("source", "type"))
    aws = spec.target in ("parallelcluster", "hyperpod")
    if aws and storage.type == "lustre" and storage.size and not storage.source:
        gib = storage.size / 1024
        if gib != _LUSTRE_FIRST_GIB and gib % _LUSTRE_STEP_GIB:
            what = f"storage `{storage.name}` is {gib:g} GiB, but FSx for Lustre comes in 1200 or multiples of 2400 GiB"
            report.add(storage, "size", what, "write `1200G`, `2400G`, `4800G` …", reads=("source", "type"))


def _overlaps(spec: ClusterSpec, report: Report) -> None:
    for at, storage in enumerate(spec.storage):
        for other in spec.storage[:at]:
            first, second = f"{posixpath.normpath(other.mount)}/", f"{posixpath.normpath(storage.mount)}/"
            if first.startswith(second) or second.startswith(first):
                what = f"the mounts `{other.mount}` of `{other.name}` and `{storage.mount}` of `{storage.name}` overlap"
                report.add(storage, "mount", what, "keep them side by side")


def _homes(spec: ClusterSpec, report: Report) -> None:
    homes = [storage for storage in spec.storage if storage.home]
    for other in homes[1:]:
        what = f"storage `{homes[0].name}` and `{other.name}` both hold people's homes"
        report.add(other, "home", what, "keep `home: true` in one")
