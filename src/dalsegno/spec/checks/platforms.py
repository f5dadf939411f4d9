"""Refuse fields that a platform cannot apply, or that no code applies there yet, so that nobody relies on them.

`REFUSALS` is data: the tests compare it with the model and with a table of what each target applies.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dalsegno.spec.checks.report import Problems
from dalsegno.spec.model import ClusterSpec
from dalsegno.spec.section import Section

NAMES = {"parallelcluster": "ParallelCluster", "hyperpod": "HyperPod", "oci": "OCI"}
_IN_SHELL = "`dalsegno shell` opens a shell on the head node, where you can add it"


@dataclass(frozen=True)
class RefusedField:
    """Fields that are refused if they are set to a value other than their default, and why."""

    targets: tuple[str, ...]
    paths: tuple[str, ...]  # such as `users.admin`, which means this field of every user
    reason: str
    instead: str = ""  # how to get the same effect


_HYPERPOD, _OCI, _PCLUSTER = ("hyperpod",), ("oci",), ("parallelcluster",)
_CONF = ("slurm.priority", "slurm.preemption", "slurm.extra", "slurm.slurmd_timeout")
_NODES = ("partitions.weight", "partitions.features")
_WEIGHTS = ("partitions.priority_job_factor", "accounts.fair_share", "users.fair_share", "slurm.qos.priority")
REFUSALS = (
    RefusedField(_HYPERPOD, _CONF, "HyperPod's agent writes slurm.conf, and drops the lines of others"),
    RefusedField(_HYPERPOD, ("slurm.topology",), "HyperPod's agent writes slurm.conf and the topology"),
    RefusedField(_HYPERPOD, ("slurm.rest",), "Dal Segno does not set up slurmrestd on HyperPod"),
    RefusedField(_HYPERPOD, _NODES, "HyperPod's agent writes the nodes in slurm.conf"),
    RefusedField(
        _HYPERPOD, ("partitions.spares",), "HyperPod puts all instances in service", "use `dalsegno run --spares`"
    ),
    RefusedField(
        _HYPERPOD, ("partitions.priority_job_factor",), "slurm.conf there gives partitions no weight in priority"
    ),
    RefusedField(_HYPERPOD, ("head.name", "login.names"), "HyperPod names the instances"),
    RefusedField(_HYPERPOD, ("directory.kind", "directory.base"), "the accounts are in the files of each instance"),
    RefusedField(
        _HYPERPOD, ("storage.options",), "HyperPod, or its lifecycle script, mounts it with options of its own"
    ),
    RefusedField(
        _HYPERPOD,
        ("users.admin",),
        "Dal Segno does not change HyperPod's accounting, which has the administrators",
        "give the user sudo with `groups: [sudo]` and `allow_privileged: [sudo]`",
    ),
    RefusedField(_OCI, _CONF, "the stack writes slurm.conf, again after each resize"),
    RefusedField(_OCI, _WEIGHTS, "the stack's slurm.conf gives it no weight in a job's priority"),
    RefusedField(_OCI, ("slurm.qos.usage_factor",), "the stack's slurm.conf gives usage no weight in a job's priority"),
    RefusedField(
        _OCI, ("slurm.qos.preempts", "slurm.qos.preempt_mode"), "the stack's slurm.conf has no preemption by QOS"
    ),
    RefusedField(_OCI, ("slurm.rest",), "the stack has no variable for it", _IN_SHELL),
    RefusedField(_OCI, ("slurm.backup_controller",), "this is not built yet"),
    RefusedField(_OCI, _NODES, "the stack writes the nodes in slurm.conf"),
    RefusedField(_OCI, ("partitions.spares",), "all nodes of the stack are in service", "use `dalsegno run --spares`"),
    RefusedField(_OCI, ("reservations",), "nodes have names only once they run", _IN_SHELL),
    RefusedField(_OCI, ("head.name", "login.names"), "the stack names the machines"),
    RefusedField(_OCI, ("directory.kind", "directory.base"), "the stack has an LDAP directory of its own"),
    RefusedField(
        _OCI,
        ("groups", "users.groups", "users.allow_privileged"),
        "the groups are in the stack's LDAP directory",
        "use `cluster group` on the controller",
    ),
    RefusedField(
        _OCI, ("users.admin",), "the stack manages sudo", "set Slurm's AdminLevel with `sacctmgr` on the controller"
    ),
    RefusedField(
        _OCI, ("monitoring.alerts", "monitoring.remote_write", "monitoring.retention"), "the stack has its own"
    ),
    RefusedField(_PCLUSTER, ("slurm.slurmd_timeout",), "ParallelCluster sets it itself"),
    RefusedField(
        _PCLUSTER,
        ("directory.base",),
        "ParallelCluster connects the directory",
        "use `directory_service:` below `parallelcluster:`",
    ),
    RefusedField(("parallelcluster", "hyperpod"), ("monitoring.alerts",), "no Alertmanager is set up there yet"),
)
_ENFORCED_ON_OCI = {"associations", "limits", "qos", "safe"}


def check_refusals(spec: ClusterSpec, report: Problems) -> None:
    """Report the fields of the file that `REFUSALS` has for its target."""
    if not report.whole("target"):
        return
    for refusal in REFUSALS:
        if spec.target in refusal.targets:
            for path in refusal.paths:
                for section, field in _given(spec, path.split(".")):
                    what = f"{_subject(section, path)} is not possible on {NAMES[spec.target]}"
                    instead = f"; {refusal.instead}" if refusal.instead else ""
                    report.add(section, field, what, f"remove it: {refusal.reason}{instead}")
    _check_enforce(spec, report)
    _check_storage(spec, report)


def _given(section: Section, path: list[str]) -> Iterator[tuple[Section, str]]:
    """Yield the sections that set the field at the end of a path to a value other than its default."""
    name, *rest = path
    value = getattr(section, name)
    if rest:
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, Section):
                yield from _given(inner, rest)
    elif name in section.model_fields_set:
        default = type(section).model_fields[name].get_default(call_default_factory=True)
        # A section with any value in the file counts as set, even if the value is the default.
        if value != default or (isinstance(value, Section) and value.model_fields_set):
            yield section, name


def _subject(section: Section, path: str) -> str:
    name = getattr(section, "name", "")
    owner, _, field = path.rpartition(".")
    singular = {"partitions": "partition", "users": "user", "accounts": "account", "storage": "storage"}
    noun = singular.get(owner, "QOS" if owner == "slurm.qos" else "")
    return f"`{field}` of {noun} `{name}`" if noun and isinstance(name, str) else f"`{path}`"


def _check_enforce(spec: ClusterSpec, report: Problems) -> None:
    others = sorted({*spec.slurm.enforce} - _ENFORCED_ON_OCI)
    if spec.target == "oci" and others:
        what = f"`slurm.enforce` cannot have `{others[0]}` on OCI"
        report.add(spec.slurm, "enforce", what, "the stack's one switch enforces associations, limits, qos and safe")


def _check_storage(spec: ClusterSpec, report: Problems) -> None:
    for storage in spec.storage:
        if spec.target == "hyperpod" and storage.type == "openzfs" and not storage.source:
            what = f"storage `{storage.name}` of type openzfs needs its `source`"
            report.add(storage, "type", what, "`up` creates only FSx for Lustre there", reads=("source",))
        if spec.target == "parallelcluster" and storage.type == "efs" and storage.size:
            what = f"`size` of storage `{storage.name}` would have no effect"
            report.add(storage, "size", what, "remove it: EFS grows with its content", reads=("type",))
        if spec.target != "oci":
            continue
        if storage.type == "fss" and storage.size:
            what = f"`size` of storage `{storage.name}` would have no effect"
            report.add(storage, "size", what, "remove it: file storage of OCI grows with its content", reads=("type",))
        if storage.throughput and (storage.type != "lustre" or storage.source):
            what = f"`throughput` of storage `{storage.name}` would have no effect"
            report.add(storage, "throughput", what, "remove it: only a new Lustre has it", reads=("type", "source"))
        if storage.options and not (storage.source and storage.type in ("fss", "nfs")):
            what = f"`options` of storage `{storage.name}` would have no effect: the stack mounts what it creates"
            report.add(storage, "options", what, "remove `options`", reads=("type", "source"))
