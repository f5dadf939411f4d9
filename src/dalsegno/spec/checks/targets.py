"""Check the target, its settings, containers and unimplemented fields."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath

from dalsegno.hardware import did_you_mean
from dalsegno.spec.checks.machines import nodes_known
from dalsegno.spec.checks.report import Problems
from dalsegno.spec.layout import login_nodes, own_nodes, own_spares
from dalsegno.spec.model import ClusterSpec
from dalsegno.spec.section import Section, required_keys
from dalsegno.spec.targets import TARGETS, ParallelCluster, Ssh, SshHostSpec, addresses

_CLOUDS = ("parallelcluster", "hyperpod", "oci")
# Targets whose platform runs slurmctld itself and does not support a second one
_OWNS_CONTROLLER = ("parallelcluster", "hyperpod")
# Targets for which `up` imports images on the head node, into a folder that the file must name
_IMAGES_ON_HEAD = ("parallelcluster", "oci")


@dataclass(frozen=True)
class UnbuiltField:
    """A field that no code implements yet. It is refused if it is set, because users would expect it to work."""

    path: str  # for example `users.ssh_keys`, which means this field of every user
    reason: str
    targets: tuple[str, ...] = ()  # the targets for which the field is refused; empty for all


_NO_SIZE = "head and login nodes of a local cluster have no size of their own"
UNBUILT_FIELDS = (
    UnbuiltField("modules", "nothing sets up environment modules"),
    *(
        UnbuiltField(f"{machine}.{size}", _NO_SIZE, ("local",))
        for machine in ("head", "login")
        for size in ("instance", "cpus", "memory")
    ),
)


def check_targets(spec: ClusterSpec, report: Problems) -> None:
    """Check that the file has only the block of its own target, and no settings that the platform does not support."""
    if not report.whole("target"):
        return
    _blocks(spec, report)
    _controller(spec, report)
    _node_names(spec, report)
    _logins(spec, report)
    _subnet(spec, report)


def _blocks(spec: ClusterSpec, report: Problems) -> None:
    for name in TARGETS:
        if name != spec.target and getattr(spec, name) is not None:
            what = f"there is a `{name}:` block, but the target is `{spec.target}`"
            report.add(spec, name, what, f"remove it, or set `target: {name}`")
    if spec.target in _CLOUDS and getattr(spec, spec.target) is None and report.whole(spec.target):
        keys = ", ".join(f"`{key}`" for key in required_keys(ClusterSpec, spec.target))
        what = f"target `{spec.target}` needs a `{spec.target}:` block with {keys}"
        report.add(spec, "target", what, f"`dalsegno init --target {spec.target}` writes one")


def _controller(spec: ClusterSpec, report: Problems) -> None:
    if spec.slurm.backup_controller and spec.target in _OWNS_CONTROLLER:
        what = f"`backup_controller` is not possible on {spec.target}: the platform runs the controller"
        report.add(spec.slurm, "backup_controller", what, "leave it out")


def _node_names(spec: ClusterSpec, report: Problems) -> None:
    for partition in spec.partitions:
        if spec.target in _CLOUDS and isinstance(partition.nodes, list):
            what = f"partition `{partition.name}` names its nodes, but on {spec.target} the platform names them"
            report.add(partition, "nodes", what, f"write the number: `nodes: {len(partition.nodes)}`")


def _logins(spec: ClusterSpec, report: Problems) -> None:
    login = spec.login
    if login.names and "count" in login.model_fields_set and login.count != len(login.names):
        what = f"`login.count` is {login.count}, but {len(login.names)} login nodes are named"
        report.add(login, "count", what, "leave `count` out", reads=("names",))


def _subnet(spec: ClusterSpec, report: Problems) -> None:
    """Check that the subnet has enough addresses for nodes, login nodes, head node, backup and bridge."""
    if spec.local is None or not spec.local.subnet or not report.whole("partitions"):
        return
    nodes = sum(len(own_nodes(each)) + len(own_spares(each)) for each in spec.partitions)
    wanted = nodes + len(login_nodes(spec)) + 3
    there = ipaddress.IPv4Network(spec.local.subnet).num_addresses - 2
    if wanted > there:
        what = f"`local.subnet` {spec.local.subnet} has {there} addresses, but {wanted} are needed"
        report.add(spec.local, "subnet", what, "choose a larger one, or leave it out")


_QUEUE_NAME = re.compile(r"[a-z][a-z0-9-]{0,24}")
_HYPHENS_ONLY = ("parallelcluster", "hyperpod", "oci")


def check_platforms(spec: ClusterSpec, report: Problems) -> None:
    """Check for names and settings that ParallelCluster, HyperPod or OCI would refuse, often only after minutes."""
    if not report.whole("target"):
        return
    if spec.target in _HYPHENS_ONLY:
        _names(spec, report)
    if spec.target == "parallelcluster" and spec.parallelcluster:
        _parallelcluster(spec.parallelcluster, spec, report)


def _names(spec: ClusterSpec, report: Problems) -> None:
    if "_" in spec.name:
        what = f"a cluster on {spec.target} cannot be called `{spec.name}`"
        report.add(spec, "name", what, f"write `{spec.name.replace('_', '-')}`")
    for partition in spec.partitions:
        if not _QUEUE_NAME.fullmatch(partition.name):
            what = f"a partition on {spec.target} cannot be called `{partition.name}`"
            hint = "use lowercase letters, digits and `-`, starting with a letter, at most 25"
            report.add(partition, "name", what, hint)


def _parallelcluster(settings: ParallelCluster, spec: ClusterSpec, report: Problems) -> None:
    partitions_named(settings, "queues", list(settings.queues), spec, report)
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


def _block_without_id(section: Section, whose: str, report: Problems) -> None:
    what = f"`{whose}` has a CAPACITY_BLOCK without its reservation"
    hint = "add `capacity_reservation: cr-…`"
    report.add(section, "capacity_type", what, hint, reads=("capacity_reservation",))


def _grows(name: str, most: int | None, queue: Section, spec: ClusterSpec, report: Problems) -> None:
    always = next((partition.nodes for partition in spec.partitions if partition.name == name), None)
    if most is not None and isinstance(always, int) and most < always:
        what = f"queue `{name}` may grow to {most} nodes, but partition `{name}` always has {always}"
        report.add(queue, "max_count", what, f"write at least {always}, or leave it out")


def partitions_named(section: Section, field: str, names: list[str], spec: ClusterSpec, report: Problems) -> None:
    """Check that `names`, the keys of the setting `field`, are names of partitions in the file."""
    known = [partition.name for partition in spec.partitions]
    for name in names:
        if name not in known and report.unnamed(name, "partitions"):
            what = f"`{spec.target}.{field}` names `{name}`, which is not a partition"
            report.add(section, f"{field}.{name}", what, did_you_mean(name, known))


_SHOWN = 4


def check_ssh_hosts(spec: ClusterSpec, report: Problems) -> None:
    """Check that every machine of `target: ssh` has a host, and that every host belongs to a machine."""
    if spec.target != "ssh" or not report.whole("target"):
        return
    ssh = spec.ssh
    hosts = _hosts(ssh, report) if ssh else {}
    if not nodes_known(spec, report) or not report.whole("head") or not report.whole("login"):
        return
    if ssh:
        _check_unknown_hosts(ssh, hosts, set(_machines(spec)), report)
    # A machine whose real name is in the file needs no entry in `hosts`, because it is reached by that name.
    missing = [name for name, named in _machines(spec).items() if not named and name not in hosts]
    bare = [name for name in _machines(spec) if name not in hosts]
    if ssh and bare and not missing and "{bmc}" in (ssh.power_cycle or ""):
        what = f"`power_cycle` uses `{{bmc}}`, but `{bare[0]}` has no `bmc`"
        report.add(ssh, "power_cycle", what, f"add `{bare[0]}: {{bmc: ADDRESS}}` under `ssh: hosts:`", reads=("hosts",))
    if missing and report.whole("ssh"):
        shown = ", ".join(f"`{name}`" for name in missing[:_SHOWN])
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        hint = f"add `{missing[0]}: ADDRESS` and so on under `ssh: hosts:`"
        report.add(spec, "ssh" if ssh else "target", f"no host is given for {shown}{more}", hint)


def _machines(spec: ClusterSpec) -> dict[str, bool]:
    """Return all machines, and for each whether its name comes from the file."""
    machines = {spec.head.name: "name" in spec.head.model_fields_set}
    machines |= dict.fromkeys(login_nodes(spec), bool(spec.login.names))
    for partition in spec.partitions:
        names = (*own_nodes(partition), *own_spares(partition))
        machines |= dict.fromkeys(names, isinstance(partition.nodes, list))
    return machines


def _hosts(ssh: Ssh, report: Problems) -> dict[str, str]:
    """Return each machine's key in `hosts`. Report a key if it does not have as many addresses as names."""
    found: dict[str, str] = {}
    for key, host in ssh.hosts.items():
        try:
            names = list(addresses(key, host.address))
        except ValueError as error:
            report.add(
                ssh, f"hosts.{key}", f"`ssh.hosts.{key}` does not match: {error}", "give as many addresses as names"
            )
            continue
        _check_power(ssh, key, host, report)
        twice = next((name for name in names if name in found), None)
        if twice:
            report.add(ssh, f"hosts.{key}", f"host `{twice}` is given twice under `ssh.hosts`", "keep one")
        found |= dict.fromkeys(names, key)
    return found


