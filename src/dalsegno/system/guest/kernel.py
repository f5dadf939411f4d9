"""System calls that Python 3.10 does not provide: namespaces, mounts, host name, network setup."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import socket
import struct
import time

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWPID, CLONE_NEWNET, CLONE_NEWCGROUP = (
    0x00020000, 0x04000000, 0x08000000, 0x20000000, 0x40000000, 0x02000000,
)  # fmt: skip
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MS_NOSUID, MS_NODEV, MS_NOEXEC = 2, 4, 8
MNT_DETACH = 2
PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 15, 36

_libc = ctypes.CDLL(None, use_errno=True)


def unshare_all() -> None:
    """Enter new namespaces for mounts, host name, IPC, PIDs (of children) and network."""
    flags = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
    _check(_libc.unshare(flags), "unshare")


def unshare_cgroups() -> None:
    """Make the current cgroup the root for this process and its children."""
    _check(_libc.unshare(CLONE_NEWCGROUP), "unshare cgroups")


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    _check(_libc.mount(source.encode(), target.encode(), kind.encode(), flags, data.encode()), f"mount {target}")


def unmount(target: str) -> None:
    _check(_libc.umount2(target.encode(), MNT_DETACH), f"unmount {target}")


def set_hostname(name: str) -> None:
    _check(_libc.sethostname(name.encode(), len(name.encode())), "sethostname")


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent has ended."""
    _check(_libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl")


def name_process(name: str) -> None:
    """Set the name that `ps` and `top` show, at most 15 bytes."""
    _libc.prctl(PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


# The host's network is configured from inside: addresses by ioctl, routes by netlink.
SIOCSIFADDR, SIOCSIFNETMASK, SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8916, 0x891C, 0x8913, 0x8914, 1
# How long a host waits for its link. The limit is high, because links are created only after all hosts have booted. If
# `up` is killed, the next `up` ends the waiting hosts.
LINK_WAIT_S = 7200.0


def link_exists(name: str) -> bool:
    return name in (found for _, found in socket.if_nameindex())


def wait_for_link(name: str) -> None:
    """Wait for the interface, which the machine moves into the host's namespace."""
    until = time.monotonic() + LINK_WAIT_S
    while not link_exists(name):
        if time.monotonic() > until:
            raise OSError(errno.ETIMEDOUT, f"no interface {name} after {LINK_WAIT_S:.0f} s")
        time.sleep(0.002)


def link_up(name: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        answer = fcntl.ioctl(sock, SIOCGIFFLAGS, _request(name, b""))
        flags = struct.unpack_from("H", answer, 16)[0] | IFF_UP
        fcntl.ioctl(sock, SIOCSIFFLAGS, _request(name, struct.pack("H", flags)))


def give_address(name: str, cidr: str) -> None:
    """Set address and netmask and bring the interface up. Setting the same address again has no effect."""
    address, bits = cidr.split("/")
    mask = socket.inet_ntoa(_mask(int(bits)))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for request, value in ((SIOCSIFADDR, address), (SIOCSIFNETMASK, mask)):
            packed = struct.pack("HH4s8x", socket.AF_INET, 0, socket.inet_aton(value))
            fcntl.ioctl(sock, request, _request(name, packed))
    link_up(name)
    acknowledge_quickly(name, address, int(bits))


def acknowledge_quickly(name: str, address: str, bits: int) -> None:
    """Make TCP send acknowledgements without delay on this network.

    slurmdbd's protocol writes a length, waits for the acknowledgement, then writes a body. With the kernel's usual
    delay of 40 ms, one sacctmgr command takes 0.5 s; without the delay, it takes 0.01 s.
    """
    own = socket.inet_aton(address)
    network = bytes(a & b for a, b in zip(own, _mask(bits), strict=True))
    try:
        # Route to other hosts: table main, scope link, type unicast
        _replace_route(name, network, bits, own, table=254, scope=253, kind=1)
        # Route to itself: table local, scope host, type local
        _replace_route(name, own, 32, own, table=255, scope=254, kind=2)
    except OSError as error:
        # Slurm is slower without quick acknowledgement, but works.
        logging.getLogger("init").warning("quick acknowledgement not set: %s", error)


def quiet_ipv6() -> None:
    """Disable IPv6, because neighbour discovery on 64 new links would take longer than all other setup."""
    try:
        with open("/proc/sys/net/ipv6/conf/all/disable_ipv6", "w") as file:
            file.write("1")
    except OSError:
        pass  # this kernel has no IPv6


def _mask(bits: int) -> bytes:
    return struct.pack("!I", 0xFFFFFFFF << (32 - bits) & 0xFFFFFFFF)


def _request(name: str, payload: bytes) -> bytes:
    return struct.pack("16s24s", name.encode(), payload)


def _replace_route(name: str, target: bytes, bits: int, source: bytes, *, table: int, scope: int, kind: int) -> None:
    """Replace the kernel's own route with the same route plus the quickack metric (RTM_NEWROUTE over netlink)."""
    quickack = _attribute(15, struct.pack("I", 1))
    body = struct.pack("BBBBBBBBI", socket.AF_INET, bits, 0, 0, table, 2, scope, kind, 0)
    body += _attribute(1, target) + _attribute(4, struct.pack("I", socket.if_nametoindex(name)))
    body += _attribute(7, source) + _attribute(8, quickack)
    flags = 0x1 | 0x4 | 0x100 | 0x400  # flags: request, acknowledge, replace, create
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as sock:
        sock.sendto(struct.pack("IHHII", 16 + len(body), 24, flags, 1, 0) + body, (0, 0))
        failure = struct.unpack_from("i", sock.recv(4096), 16)[0]
    if failure:
        raise OSError(-failure, os.strerror(-failure))


def _attribute(number: int, value: bytes) -> bytes:
    return struct.pack("HH", 4 + len(value), number) + value
