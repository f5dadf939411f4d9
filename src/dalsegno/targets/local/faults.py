"""Breaking hosts on purpose, as real ones break: without a word."""

from __future__ import annotations

import secrets
from difflib import get_close_matches

from dalsegno.errors import NotThere, TargetError
from dalsegno.system.children import start
from dalsegno.system.files import write_atomic
from dalsegno.system.hosts import host_process
from dalsegno.system.network import run_ip
from dalsegno.system.processes import Runner
from dalsegno.system.procfs import Process, end
from dalsegno.targets.local.cables import port_name
from dalsegno.targets.local.folder import Folder
from dalsegno.targets.local.placement import SWITCH, VIRTUAL, Placement
from dalsegno.targets.local.services import daemon_env

DISABLED, FORWARDING = "0", "3"  # a bridge port's states. `ip link … bridge_slave state 0` is taken, and does nothing.
# Ends a cut when its time is over, unless another has taken its place meanwhile.
MEND_LATER = 'sleep "$1"; test "$(cat "$2")" = "$3" && bridge link set dev "$4" state 3 && rm -f "$2"'


def power_off(runner: Runner, folder: Folder, placement: Placement, node: str) -> None:
    """The cable first: what the kernel says for a dying host's connections must reach no one."""
    _check_virtual(placement, node, "it has no power to cut")
    host = host_process(folder.host(node))
    if host is None:
        raise TargetError(f"{node} is off already", hint="`dalsegno up` boots it")
    run_ip(runner, [f"link set {port_name(placement.addresses[node])} down"], _switch(folder).pid)
    if end([host]):
        raise TargetError(f"{node} does not die", hint="a process of it may hang in the kernel")


def cut_network(runner: Runner, folder: Folder, placement: Placement, node: str, for_s: float | None) -> None:
    """Written down and its end arranged for before it begins: whatever happens to us, it does not stay unnoticed."""
    _check_virtual(placement, node, "it has no network of its own")
    if host_process(folder.host(node)) is None:
        raise TargetError(f"{node} is off", hint="`dalsegno up` boots it")
    switch, port, name = _switch(folder), port_name(placement.addresses[node]), secrets.token_hex(8)
    write_atomic(folder.cut(node), name)
    if for_s is not None:
        argv = ["sh", "-c", MEND_LATER, "sh", str(for_s), str(folder.cut(node)), name, port]
        start([*_inside(switch), *argv], daemon_env(folder), output=folder.host(node) / "cut.log").close()
    _set_port(runner, switch, port, DISABLED)


def mend_network(runner: Runner, folder: Folder, placement: Placement, node: str) -> None:
    """Back on the network; one that is there, or off, is fine."""
    _check_virtual(placement, node, "it has no network of its own")
    if host_process(folder.host(node)) is not None:
        _set_port(runner, _switch(folder), port_name(placement.addresses[node]), FORWARDING)
    folder.cut(node).unlink(missing_ok=True)


def _set_port(runner: Runner, switch: Process, port: str, state: str) -> None:
    runner.run([*_inside(switch), "bridge", "link", "set", "dev", port, "state", state], timeout_s=30).checked()


def _inside(switch: Process) -> list[str]:
    return ["nsenter", "-t", str(switch.pid), "-n"]


def _switch(folder: Folder) -> Process:
    switch = host_process(folder.host(SWITCH))
    if switch is None:
        raise TargetError("the cluster's switch host is gone", hint="run `dalsegno up`")
    return switch


def _check_virtual(placement: Placement, node: str, why: str) -> None:
    check_node(placement, node)
    if placement.hosts != VIRTUAL:
        raise TargetError(
            f"{node} is a process on this machine, not a host: {why}",
            hint="`sudo dalsegno up` makes virtual hosts; `worker-kill` works here too",
        )


def check_node(placement: Placement, node: str) -> None:
    if node not in placement.addresses:
        known = list(placement.addresses)
        close = get_close_matches(node, known, 1)
        hint = f"did you mean `{close[0]}`? " if close else ""
        raise NotThere(f"there is no node `{node}`", hint=f"{hint}there are {', '.join(known[:12])}")
