"""The target and its settings block."""

from __future__ import annotations

import ipaddress

from dalsegno.spec.checks.report import Report
from dalsegno.spec.layout import login_nodes, own_nodes, own_spares
from dalsegno.spec.model import ClusterSpec
from dalsegno.spec.target_names import TARGETS
from dalsegno.spec.unknown_keys import required_keys

_CLOUDS = ("parallelcluster", "hyperpod", "oci")
# The platform runs slurmctld itself and would not know of a second one.
_OWNS_CONTROLLER = ("parallelcluster", "hyperpod")


def check_targets(spec: ClusterSpec, report: Report) -> None:
    """The right block and no other; nothing the platform does not let us have."""
    if not report.whole("target"):
        return
    _blocks(spec, report)
    _controller(spec, report)
    _node_names(spec, report)
    _logins(spec, report)
    _subnet(spec, report)


def _blocks(spec: ClusterSpec, report: Report) -> None:
    for name in TARGETS:
        if name != spec.target and getattr(spec, name) is not None:
            what = f"there is a `{name}:` block, but the target is `{spec.target}`"
            report.add(spec, name, what, f"remove it, or set `target: {name}`")
    if spec.target in _CLOUDS and getattr(spec, spec.target) is None and report.whole(spec.target):
        keys = ", ".join(f"`{key}`" for key in required_keys(ClusterSpec, spec.target))
        what = f"target `{spec.target}` needs a `{spec.target}:` block with {keys}"
        report.add(spec, "target", what, f"`dalsegno init --target {spec.target}` writes one")


def _controller(spec: ClusterSpec, report: Report) -> None:
    if spec.slurm.backup_controller and spec.target in _OWNS_CONTROLLER:
        what = f"there can be no `backup_controller` on {spec.target}: the platform owns the controller"
        report.add(spec.slurm, "backup_controller", what, "leave it out")


def _node_names(spec: ClusterSpec, report: Report) -> None:
    for partition in spec.partitions:
        if spec.target in _CLOUDS and isinstance(partition.nodes, list):
            what = f"partition `{partition.name}` names its nodes, but on {spec.target} the platform names them"
            report.add(partition, "nodes", what, f"write how many: `nodes: {len(partition.nodes)}`")


def _logins(spec: ClusterSpec, report: Report) -> None:
    login = spec.login
    if login.names and "count" in login.model_fields_set and login.count != len(login.names):
        what = f"`login.count` is {login.count}, but {len(login.names)} login nodes are named"
        report.add(login, "count", what, "leave `count` out", reads=("names",))


def _subnet(spec: ClusterSpec, report: Report) -> None:
    """The virtual hosts must fit: nodes, logins, head, backup, and the bridge itself."""
    if spec.local is None or not spec.local.subnet or not report.whole("partitions"):
        return
    nodes = sum(len(own_nodes(each)) + len(own_spares(each)) for each in spec.partitions)
    wanted = nodes + len(login_nodes(spec)) + 3
    there = ipaddress.IPv4Network(spec.local.subnet).num_addresses - 2
    if wanted > there:
        what = f"`local.subnet` {spec.local.subnet} has {there} addresses, but {wanted} are needed"
        report.add(spec.local, "subnet", what, "choose a larger one, or leave it out")
