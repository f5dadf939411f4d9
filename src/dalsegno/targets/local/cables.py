"""The network of virtual hosts: a bridge inside the switch host, a cable to each host, one to the machine.

The bridge lives in a network of its own, so the machine's firewall never sees what the hosts say to each other,
and all of it is gone the moment the switch's first process is.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping

from dalsegno.system.network import link_names, run_ip
from dalsegno.system.processes import Runner
from dalsegno.targets.local.placement import Placement

BRIDGE, UPLINK = "br0", "uplink"


def port_name(address: str) -> str:
    """The switch's end of a host's cable, named after the address so that it is known without a list."""
    return f"p{int(ipaddress.IPv4Address(address)):x}"


def plug_in(runner: Runner, placement: Placement, switch_pid: int, hosts: Mapping[str, int]) -> None:
    """Make the bridge if it is new, and connect the hosts (name → PID) whose cables are missing."""
    inside = link_names(runner, switch_pid)
    if BRIDGE not in inside:
        run_ip(runner, [f"link add {BRIDGE} type bridge", f"link set {BRIDGE} up"], switch_pid)
    if UPLINK not in inside:
        run_ip(runner, _machine_cable(placement, switch_pid))
        run_ip(runner, [f"link set {UPLINK} master {BRIDGE} up"], switch_pid)
    ports = {port_name(placement.addresses[name]): pid for name, pid in hosts.items()}
    for port in inside & ports.keys():
        unplug(runner, switch_pid, port)  # of a host that is dead: the kernel may be about to do the same
    run_ip(runner, [line for port, pid in ports.items() for line in _host_cable(port, pid)], switch_pid)


def unplug(runner: Runner, switch_pid: int, port: str) -> None:
    """Pull a cable; gone already is fine."""
    runner.run(["nsenter", "-t", str(switch_pid), "-n", "ip", "link", "del", port], timeout_s=30)


def _machine_cable(placement: Placement, switch_pid: int) -> list[str]:
    network = ipaddress.IPv4Network(placement.subnet)
    link = placement.link
    return [
        f"link add {link} type veth peer name {UPLINK} netns {switch_pid}",
        f"addr add {network[1]}/{network.prefixlen} dev {link}",
        f"link set {link} up",
        f"route replace {network} dev {link} proto kernel scope link src {network[1]} quickack 1",  # as on the hosts
    ]


def _host_cable(port: str, pid: int) -> list[str]:
    mac = f"02:00:{':'.join(port[1:].zfill(8)[i : i + 2] for i in range(0, 8, 2))}"
    # Always the same hardware address: neighbours reach a host that comes back at once, not when ARP has aged.
    return [
        f"link add {port} type veth peer name eth0 address {mac} netns {pid}",
        f"link set {port} master {BRIDGE} up",
    ]