def _check_power(ssh: Ssh, key: str, host: SshHostSpec, report: Problems) -> None:
    """Check that an entry of `hosts` has as many management controllers (BMCs) as names.

    An entry without any is accepted if the power command does not use `{bmc}`.
    """
    try:
        addresses(key, host.bmc)
    except ValueError as error:
        what = f"`ssh.hosts.{key}.bmc` does not match: {error}"
        report.add(ssh, f"hosts.{key}", what, "give as many addresses as names")
    command = host.power_cycle or ssh.power_cycle or ""
    if "{bmc}" in command and not host.bmc:
        what = f"`power_cycle` uses `{{bmc}}`, but `ssh.hosts.{key}` has no `bmc`"
        report.add(ssh, f"hosts.{key}", what, f"write `{key}: {{address: …, bmc: …}}`, or use `{{address}}`")


def _check_unknown_hosts(ssh: Ssh, hosts: dict[str, str], machines: set[str], report: Problems) -> None:
    for name, key in hosts.items():
        if name not in machines:
            what = f"`ssh.hosts` names `{name}`, which is not a machine of this cluster"
            hint = did_you_mean(name, machines, "nodes are named `<partition>-1`, the head node `head`")
            report.add(ssh, f"hosts.{key}", what, hint)


def check_containers(spec: ClusterSpec, report: Problems) -> None:
    """Check that images are not listed while containers are turned off.

    Where `up` imports the images on the head node, also check that their folder is on storage that all machines see.
    """
    if spec.containers.images and spec.containers.enabled is False:
        what = "`images` are listed, but containers are turned off"
        report.add(spec.containers, "images", what, "remove `enabled: false`, or `images`", reads=("enabled",))
    if spec.containers.images and spec.target in _IMAGES_ON_HEAD and report.whole("target"):
        shared = ["/home", *(storage.mount for storage in spec.storage if storage.type != "scratch")]
        if not is_below(spec.containers.folder, shared):
            what = "`images` need a `folder` on storage that all machines see"
            report.add(spec.containers, "images", what, "add for example `folder: /home/images`", reads=("folder",))


def is_below(folder: str | None, mounts: Iterable[str]) -> bool:
    """Return whether a folder is one of the mount points, or below one of them."""
    return folder is not None and any(PurePosixPath(folder).is_relative_to(mount) for mount in mounts)


def check_unbuilt(spec: ClusterSpec, report: Problems) -> None:
    """Report fields that no code implements yet. An empty value is accepted."""
    for each in UNBUILT_FIELDS:
        if each.targets and (spec.target not in each.targets or not report.whole("target")):
            continue
        block, _, inner = each.path.partition(".")
        sections = getattr(spec, block) if inner else spec
        for section in sections if isinstance(sections, list) else [sections]:
            field = inner or block
            if field in section.model_fields_set and getattr(section, field):
                subject = f"`{field}` of user `{section.name}`" if block == "users" else f"`{each.path}`"
                report.add(section, field, f"{subject} is not built yet", f"remove it: {each.reason}")
