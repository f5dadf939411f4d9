"""`target: ssh`: every machine must be reachable, every host must be a machine."""

from __future__ import annotations

from dalsegno.hardware import did_you_mean
from dalsegno.spec.checks.partitions import nodes_known
from dalsegno.spec.checks.report import Report
from dalsegno.spec.layout import login_nodes, own_nodes, own_spares
from dalsegno.spec.model import ClusterSpec
from dalsegno.spec.own_machines import Ssh
from dalsegno.spec.ssh_addresses import addresses

_SHOWN = 4


def check_ssh_hosts(spec: ClusterSpec, report: Report) -> None:
    """Hosts against machines."""
    if spec.target != "ssh" or not report.whole("target"):
        return
    ssh = spec.ssh
    hosts = _hosts(ssh, report) if ssh else {}
    if not nodes_known(spec, report) or not report.whole("head") or not report.whole("login"):
        return
    if ssh:
        _strange(ssh, hosts, set(_machines(spec)), report)
    # A machine that the file calls by its real name is reached by it.
    missing = [name for name, named in _machines(spec).items() if not named and name not in hosts]
    if missing and report.whole("ssh"):
        shown = ", ".join(f"`{name}`" for name in missing[:_SHOWN])
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        hint = f"add `{missing[0]}: ADDRESS` and so on under `ssh: hosts:`"
        report.add(spec, "ssh" if ssh else "target", f"no host is given for {shown}{more}", hint)


def _machines(spec: ClusterSpec) -> dict[str, bool]:
    """All machines, and whether the file called each by a name of its own."""
    machines = {spec.head.name: "name" in spec.head.model_fields_set}
    machines |= dict.fromkeys(login_nodes(spec), bool(spec.login.names))
    for partition in spec.partitions:
        names = (*own_nodes(partition), *own_spares(partition))
        machines |= dict.fromkeys(names, isinstance(partition.nodes, list))
    return machines


def _hosts(ssh: Ssh, report: Report) -> dict[str, str]:
    """Machine to the key of `hosts` that names it."""
    found: dict[str, str] = {}
    for key, host in ssh.hosts.items():
        try:
            names = list(addresses(key, host.address))
        except ValueError as error:
            report.add(ssh, f"hosts.{key}", f"`ssh.hosts.{key}` does not fit: {error}", "as many addresses as names")
            continue
        twice = next((name for name in names if name in found), None)
        if twice:
            report.add(ssh, f"hosts.{key}", f"host `{twice}` is given twice under `ssh.hosts`", "keep one")
        found |= dict.fromkeys(names, key)
    return found


def _strange(ssh: Ssh, hosts: dict[str, str], machines: set[str], report: Report) -> None:
    for name, key in hosts.items():
        if name not in machines:
            what = f"`ssh.hosts` names `{name}`, which is no machine of this cluster"
            hint = did_you_mean(name, machines, "nodes are called `<partition>-1`, the head node `head`")
            report.add(ssh, f"hosts.{key}", what, hint)
