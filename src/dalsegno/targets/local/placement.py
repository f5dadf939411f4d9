"""Assign each host its place on this machine: address, port and GPUs. Pure.

A host keeps its address and port from one `up` to the next. Real GPUs are assigned again by each `up`.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dalsegno.errors import TargetError
from dalsegno.health.telemetry import Telemetry, healthy
from dalsegno.spec.facts import Cluster, Node
from dalsegno.system.machine import MachineFacts
from dalsegno.users.accounts import AccountSet
from dalsegno.users.checks import People, assign_gids, assign_uids, check_new_groups, check_people

VIRTUAL, LOOPBACK = "virtual", "loopback"
SWITCH = "switch"
BACKUP = "head-backup"
REST = "rest"  # host of slurmrestd, which identifies callers by PID and so needs the machine's PID namespace
SHELL = "shell"  # host name of a shell that runs on the head or a login node, but uses the machine's own network
ROOM = "machine-room"  # the machine room runs outside all other hosts, because it boots them
SUBNETS = ipaddress.IPv4Network("10.192.0.0/10")  # the upper quarter of 10/8, rarely used by offices and clouds
SUBNET_BITS = 20
AGENTS, AGENTS_PORT = "agents", 6816  # the controller listens here for node agents; slurmctld's port is 6817
OBSERVER, OBSERVER_PORT = "observer", 6820  # the observer serves metrics and the web page here
MONITORS = ("prometheus", "alertmanager")
FIRST_PORT, LAST_PORT = 17000, 32000  # ports for daemons on loopback, below the ephemeral ports of Linux
HOSTS_MAX = 1000  # maximum number of hosts; a Linux bridge has at most 1023 ports


@dataclass(frozen=True)
class Placement:
    """The assigned places. Addresses, ports and ids stay the same while the cluster exists."""

    hosts: str  # kind of hosts: "virtual" or "loopback"
    subnet: str = ""
    link: str = ""  # the machine's end of the link to the cluster
    addresses: Mapping[str, str] = field(default_factory=dict)
    ports: Mapping[str, int] = field(default_factory=dict)  # on loopback only: node or daemon -> port
    gpu_files: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    gpus_simulated: bool = True
    uids: Mapping[str, int] = field(default_factory=dict)  # uids of users that exist only in this cluster
    gids: Mapping[str, int] = field(default_factory=dict)  # gids of groups that exist only in this cluster


@dataclass(frozen=True)
class Free:
    """The networks, links and users that this machine already has, and a function that finds free ports."""

    networks: Sequence[ipaddress.IPv4Network] = ()  # networks in use
    links: frozenset[str] = frozenset()  # names of links in use
    port_run: Callable[[int, set[int]], int | None] = lambda count, taken: FIRST_PORT
    people: People = field(default_factory=People)  # the machine's own users and groups
    directory: AccountSet = field(default_factory=AccountSet)  # accounts in the cluster's LDAP directory
    other_ids: frozenset[int] = frozenset()  # uids and gids of other clusters, whose users share the machine's files


def head_hosts(cluster: Cluster) -> list[str]:
    return [cluster.head, BACKUP] if cluster.slurm.backup_controller else [cluster.head]


def host_names(cluster: Cluster) -> list[str]:
    """Return every host that has an address, the head first."""
    return [*head_hosts(cluster), *cluster.logins, *(node.name for node in cluster.nodes)]


def outside_hosts(cluster: Cluster, placement: Placement, machine: str) -> dict[str, str]:
    """Return the host names under which srun runs in the machine's own network, with the machine's address.

    These are the name of the machine, and the name of a shell on the head or a login node. slurmctld connects to each
    srun by such a name.
    """
    if placement.hosts == LOOPBACK:
        return {}
    address = str(ipaddress.IPv4Network(placement.subnet)[1])
    usable = [name for name in (SHELL, machine) if re.fullmatch(r"[A-Za-z0-9][\w.-]*", name, re.ASCII)]
    return {name: address for name in usable if name not in {*host_names(cluster), "localhost"}}


def submit_hosts(cluster: Cluster, placement: Placement, machine: str) -> dict[str, str]:
    """Return all hosts that may run srun but do not run slurmd, with the address at which slurmctld reaches each."""
    if placement.hosts == LOOPBACK:
        return {}
    own = {name: placement.addresses[name] for name in [*head_hosts(cluster), *cluster.logins]}
    return {**own, **outside_hosts(cluster, placement, machine)}


def exporter_port(host: str) -> str:
    """Return the key under which the port of a host's node_exporter is stored."""
    return f"node-exporter:{host}"


