"""The kernel's calls that Python 3.10 has no names for: namespaces, mounts, host name, process marks."""

from __future__ import annotations

import ctypes
import os

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWPID, CLONE_NEWNET, CLONE_NEWCGROUP = (
    0x00020000, 0x04000000, 0x08000000, 0x20000000, 0x40000000, 0x02000000,
)  # fmt: skip
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MS_NOSUID, MS_NODEV, MS_NOEXEC = 2, 4, 8
MNT_DETACH = 2
PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 15, 36

_libc = ctypes.CDLL(None, use_errno=True)


def unshare_all() -> None:
    """Mounts, host name, IPC, PIDs (of children) and network of our own."""
    flags = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
    _check(_libc.unshare(flags), "unshare")


def unshare_cgroups() -> None:
    """Make the cgroup that we are in the root of all that we and our children see."""
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
    """What `ps` and `top` show; cut to 15 letters."""
    _libc.prctl(PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
