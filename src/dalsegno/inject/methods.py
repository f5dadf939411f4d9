"""Inject and undo each fault in a node's processes, network or files. No other node is affected."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dalsegno.errors import TargetError, UsageError
from dalsegno.inject.access import NodeAccess, in_mounts, in_network, in_switch
from dalsegno.inject.records import FaultRecord, lock_path, record_path
from dalsegno.inject.worker_program import FLIP, PROGRAM, UNFLIP, WantedWorker
from dalsegno.inject.workers import NodeWorker, choose, inspect
from dalsegno.programs import launcher
from dalsegno.system.children import PROC, Process, arguments, end, find, send
from dalsegno.system.network import run_ip
from dalsegno.system.processes import Completed

DAEMONS = {"slurmd-dead": "slurmd", "agent-dead": "node-agent"}
DISABLED, FORWARDING = "0", "3"  # port states for `bridge link set`; `ip link … bridge_slave state 0` has no effect
# This script ends a network cut when its time is over, unless a newer cut has replaced it. It is a shell script,
# because Python could take longer to start than a brief network cut lasts.
RESTORE_LATER = 'sleep "$1"; exec 9>>"$5"; flock 9; grep -q "$3" "$2" && bridge link set dev "$4" state 3 && rm -f "$2"'
RATE = re.compile(r"\d{1,6}[kmg]bit")
RATE_DEFAULT = "1mbit"
LINK_BUFFER = "128kb"  # size of the buffer before the slow link, as in a small switch; packets that do not fit are lost
FLAPS, FLAP_S = 3, 0.3
DISK_FILE = "full"
FILL_DISK = 'exec 2>/dev/null; cat /dev/zero > "$1"'
HANG_S = 10.0
HANGING_FS = Path(__file__).with_name("hanging_fs.py")


def kill_daemon(nodes: NodeAccess, fault: FaultRecord) -> None:
    """Stop the host from restarting a daemon, then kill the daemon."""
    nodes.hold(fault.node, DAEMONS[fault.fault], True)
    end(nodes.daemons(fault.node, DAEMONS[fault.fault]))


def start_daemon(nodes: NodeAccess, fault: FaultRecord) -> None:
    nodes.hold(fault.node, DAEMONS[fault.fault], False)


def stop_worker(nodes: NodeAccess, fault: FaultRecord) -> None:
    send(_process(fault), signal.SIGSTOP)


def resume_worker(nodes: NodeAccess, fault: FaultRecord) -> None:
    send(_process(fault), signal.SIGCONT)


def _process(fault: FaultRecord) -> Process:
    return Process(int(fault.undo["pid"]), int(fault.undo["start"]))


def flip_bit(nodes: NodeAccess, fault: FaultRecord) -> None:
    _set_flip(nodes, fault, FLIP)


def stop_flipping(nodes: NodeAccess, fault: FaultRecord) -> None:
    _set_flip(nodes, fault, UNFLIP)


def _set_flip(nodes: NodeAccess, fault: FaultRecord, what: str) -> None:
    """Create or remove the file that makes a worker flip a bit. `break-worker` does so as the worker's owner."""
    uid, gid = int(fault.undo["uid"]), int(fault.undo["gid"])
    wanted = WantedWorker("", what, str(fault.undo["run"]), int(fault.undo["rank"]))
    become = ["setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups", "--no-new-privs"]
    # The user's other processes can access the program's terminal and environment. The program therefore gets its own
    # session and an empty environment instead of root's.
    as_owner = ["setsid", "--wait", "env", "-i", f"PATH={os.defpath}", *become] if os.geteuid() == 0 else []
    in_mounts(nodes, fault.node, [*as_owner, *launcher(), PROGRAM, json.dumps(asdict(wanted))]).checked()


def kill_worker(nodes: NodeAccess, node: str, run: str | None, rank: int | None) -> NodeWorker:
    """Kill a worker without warning, as the kernel does when it is out of memory, and return the worker."""
    worker, process = find_worker(nodes, node, run, rank)
    send(process, signal.SIGKILL)
    return worker


def find_worker(nodes: NodeAccess, node: str, run: str | None, rank: int | None) -> tuple[NodeWorker, Process]:
    """Return the worker with this run and rank, and its process. None matches any run or rank; the lowest rank that
    matches is returned."""
    seen = [inspect(pid) for pid in nodes.pids(node)]
    return choose([one for one in seen if one is not None], node, run, rank)


def largest_task(nodes: NodeAccess, node: str) -> dict[str, Any]:
    """Return the PID, start time, name and size of the task that the kernel would kill first; {} if no job runs."""
    sizes = {process: _resident_kib(process.pid) for process in nodes.tasks(node)}
    if not sizes:
        return {}
    process = max(sizes, key=lambda one: sizes[one])
    name = (PROC / str(process.pid) / "comm").read_text(errors="replace").strip()
    return {"pid": process.pid, "start": process.start, "name": name, "kib": sizes[process]}


