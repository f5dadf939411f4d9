"""Check storage: mount points, and the types, sources, sizes and limits that the target supports."""

from __future__ import annotations

import posixpath

from dalsegno.spec.checks.report import Problems
from dalsegno.spec.model import ClusterSpec, StorageSpec

_TYPES = {
    "local": ("folder", "existing", "scratch"),
    "ssh": ("folder", "existing", "scratch", "nfs", "lustre"),
    "parallelcluster": ("lustre", "openzfs", "efs", "ebs", "scratch"),
    "hyperpod": ("lustre", "openzfs"),
    "oci": ("fss", "nfs", "lustre"),
    "existing": ("folder", "existing", "scratch", "nfs", "lustre", "openzfs", "efs", "ebs", "fss"),
}
# Fields that would have no effect for a type, and why.
_NO_EFFECT = {
    "folder": (("size", "a folder has no size of its own"), ("throughput", "only clouds offer it")),
    "existing": (
        ("source", "it is mounted already"),
        ("size", "it exists already"),
        ("options", "it is mounted already"),
        ("throughput", "only clouds offer it"),
    ),
    "scratch": (
        ("source", "it is the local disk at `mount`"),
        ("size", "it has the size of the local disk"),
        ("options", "it is not mounted by Dal Segno"),
        ("throughput", "only clouds offer it"),
        ("home", "every node has its own"),
    ),
    "nfs": (("size", "the server sets it"), ("throughput", "the server sets it")),
}
# Folders on which nothing may be mounted, because the machine would not start or would lose its own files.
_SYSTEM = {"/", "/boot", "/dev", "/etc", "/opt", "/proc", "/root", "/run", "/sys", "/tmp", "/usr", "/var"}
_SYSTEM |= {"/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/usr/bin", "/usr/lib", "/usr/sbin", "/var/lib"}
# Nothing may be mounted below these folders either.
_SYSTEM_TREES = ("/boot/", "/dev/", "/etc/", "/proc/", "/sys/", "/bin/", "/sbin/", "/lib/", "/lib64/", "/run/")
_LUSTRE_FIRST_GIB, _LUSTRE_STEP_GIB = 1200, 2400


def check_storage(spec: ClusterSpec, report: Problems) -> None:
    """Check mount points, and the types and sizes that the target supports."""
    for storage in spec.storage:
        _mount(storage, report)
        _type(storage, spec, report)
        _source_or_size(storage, spec, report)
        _fields_without_effect(storage, spec, report)
    _overlaps(spec, report)
    _only_one(spec, report)


def _mount(storage: StorageSpec, report: Problems) -> None:
    normal = posixpath.normpath(storage.mount)
    if normal != storage.mount:
        what = f"storage `{storage.name}` has the unusual mount point `{storage.mount}`"
        report.add(storage, "mount", what, f"write `{normal}`")
    elif storage.mount in _SYSTEM or f"{storage.mount}/".startswith(_SYSTEM_TREES):
        what = f"storage `{storage.name}` would be mounted over the system's own `{storage.mount}`"
        report.add(storage, "mount", what, "choose another mount point, such as `/fsx` or `/shared`")


def _type(storage: StorageSpec, spec: ClusterSpec, report: Problems) -> None:
    types = _TYPES[spec.target]
    if storage.type not in types and report.whole("target"):
        what = f"storage `{storage.name}` is of type `{storage.type}`, which target `{spec.target}` does not support"
        report.add(storage, "type", what, f"use {' or '.join(f'`{each}`' for each in types)}")


def _source_or_size(storage: StorageSpec, spec: ClusterSpec, report: Problems) -> None:
    if not report.whole("target"):
        return
    if storage.type == "nfs" and ":/" not in storage.source:
        what = f"storage `{storage.name}` needs its server"
        report.add(storage, "source", what, "add `source: server:/export`")
    elif storage.type == "folder" and storage.source and not _is_plain_folder(storage.source):
        what = f"the source of storage `{storage.name}` is not the path of a folder: `{storage.source}`"
        report.add(storage, "source", what, "write a path without `..`, such as `/data/shared`, or leave it out")
    elif storage.type in ("lustre", "openzfs", "ebs") and spec.target != "local":
        _size(storage, spec, report)


def _is_plain_folder(path: str) -> bool:
    return path.startswith("/") and path == posixpath.normpath(path) and path != "/" and ":" not in path


def _size(storage: StorageSpec, spec: ClusterSpec, report: Problems) -> None:
    if not storage.source and storage.size is None:
        what = f"storage `{storage.name}` needs a `size`, or the `source` of an existing one"
        least = "31200G" if spec.target == "oci" else "1200G"
        report.add(storage, "size", what, f"add `size: {least}`", reads=("source", "type"))
    aws = spec.target in ("parallelcluster", "hyperpod")
    if aws and storage.type == "lustre" and storage.size and not storage.source:
        gib = storage.size / 1024
        if gib != _LUSTRE_FIRST_GIB and gib % _LUSTRE_STEP_GIB:
            what = f"storage `{storage.name}` is {gib:g} GiB, but FSx for Lustre comes in 1200 or multiples of 2400 GiB"
            report.add(storage, "size", what, "write `1200G`, `2400G`, `4800G` …", reads=("source", "type"))


def _fields_without_effect(storage: StorageSpec, spec: ClusterSpec, report: Problems) -> None:
    useless = dict(_NO_EFFECT.get(storage.type, ()))
    if storage.type == "folder" and spec.target == "local":
        useless["options"] = "a bind mount has none"
    if storage.type != "scratch":
        useless["required"] = "it is for `type: scratch`"
    for field, why in useless.items():
        if getattr(storage, field):
            what = f"`{field}` of storage `{storage.name}` would have no effect: {why}"
            report.add(storage, field, what, f"remove `{field}`", reads=("type",))


def _overlaps(spec: ClusterSpec, report: Problems) -> None:
    for at, storage in enumerate(spec.storage):
        for other in spec.storage[:at]:
            first, second = f"{posixpath.normpath(other.mount)}/", f"{posixpath.normpath(storage.mount)}/"
            if first.startswith(second) or second.startswith(first):
                what = f"the mounts `{other.mount}` of `{other.name}` and `{storage.mount}` of `{storage.name}` overlap"
                report.add(storage, "mount", what, "use mount points that do not contain each other")


def _only_one(spec: ClusterSpec, report: Problems) -> None:
    homes = [storage for storage in spec.storage if storage.home]
    for other in homes[1:]:
        what = f"storage `{homes[0].name}` and `{other.name}` both hold the users' home folders"
        report.add(other, "home", what, "keep `home: true` in one")
    scratch = [storage for storage in spec.storage if storage.type == "scratch"]
    for other in scratch[1:]:
        what = f"storage `{scratch[0].name}` and `{other.name}` are both scratch, but a job has one scratch folder"
        report.add(other, "type", what, "keep one of them")
