"""Network links, routes, free subnets and free ports."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import socket
import struct
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from dalsegno.system.processes import Runner

NFS_PROGRAM = 100003  # number of NFS in Sun RPC
LAST_FRAGMENT = 1 << 31


def run_ip(runner: Runner, lines: Sequence[str], inside: int | None = None) -> None:
    """Run `ip` commands in one process, on the machine or in the network namespace of process `inside`."""
    if lines:
        enter = ["nsenter", "-t", str(inside), "-n"] if inside else []
        runner.run([*enter, "ip", "-batch", "-"], stdin="\n".join(lines) + "\n", timeout_s=60).checked()


def reaches_beyond() -> bool:
    """Return whether this host has a route to networks other than its own."""
    texts = []
    for name in ("route", "ipv6_route"):
        with contextlib.suppress(OSError):  # `ipv6_route` is missing if the kernel has no IPv6
            texts.append(Path("/proc/net", name).read_text())
    return has_default_route("".join(texts))


def has_default_route(text: str) -> bool:
    """Return whether the text of /proc/net/route or ipv6_route has a default route other than the kernel's on `lo`."""
    for words in map(str.split, text.splitlines()):
        four, six = words[1:2] == ["0" * 8] and words[7:8] == ["0" * 8], words[:2] == ["0" * 32, "00"]
        if (four or six) and "lo" not in (words[0], words[-1]):
            return True
    return False


def link_names(runner: Runner, inside: int | None = None) -> set[str]:
    enter = ["nsenter", "-t", str(inside), "-n"] if inside else []
    links = json.loads(runner.run([*enter, "ip", "-j", "link"], timeout_s=30).checked().stdout or "[]")
    return {str(link["ifname"]) for link in links}


def used_networks(runner: Runner) -> list[ipaddress.IPv4Network]:
    """Return the destination networks of this machine's routes, without the default route."""
    routes = json.loads(
        runner.run(["ip", "-j", "-4", "route", "show", "table", "all"], timeout_s=30).checked().stdout or "[]"
    )
    found = []
    for route in routes:
        try:
            network = ipaddress.IPv4Network(str(route.get("dst", "")), strict=False)
        except ValueError:
            continue  # the route is "default", or has no network
        if network.prefixlen > 0:
            found.append(network)
    return found


def has_address() -> bool:
    """Return whether an interface other than loopback has an IPv4 address. Without one, Slurm's daemons exit."""
    try:
        return bool(socket.getaddrinfo(None, 1, socket.AF_INET, flags=socket.AI_ADDRCONFIG | socket.AI_PASSIVE))
    except OSError:
        return False


def port_is_free(port: int) -> bool:
    """Return whether a TCP listener could be opened on this port now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as Slurm's daemons do
        try:
            sock.bind(("0.0.0.0", port))
        except OSError:
            return False
    return True


def nfs_answers(address: str, port: int, version: int, timeout_s: float) -> bool:
    """Return whether an NFS server answers its protocol's NULL request over TCP, whatever the answer is.

    The kernel of a server whose NFS daemons hang still accepts connections, so a connection alone proves nothing.
    """
    until = time.monotonic() + timeout_s
    call = struct.pack("!10I", 1, 0, 2, NFS_PROGRAM, version, 0, 0, 0, 0, 0)  # no credentials and no arguments
    try:
        with socket.create_connection((address, port), timeout_s) as sock:
            sock.sendall(struct.pack("!I", LAST_FRAGMENT | len(call)) + call)
            sock.settimeout(max(until - time.monotonic(), 0.01))
            return bool(sock.recv(64))
    except OSError:
        return False


def first_free_run(count: int, start: int, stop: int, taken: Iterable[int] = ()) -> int | None:
    """Return the first of `count` consecutive free ports; None if there is no such range."""
    busy = set(taken)
    run = 0
    for port in range(start, stop):
        run = run + 1 if port not in busy and port_is_free(port) else 0
        if run == count:
            return port - count + 1
    return None


def listen_at(path: Path, mode: int) -> socket.socket:
    """Return a listening socket whose file has this mode from the start.

    An existing file at this path, such as the socket file of a dead process, is removed first.
    """
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o777 & ~mode)
    try:
        sock.bind(str(path))
    finally:
        os.umask(before)
    sock.listen(1024)
    return sock