def run_out_of_memory(nodes: NodeAccess, fault: FaultRecord) -> None:
    if fault.undo:
        send(_process(fault), signal.SIGKILL)


def _resident_kib(pid: int) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int((PROC / str(pid) / "statm").read_text().split()[1]) * 4
    return 0


def check_runs(nodes: NodeAccess, node: str, name: str) -> None:
    if not nodes.daemons(node, name):
        raise TargetError(f"{name} does not run on {node}", hint="`dalsegno status` shows the daemons")


def cut_off(nodes: NodeAccess, fault: FaultRecord) -> None:
    port, for_s = nodes.port(fault.node), fault.options.get("for_s")
    if for_s is not None:  # start the program that ends the cut before the cut begins
        folder = nodes.records(fault.node)
        path, lock = record_path(folder, fault.fault), lock_path(folder)
        argv = ["sh", "-c", RESTORE_LATER, "sh", str(for_s), str(path), fault.mark, port, str(lock)]
        nodes.start(fault.node, ["nsenter", "-t", str(nodes.switch().pid), "-n", *argv]).close()
    in_switch(nodes, ["bridge", "link", "set", "dev", port, "state", DISABLED]).checked()


def reconnect(nodes: NodeAccess, fault: FaultRecord) -> None:
    check_restored(in_switch(nodes, ["bridge", "link", "set", "dev", nodes.port(fault.node), "state", FORWARDING]))


def check_restored(done: Completed) -> None:
    """Raise an error if the port was not restored. A port whose link is down counts as restored: it forwards packets
    once the link is up."""
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


def slow_down(nodes: NodeAccess, fault: FaultRecord) -> None:
    """Limit the rate of the node's link with tbf, which every kernel has. Some kernels lack netem."""
    tbf = ["tbf", "rate", check_rate(str(fault.options.get("rate", RATE_DEFAULT))), "burst", "32kb", "latency", "400ms"]
    in_switch(nodes, ["tc", "qdisc", "replace", "dev", nodes.port(fault.node), "root", *tbf]).checked()
    in_network(nodes, fault.node, ["tc", "qdisc", "replace", "dev", "eth0", "root", *tbf]).checked()


def remove_limit(nodes: NodeAccess, fault: FaultRecord) -> None:
    in_switch(nodes, ["tc", "qdisc", "del", "dev", nodes.port(fault.node), "root"])
    in_network(nodes, fault.node, ["tc", "qdisc", "del", "dev", "eth0", "root"])


def slow_link(nodes: NodeAccess, fault: FaultRecord) -> None:
    """Limit the rate between the node and its peer, at both ends of the node's link. Other packets are not limited.

    HTB sends a packet at once if no filter assigns it to a class.
    """
    remove_limit(nodes, fault)
    rate, peer = check_rate(str(fault.options.get("rate", RATE_DEFAULT))), nodes.address(str(fault.options["peer"]))
    for argv in link_limit(nodes.port(fault.node), rate, f"src {peer}"):
        in_switch(nodes, argv).checked()
    for argv in link_limit("eth0", rate, f"dst {peer}"):
        in_network(nodes, fault.node, argv).checked()


def link_limit(device: str, rate: str, match: str) -> list[list[str]]:
    """Return the commands that limit how fast a device sends packets that match a filter, such as `dst 10.0.0.2`."""
    limit = ["htb", "rate", rate, "burst", "32kb"]
    chosen = ["u32", "match", "ip", *match.split(), "flowid", "1:1"]
    return [
        ["tc", "qdisc", "add", "dev", device, "root", "handle", "1:", "htb"],
        ["tc", "class", "add", "dev", device, "parent", "1:", "classid", "1:1", *limit],
        ["tc", "qdisc", "add", "dev", device, "parent", "1:1", "bfifo", "limit", LINK_BUFFER],
        ["tc", "filter", "add", "dev", device, "parent", "1:", "protocol", "ip", *chosen],
    ]


def drop_packets(nodes: NodeAccess, fault: FaultRecord) -> None:
    """Drop packets in both directions at the switch's end of the link."""
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
    """Return BPF bytecode for tc that drops this percentage of packets at random. The program returns 2 to drop a
    packet."""
    if not 0 < percent <= 100:
        raise UsageError(f"invalid percentage `{percent:g}`", hint="between 0 and 100")
    below = min(round(percent / 100 * 2**32), 2**32 - 1)
    return f"4,32 0 0 {2**32 - 4096 + 56},37 0 1 {below},6 0 0 {2**32 - 1},6 0 0 2"


def fill_disk(nodes: NodeAccess, fault: FaultRecord) -> None:
    """Fill the node's own disk. Raise an error if the node has no disk of its own, because this machine's disk must not
    be filled."""
    disk = str(nodes.disk(fault.node))
    if not _is_mounted(nodes.host(fault.node).pid, disk, "tmpfs"):
        raise TargetError(f"{fault.node} has no disk of its own yet", hint="reboot it: `inject power-off`, then `up`")
    in_mounts(nodes, fault.node, ["sh", "-c", FILL_DISK, "sh", str(_filling(nodes, fault))])