def choose_hosts(cluster: Cluster, machine: MachineFacts) -> str:
    """Return "virtual" or "loopback", whichever the cluster file requires.

    If the file requires neither, return "virtual" if this user can create virtual hosts, else "loopback". Raise an
    error if the file requires virtual hosts and this user cannot create them.
    """
    wish = cluster.local.hosts
    able = machine.is_root and machine.namespaces
    if wish == VIRTUAL and not able:
        why = "this kernel or container does not permit namespaces" if machine.is_root else "they need root"
        way = "" if machine.is_root else "use sudo, or "
        raise TargetError(f"no virtual hosts here: {why}", hint=f"{way}set `local: {{hosts: loopback}}`")
    return VIRTUAL if able and wish != LOOPBACK else LOOPBACK


def place(
    cluster: Cluster, machine: MachineFacts, folder_id: str, before: Placement | None, free: Free, devices: str
) -> Placement:
    """Return the placement of the cluster. Hosts in the placement `before` keep their addresses and ports."""
    hosts = before.hosts if before else choose_hosts(cluster, machine)
    if before and cluster.local.hosts not in ("auto", before.hosts):
        raise TargetError(
            f"`local.hosts` cannot change from {before.hosts} to {cluster.local.hosts} while the cluster is up",
            hint=f"`dalsegno down {cluster.name}` first",
        )
    base = before or Placement(hosts=hosts)
    placed = (
        _place_virtual(cluster, folder_id, base, free) if hosts == VIRTUAL else _place_loopback(cluster, base, free)
    )
    if hosts == VIRTUAL:
        placed = _place_people(cluster, placed, free)
    return _place_gpus(cluster, machine, placed, devices)


def _place_people(cluster: Cluster, base: Placement, free: Free) -> Placement:
    """Return the placement with ids for users and groups. Raise an error if a new user or group would get the rights of
    an existing one."""
    check_people(cluster.users, free.people, base.uids, cluster.groups)
    in_use = free.directory.ids | free.other_ids
    uids = assign_uids(cluster.users, free.people, base.uids, in_use)
    check_new_groups(cluster.groups, free.people, base.gids, uids)
    gids = assign_gids(cluster.users, cluster.groups, free.people, uids, base.gids, in_use)
    return replace(base, uids=uids, gids=gids)


def _place_virtual(cluster: Cluster, folder_id: str, base: Placement, free: Free) -> Placement:
    names = host_names(cluster)
    if len(names) > HOSTS_MAX:
        raise TargetError(
            f"{len(names)} virtual hosts exceed the limit of {HOSTS_MAX} for one bridge",
            hint="set `local: {hosts: loopback}` for clusters of this size",
        )
    if base.subnet and cluster.local.subnet not in ("", base.subnet):
        raise TargetError(
            f"the cluster's network is {base.subnet} and cannot become {cluster.local.subnet} while it is up",
            hint=f"`dalsegno down {cluster.name}` first",
        )
    subnet = base.subnet or _choose_subnet(cluster, folder_id, free)
    network = ipaddress.IPv4Network(subnet)
    kept = {name: address for name, address in base.addresses.items() if name in names}
    taken = set(base.addresses.values())  # hosts that will be removed keep their addresses until the end of `up`
    fresh = (str(network[index]) for index in range(2, network.num_addresses - 1) if str(network[index]) not in taken)
    addresses = {name: kept.get(name) or next(fresh) for name in names}
    return replace(base, subnet=subnet, link=base.link or _choose_link(folder_id, free), addresses=addresses)


def _choose_subnet(cluster: Cluster, folder_id: str, free: Free) -> str:
    if cluster.local.subnet:
        return _checked_subnet(cluster.local.subnet, free)
    candidates = list(SUBNETS.subnets(new_prefix=SUBNET_BITS))
    start = int(folder_id, 16) % len(candidates)
    for subnet in candidates[start:] + candidates[:start]:
        if not any(subnet.overlaps(used) for used in free.networks):
            return str(subnet)
    raise TargetError(f"no free network in {SUBNETS}", hint="set one: `local: {subnet: 172.30.0.0/20}`")


