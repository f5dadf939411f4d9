"""A node's cable and what passes through it: out, flapping, cut, slow, lossy."""

from __future__ import annotations

import re
import time

from dalsegno.errors import UsageError
from dalsegno.system.children import start
from dalsegno.system.network import run_ip
from dalsegno.system.processes import Completed
from dalsegno.targets.local.breaking.places import in_network, in_switch
from dalsegno.targets.local.breaking.records import Injected, record_path
from dalsegno.targets.local.daemons import daemon_env
from dalsegno.targets.local.nodes import LocalNodes

DISABLED, FORWARDING = "0", "3"  # a bridge port's states. `ip link … bridge_slave state 0` is taken, and does nothing.
# Ends a cut when its time is over, unless another has taken its place meanwhile. A shell, not us: it is there in no
# time, and cuts may be short.
MEND_LATER = 'sleep "$1"; grep -q "$3" "$2" && bridge link set dev "$4" state 3 && rm -f "$2"'
RATE = re.compile(r"\d{1,6}[kmg]bit")
FLAPS, FLAP_S = 3, 0.3


def cut(nodes: LocalNodes, fault: Injected) -> None:
    port, for_s = nodes.port(fault.node), fault.options.get("for_s")
    if for_s is not None:  # its end is arranged for before it begins
        path = record_path(nodes.folder, fault)
        argv = ["sh", "-c", MEND_LATER, "sh", str(for_s), str(path), fault.mark, port]
        inside = ["nsenter", "-t", str(nodes.switch().pid), "-n"]
        start([*inside, *argv], daemon_env(nodes.folder), output=nodes.folder.log(fault.node, "faults")).close()
    in_switch(nodes, ["bridge", "link", "set", "dev", port, "state", DISABLED]).checked()


def mend(nodes: LocalNodes, fault: Injected) -> None:
    check_mended(in_switch(nodes, ["bridge", "link", "set", "dev", nodes.port(fault.node), "state", FORWARDING]))


def check_mended(done: Completed) -> None:
    """A port whose link is not up, as for a moment while its host boots, is refused: it forwards as soon as it is."""
    if "Network is down" not in done.stderr:
        done.checked()


def unplug(nodes: LocalNodes, fault: Injected) -> None:
    run_ip(nodes.runner, [f"link set {nodes.port(fault.node)} down"], nodes.switch().pid)


def plug(nodes: LocalNodes, fault: Injected) -> None:
    run_ip(nodes.runner, [f"link set {nodes.port(fault.node)} up"], nodes.switch().pid)


def flap(nodes: LocalNodes, fault: Injected) -> None:
    for _ in range(int(fault.options.get("count", FLAPS))):
        unplug(nodes, fault)
        time.sleep(FLAP_S)
        plug(nodes, fault)
        time.sleep(FLAP_S)


def check_rate(rate: str) -> str:
    if not RATE.fullmatch(rate):
        raise UsageError(f"`{rate}` is no rate", hint="such as `1mbit`, `500kbit` or `10gbit`")
    return rate


def slow(nodes: LocalNodes, fault: Injected) -> None:
    """tbf, which every kernel has: netem is missing on some."""
    tbf = ["tbf", "rate", check_rate(str(fault.options.get("rate", "1mbit"))), "burst", "32kb", "latency", "400ms"]
    in_switch(nodes, ["tc", "qdisc", "replace", "dev", nodes.port(fault.node), "root", *tbf]).checked()
    in_network(nodes, fault.node, ["tc", "qdisc", "replace", "dev", "eth0", "root", *tbf]).checked()


def hasten(nodes: LocalNodes, fault: Injected) -> None:
    in_switch(nodes, ["tc", "qdisc", "del", "dev", nodes.port(fault.node), "root"])
    in_network(nodes, fault.node, ["tc", "qdisc", "del", "dev", "eth0", "root"])


def lose(nodes: LocalNodes, fault: Injected) -> None:
    """Both ways at the switch's end of the cable."""
    keep(nodes, fault)
    port = nodes.port(fault.node)
    in_switch(nodes, ["tc", "qdisc", "add", "dev", port, "clsact"]).checked()
    code = drop_program(float(fault.options.get("percent", 30.0)))
    for way in ("ingress", "egress"):
        argv = ["tc", "filter", "add", "dev", port, way, "bpf", "direct-action", "bytecode", code]
        in_switch(nodes, argv).checked()


def keep(nodes: LocalNodes, fault: Injected) -> None:
    in_switch(nodes, ["tc", "qdisc", "del", "dev", nodes.port(fault.node), "clsact"])


def drop_program(percent: float) -> str:
    """A packet filter that draws a number for each packet and drops (2) those below the share, as tc writes it."""
    if not 0 < percent <= 100:
        raise UsageError(f"`{percent:g}` is no share of packets", hint="between 0 and 100")
    below = min(round(percent / 100 * 2**32), 2**32 - 1)
    return f"4,32 0 0 {2**32 - 4096 + 56},37 0 1 {below},6 0 0 {2**32 - 1},6 0 0 2"