def empty_disk(nodes: NodeAccess, fault: FaultRecord) -> None:
    in_mounts(nodes, fault.node, ["rm", "-f", str(_filling(nodes, fault))]).checked()


def _filling(nodes: NodeAccess, fault: FaultRecord) -> Path:
    return nodes.disk(fault.node) / DISK_FILE


def hang_homes(nodes: NodeAccess, fault: FaultRecord) -> None:
    """Mount a FUSE file system over the home folders. Its server never answers."""
    host, homes = nodes.host(fault.node), str(nodes.homes)
    inside = ["nsenter", "-t", str(host.pid), "-m", "-p", "--"]
    argv = [*inside, sys.executable, "-I", "-S", str(HANGING_FS), homes, fault.mark]
    server = nodes.start(fault.node, argv)
    until = time.monotonic() + HANG_S
    while not _is_mounted(host.pid, homes, "fuse"):
        if not server.alive() or time.monotonic() > until:
            raise TargetError(
                f"cannot mount the hanging file system on {fault.node}",
                where=str(nodes.log(fault.node)),
                hint="the kernel needs FUSE",
            )
        time.sleep(0.01)
    server.close()


def _is_mounted(pid: int, path: str, kind: str | None = None) -> bool:
    written = path.replace(" ", "\\040")
    mounts = [line.split()[1:3] for line in (PROC / str(pid) / "mounts").read_text().splitlines()]
    return any(target == written and kind in (None, found) for target, found in mounts)


def release_homes(nodes: NodeAccess, fault: FaultRecord) -> None:
    """End the server, so that waiting processes get an error, and unmount the file system."""
    server = [str(HANGING_FS), str(nodes.homes), fault.mark]
    end(find(lambda pid: arguments(pid)[-3:] == server))
    while _is_mounted(nodes.host(fault.node).pid, str(nodes.homes), "fuse"):
        in_mounts(nodes, fault.node, ["umount", "-l", "-c", str(nodes.homes)]).checked()


def silence_munge(nodes: NodeAccess, fault: FaultRecord) -> None:
    """Cover munge's socket with a bind mount of /dev/null, to which no client can connect."""
    if not _is_covered(nodes, fault.node):
        in_mounts(nodes, fault.node, ["mount", "--bind", "/dev/null", str(nodes.munge_socket)]).checked()


def wake_munge(nodes: NodeAccess, fault: FaultRecord) -> None:
    if _is_covered(nodes, fault.node):
        in_mounts(nodes, fault.node, ["umount", "-l", str(nodes.munge_socket)]).checked()


def _is_covered(nodes: NodeAccess, node: str) -> bool:
    return _is_mounted(nodes.host(node).pid, str(nodes.munge_socket))


Step = Callable[[NodeAccess, FaultRecord], None]


@dataclass(frozen=True)
class FaultMethod:
    """The functions that inject and undo a fault. If `apart` is set, only virtual hosts can have the fault, and `apart`
    is the reason that is shown for other nodes."""

    do: Step
    undo: Step
    apart: str = ""


def _nothing(nodes: NodeAccess, fault: FaultRecord) -> None:
    """Do nothing, because nothing on the node has to change."""


NO_NETWORK, NO_DISK = "it has no network of its own", "it has no files of its own"
HARDWARE = FaultMethod(_nothing, _nothing)

METHODS = {  # other faults change only records and telemetry; `injection` itself carries out power-off and worker-kill
    "slurmd-dead": FaultMethod(kill_daemon, start_daemon),
    "agent-dead": FaultMethod(kill_daemon, start_daemon),
    "worker-hang": FaultMethod(stop_worker, resume_worker),
    "bit-flip": FaultMethod(flip_bit, stop_flipping),
    "oom": FaultMethod(run_out_of_memory, _nothing),
    "link-down": FaultMethod(unplug, plug, NO_NETWORK),
    "link-flap": FaultMethod(flap, plug, NO_NETWORK),
    "net-cut": FaultMethod(cut_off, reconnect, NO_NETWORK),
    "net-slow": FaultMethod(slow_down, remove_limit, NO_NETWORK),
    "link-slow": FaultMethod(slow_link, remove_limit, NO_NETWORK),
    "net-loss": FaultMethod(drop_packets, stop_dropping, NO_NETWORK),
    "disk-full": FaultMethod(fill_disk, empty_disk, NO_DISK),
    "fs-hang": FaultMethod(hang_homes, release_homes, NO_DISK),
    "munge-dead": FaultMethod(silence_munge, wake_munge, NO_DISK),
}


def method_of(fault: str) -> FaultMethod:
    return METHODS.get(fault, HARDWARE)
