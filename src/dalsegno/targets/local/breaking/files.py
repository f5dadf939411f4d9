"""A node's files: its own disk full, the shared folders silent, munge's socket dead. Only this node sees it."""

from __future__ import annotations

import sys
import time
from importlib import resources
from pathlib import Path

from dalsegno.errors import TargetError
from dalsegno.system.children import PROC, arguments, end, find, start
from dalsegno.targets.local.breaking.places import in_mounts
from dalsegno.targets.local.breaking.records import Injected
from dalsegno.targets.local.daemons import daemon_env
from dalsegno.targets.local.nodes import LocalNodes

FILLING = "full"
FILL = 'exec 2>/dev/null; cat /dev/zero > "$1"'
HANG_S = 10.0
SERVER = resources.files("dalsegno.targets.local.assets").joinpath("hanging_fs.py")


def fill(nodes: LocalNodes, fault: Injected) -> None:
    """To the last byte: it ends when nothing more can be written. Never the machine's own disk."""
    spool = str(nodes.folder.spool(fault.node))
    if not _is_mounted(nodes.host(fault.node).pid, spool, "tmpfs"):
        raise TargetError(f"{fault.node} has no disk of its own yet", hint="`inject power-off` and `up` give it one")
    in_mounts(nodes, fault.node, ["sh", "-c", FILL, "sh", str(_filling(nodes, fault))])


def empty(nodes: LocalNodes, fault: Injected) -> None:
    in_mounts(nodes, fault.node, ["rm", "-f", str(_filling(nodes, fault))]).checked()


def _filling(nodes: LocalNodes, fault: Injected) -> Path:
    return nodes.folder.spool(fault.node) / FILLING


def hang(nodes: LocalNodes, fault: Injected) -> None:
    """A FUSE file system over the home folders whose server never answers."""
    host, homes = nodes.host(fault.node), str(nodes.folder.homes)
    inside = ["nsenter", "-t", str(host.pid), "-m", "-p", "--"]
    argv = [*inside, sys.executable, "-I", "-S", str(SERVER), homes, fault.mark]
    log = nodes.folder.log(fault.node, "faults")
    with_server = start(argv, daemon_env(nodes.folder), output=log)
    until = time.monotonic() + HANG_S
    while not _is_mounted(host.pid, homes, "fuse"):
        if not with_server.alive() or time.monotonic() > until:
            raise TargetError(
                f"no file system could be made to hang on {fault.node}", where=str(log), hint="the kernel needs FUSE"
            )
        time.sleep(0.01)
    with_server.close()


def _is_mounted(pid: int, path: str, kind: str | None = None) -> bool:
    written = path.replace(" ", "\\040")
    mounts = [line.split()[1:3] for line in (PROC / str(pid) / "mounts").read_text().splitlines()]
    return any(target == written and kind in (None, found) for target, found in mounts)


def unhang(nodes: LocalNodes, fault: Injected) -> None:
    """Whoever waits gets an error when the server is dead; then the folders are as they were."""
    server = [str(SERVER), str(nodes.folder.homes), fault.mark]
    end(find(lambda pid: arguments(pid)[-3:] == server))
    while _is_mounted(nodes.host(fault.node).pid, str(nodes.folder.homes), "fuse"):
        in_mounts(nodes, fault.node, ["umount", "-l", "-c", str(nodes.folder.homes)]).checked()


def silence_munge(nodes: LocalNodes, fault: Injected) -> None:
    """Something that is no socket lies over munge's."""
    if not _is_covered(nodes, fault.node):
        in_mounts(nodes, fault.node, ["mount", "--bind", "/dev/null", str(nodes.folder.munge_socket)]).checked()


def wake_munge(nodes: LocalNodes, fault: Injected) -> None:
    if _is_covered(nodes, fault.node):
        in_mounts(nodes, fault.node, ["umount", "-l", str(nodes.folder.munge_socket)]).checked()


def _is_covered(nodes: LocalNodes, node: str) -> bool:
    return _is_mounted(nodes.host(node).pid, str(nodes.folder.munge_socket))