def _checked_subnet(subnet: str, free: Free) -> str:
    """Return the subnet. Raise an error if it overlaps a network of this machine, because that network would become
    unreachable."""
    used = next((network for network in free.networks if ipaddress.IPv4Network(subnet).overlaps(network)), None)
    if used is not None:
        raise TargetError(
            f"network {subnet} overlaps {used}, which this machine uses already",
            hint="leave `local.subnet` out, or choose another",
        )
    return subnet


def _choose_link(folder_id: str, free: Free) -> str:
    return next(name for n in range(1000) if (name := f"ds{folder_id}{n or ''}") not in free.links)


def _place_loopback(cluster: Cluster, base: Placement, free: Free) -> Placement:
    if cluster.directory.ldap:
        raise TargetError(
            "accounts in LDAP need virtual hosts: without them, all jobs run as one user",
            hint="use sudo, or leave `directory` out",
        )
    if cluster.slurm.backup_controller:
        raise TargetError(
            "a backup controller needs a host of its own, and there are no virtual hosts here",
            hint="use sudo, or remove `backup_controller`",
        )
    wanted = ["slurmctld", "slurmdbd", AGENTS, OBSERVER, *(node.name for node in cluster.nodes)]
    if cluster.monitoring.prometheus:
        wanted += [*MONITORS, *(exporter_port(name) for name in [cluster.head, *(n.name for n in cluster.nodes)])]
    ports = {name: port for name, port in base.ports.items() if name in wanted}
    missing = [name for name in wanted if name not in ports]
    if missing:
        first = free.port_run(len(missing), set(ports.values()))
        if first is None:
            raise TargetError(
                f"no {len(missing)} consecutive free ports between {FIRST_PORT} and {LAST_PORT}",
                hint="`ss -ltn` shows who listens; `dalsegno ls` lists clusters that you can remove",
            )
        ports.update(zip(missing, range(first, first + len(missing)), strict=True))
    addresses = {name: "127.0.0.1" for name in host_names(cluster)}
    return replace(base, ports=ports, addresses=addresses)


def _place_gpus(cluster: Cluster, machine: MachineFacts, base: Placement, devices: str) -> Placement:
    """Return the placement with real GPUs for all nodes, in order, or with simulated GPUs for all nodes.

    The GPUs are real if the machine has enough for all nodes and the cluster file does not require simulated ones.
    Raise an error if the file requires real GPUs and there are too few.
    """
    total = sum(node.gpus for node in cluster.nodes)
    enough = 0 < total <= len(machine.gpu_files)
    if cluster.local.gpus == "real" and not enough:
        raise TargetError(
            f"the cluster asks for {total} GPUs, this machine has {len(machine.gpu_files)}",
            hint="ask for fewer, or set `local: {gpus: simulated}`",
        )
    real = enough and cluster.local.gpus != "simulated"
    files, start = {}, 0
    for node in cluster.nodes:
        own = machine.gpu_files[start : start + node.gpus]
        files[node.name] = own if real else tuple(f"{devices}/nvidia{index}" for index in range(node.gpus))
        start += node.gpus
    return replace(base, gpu_files=files, gpus_simulated=not real)


SIMULATED_MEMORY_MIB = 16384  # memory of a simulated GPU whose real size is unknown


def healthy_node(node: Node, simulated: bool, machine: str = "") -> Telemetry:
    """Return the telemetry of a healthy node. Another `machine` id gives other GPUs. Real GPUs are left out."""
    return healthy(
        node.name,
        node.gpus if simulated else 0,
        node.gpu_type,
        memory_mib=node.gpu_memory_mib or SIMULATED_MEMORY_MIB,
        stamp=gpu_stamp(node, simulated),
        machine=machine,
    )


def gpu_stamp(node: Node, simulated: bool) -> str:
    """Return a text that identifies the node's simulated GPUs. The telemetry file is rewritten only when it does not
    contain this text."""
    return f"made for {node.gpus if simulated else 0} x {node.gpu_type or 'gpu'} with {node.gpu_memory_mib} MiB."
