"""The network of virtual hosts: a bridge inside the switch host, a link to each host, and a link to this machine.

The bridge has its own network namespace. So the machine's firewall does not see traffic between hosts, and the whole
network ends with the switch's first process.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Mapping, Sequence

from dalsegno.system.cgroups import cluster_folders, remove_cgroup
from dalsegno.system.children import Process, end
from dalsegno.system.files import remove_tree
from dalsegno.system.hosts import host_process
from dalsegno.system.network import link_names, run_ip
from dalsegno.system.processes import Runner
from dalsegno.targets.local.folder import Folder
from dalsegno.targets.local.placement import Placement

BRIDGE, UPLINK = "br0", "uplink"


def port_name(address: str) -> str:
    """Return the name of the switch's end of a host's link. It is derived from the address, so it is not stored
    anywhere."""
    return f"p{int(ipaddress.IPv4Address(address)):x}"


def plug_in(
    runner: Runner, placement: Placement, switch_pid: int, hosts: Mapping[str, Process], new: Collection[str]
) -> set[str]:
    """Create the bridge, the machine's link, and a link for each host without one. Return the hosts that got a link."""
    inside = link_names(runner, switch_pid)
    if BRIDGE not in inside:
        run_ip(runner, [f"link add {BRIDGE} type bridge", f"link set {BRIDGE} up"], switch_pid)
    if UPLINK not in inside:
        # A dead switch may have left a link behind. The kernel may be removing it at the same time.
        _delete(runner, placement.link)
        run_ip(runner, _machine_cable(placement, switch_pid))
    run_ip(runner, [f"link set {UPLINK} master {BRIDGE} up"], switch_pid)
    ports = {name: port_name(placement.addresses[name]) for name in hosts}
    wanting = {name for name, port in ports.items() if name in new or port not in inside}
    for name in wanting:
        if ports[name] in inside:
            _delete(runner, ports[name], switch_pid)
        if name not in new:
            _delete(runner, "eth0", hosts[name].pid)  # the host's end of a link that has lost its other end
    cables = [line for name in sorted(wanting) for line in _host_cable(ports[name], hosts[name].pid)]
    run_ip(runner, cables, switch_pid)
    return wanting


def _delete(runner: Runner, link: str, inside: int | None = None) -> None:
    """Delete a link, if it still exists."""
    enter = ["nsenter", "-t", str(inside), "-n"] if inside else []
    runner.run([*enter, "ip", "link", "del", link], timeout_s=30)


def _machine_cable(placement: Placement, switch_pid: int) -> list[str]:
    network = ipaddress.IPv4Network(placement.subnet)
    link = placement.link
    return [
        f"link add {link} type veth peer name {UPLINK} netns {switch_pid}",
        f"addr add {network[1]}/{network.prefixlen} dev {link}",
        f"link set {link} up",
        # With quickack, packets are acknowledged at once, as on the hosts.
        f"route replace {network} dev {link} proto kernel scope link src {network[1]} quickack 1",
    ]


def _host_cable(port: str, pid: int) -> list[str]:
    mac = f"02:00:{':'.join(port[1:].zfill(8)[i : i + 2] for i in range(0, 8, 2))}"
    # The hardware address of a host never changes. Otherwise, after a reboot, neighbours could not reach the host until
    # their ARP entries expire.
    return [
        f"link add {port} type veth peer name eth0 address {mac} netns {pid}",
        f"link set {port} master {BRIDGE} up",
    ]


def remove_hosts(folder: Folder, names: Sequence[str]) -> None:
    """Remove hosts and their files. Ending a host's first process also ends its other processes and its link."""
    living = [process for name in names if (process := host_process(folder.host(name))) is not None]
    end(living)
    for name in names:
        remove_cgroups_of(folder, name)
        remove_tree(folder.host(name))
        folder.agent_secret(name).unlink(missing_ok=True)


def remove_cgroups_of(folder: Folder, host: str) -> None:
    for base in cluster_folders(folder.id):
        remove_cgroup(base / host)
