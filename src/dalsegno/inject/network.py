"""Faults of a node's network: link down, link flapping, packets cut off, slow or lossy."""

from __future__ import annotations

import re
import time

from dalsegno.errors import UsageError
from dalsegno.inject.access import NodeAccess, in_network, in_switch
from dalsegno.inject.records import FaultRecord, record_path
from dalsegno.system.network import run_ip
from dalsegno.system.processes import Completed

DISABLED, FORWARDING = "0", "3"  # states of a bridge port; `ip link … bridge_slave state 0` is accepted but ignored
# Ends a cut when its time is over, unless another has taken its place. A shell, not Python: cuts may be shorter than
# Python takes to start.
RESTORE_LATER = 'sleep "$1"; grep -q "$3" "$2" && bridge link set dev "$4" state 3 && rm -f "$2"'
RATE = re.compile(r"\d{1,6}[kmg]bit")
FLAPS, FLAP_S = 3, 0.3


def cut(nodes: NodeAccess, fault: FaultRecord) -> None:
    port, for_s = nodes.port(fault.node), fault.options.get("for_s")
    if for_s is not None:  # its end is arranged before it begins
        path = record_path(nodes.records(fault.node), fault.fault)
        argv = ["sh", "-c", RESTORE_LATER, "sh", str(for_s), str(path), fault.mark, port]
        nodes.start(fault.node, ["nsenter", "-t", str(nodes.switch().pid), "-n", *argv]).close()
    in_switch(nodes, ["bridge", "link", "set", "dev", port, "state", DISABLED]).checked()


def restore(nodes: NodeAccess, fault: FaultRecord) -> None:
    check_restored(in_switch(nodes, ["bridge", "link", "set", "dev", nodes.port(fault.node), "state", FORWARDING]))


def check_restored(done: Completed) -> None:
    """Accept that a port refuses while its link is down, as when its host boots: it forwards once the link is up."""
    if "Network is down" not in done.stderr:
        done.checked()


def unplug(nodes: NodeAccess, fault: FaultRecord) -> None:
    run_ip(nodes.runner, [f"link set {nodes.port(fault.node)} down"], nodes.switch().pid)


def plug(nodes: NodeAccess, fault: FaultRecord) -> None:
    run_ip(nodes.runner, [f"link set {nodes.port(fault.node)} up"], nodes.switch().pid)


def flap(nodes: NodeAccess, fault: FaultRecord) -> None:
    for _ in range(int(fault.options.get("count", FLAPS))):
        unplug(nodes, fault)
        time.sleep(FLAP_S)
        plug(nodes, fault)
        time.sleep(FLAP_S)


def check_rate(rate: str) -> str:
    if not RATE.fullmatch(rate):
        raise UsageError(f"invalid rate `{rate}`", hint="such as `1mbit`, `500kbit` or `10gbit`")
    return rate


def slow(nodes: NodeAccess, fault: FaultRecord) -> None:
    """Use tbf, which every kernel has; some have no netem."""
    tbf = ["tbf", "rate", check_rate(str(fault.options.get("rate", "1mbit"))), "burst", "32kb", "latency", "400ms"]
    in_switch(nodes, ["tc", "qdisc", "replace", "dev", nodes.port(fault.node), "root", *tbf]).checked()
    in_network(nodes, fault.node, ["tc", "qdisc", "replace", "dev", "eth0", "root", *tbf]).checked()


def remove_rate(nodes: NodeAccess, fault: FaultRecord) -> None:
    in_switch(nodes, ["tc", "qdisc", "del", "dev", nodes.port(fault.node), "root"])
    in_network(nodes, fault.node, ["tc", "qdisc", "del", "dev", "eth0", "root"])


def drop(nodes: NodeAccess, fault: FaultRecord) -> None:
    """Drop packets of both directions at the switch's end of the link."""
    stop_dropping(nodes, fault)
    port = nodes.port(fault.node)
    in_switch(nodes, ["tc", "qdisc", "add", "dev", port, "clsact"]).checked()
    code = drop_program(float(fault.options.get("percent", 30.0)))
    for way in ("ingress", "egress"):
        argv = ["tc", "filter", "add", "dev", port, way, "bpf", "direct-action", "bytecode", code]
        in_switch(nodes, argv).checked()


def stop_dropping(nodes: NodeAccess, fault: FaultRecord) -> None:
    in_switch(nodes, ["tc", "qdisc", "del", "dev", nodes.port(fault.node), "clsact"])


def drop_program(percent: float) -> str:
    """Return a packet filter, in the form of tc, that drops (2) packets whose random number is below the share."""
    if not 0 < percent <= 100:
        raise UsageError(f"invalid percentage `{percent:g}`", hint="between 0 and 100")
    below = min(round(percent / 100 * 2**32), 2**32 - 1)
    return f"4,32 0 0 {2**32 - 4096 + 56},37 0 1 {below},6 0 0 {2**32 - 1},6 0 0 2"
