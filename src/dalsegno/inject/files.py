"""Faults of a node's files: disk full, shared folders hanging, munge's socket dead. Only this node sees them."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from dalsegno.errors import TargetError
from dalsegno.inject.access import NodeAccess, in_mounts
from dalsegno.inject.records import FaultRecord
from dalsegno.system.children import PROC, arguments, end, find

FILLING = "full"
FILL = 'exec 2>/dev/null; cat /dev/zero > "$1"'
HANG_S = 10.0
SERVER = Path(__file__).with_name("hanging_fs.py")


def fill(nodes: NodeAccess, fault: FaultRecord) -> None:
    """Write until the disk is full, but never to the disk of this machine."""
    disk = str(nodes.disk(fault.node))
    if not _is_mounted(nodes.host(fault.node).pid, disk, "tmpfs"):
        raise TargetError(f"{fault.node} has no disk of its own yet", hint="`inject power-off` and `up` give it one")
    in_mounts(nodes, fault.node, ["sh", "-c", FILL, "sh", str(_filling(nodes, fault))])


def empty(nodes: NodeAccess, fault: FaultRecord) -> None:
    in_mounts(nodes, fault.node, ["rm", "-f", str(_filling(nodes, fault))]).checked()


def _filling(nodes: NodeAccess, fault: FaultRecord) -> Path:
    return nodes.disk(fault.node) / FILLING


def hang(nodes: NodeAccess, fault: FaultRecord) -> None:
    """Mount a FUSE file system over the home folders whose server never answers."""
    host, homes = nodes.host(fault.node), str(nodes.homes)
    inside = ["nsenter", "-t", str(host.pid), "-m", "-p", "--"]
    argv = [*inside, sys.executable, "-I", "-S", str(SERVER), homes, fault.mark]
    server = nodes.start(fault.node, argv)
    until = time.monotonic() + HANG_S
    while not _is_mounted(host.pid, homes, "fuse"):
        if not server.alive() or time.monotonic() > until:
            raise TargetError(
                f"no file system could be made to hang on {fault.node}",
                where=str(nodes.log(fault.node)),
                hint="the kernel needs FUSE",
            )
        time.sleep(0.01)
    server.close()


def _is_mounted(pid: int, path: str, kind: str | None = None) -> bool:
    written = path.replace(" ", "\\040")
    mounts = [line.split()[1:3] for line in (PROC / str(pid) / "mounts").read_text().splitlines()]
    return any(target == written and kind in (None, found) for target, found in mounts)


def unhang(nodes: NodeAccess, fault: FaultRecord) -> None:
    """End the server, so that waiting processes get an error, and unmount it."""
    server = [str(SERVER), str(nodes.homes), fault.mark]
    end(find(lambda pid: arguments(pid)[-3:] == server))
    while _is_mounted(nodes.host(fault.node).pid, str(nodes.homes), "fuse"):
        in_mounts(nodes, fault.node, ["umount", "-l", "-c", str(nodes.homes)]).checked()


def silence_munge(nodes: NodeAccess, fault: FaultRecord) -> None:
    """Mount something over munge's socket that is no socket."""
    if not _is_covered(nodes, fault.node):
        in_mounts(nodes, fault.node, ["mount", "--bind", "/dev/null", str(nodes.munge_socket)]).checked()


def wake_munge(nodes: NodeAccess, fault: FaultRecord) -> None:
    if _is_covered(nodes, fault.node):
        in_mounts(nodes, fault.node, ["umount", "-l", str(nodes.munge_socket)]).checked()


def _is_covered(nodes: NodeAccess, node: str) -> bool:
    return _is_mounted(nodes.host(node).pid, str(nodes.munge_socket))
