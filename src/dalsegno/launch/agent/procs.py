"""What /proc says of processes on an agent's node. The agent stands on its own, in the oldest Python that is served."""

from __future__ import annotations

import contextlib
import os


def own_processes() -> list[int]:
    """All of the same user's but ourselves."""
    found = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == os.getuid() and int(name) != os.getpid():
                found.append(int(name))
    return found


def environment(pid: int) -> set[bytes]:
    """As it was given to it; empty where we may not look."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return set(file.read().split(b"\0"))
    except OSError:
        return set()


def children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/children") as file:
                found += map(int, file.read().split())
    return found


def below(pid: int) -> list[int]:
    """All living descendants; a zombie is no process any more, only a note of one."""
    found, ask = [], children(pid)
    while ask:
        child = ask.pop()
        ask += children(child)
        if not is_zombie(child):
            found.append(child)
    return found


def is_zombie(pid: int) -> bool:
    return _state(pid) in (b"", b"Z", b"X")


def is_stopped(pid: int) -> bool:
    """By a signal, until another lets it go on."""
    return _state(pid) == b"T"


def _state(pid: int) -> bytes:
    """As ps writes it; nothing of a process that is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0]
    except OSError:
        return b""


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for this signal: one that has none would only die of it."""
    try:
        with open(f"/proc/{pid}/status") as file:
            line = next(line for line in file if line.startswith("SigCgt:"))
    except (OSError, StopIteration):
        return False
    return bool(int(line.split()[1], 16) >> (number - 1) & 1)


def work_of(pid: int) -> tuple[float, int]:
    """Seconds of processor time of a process and all below it, those that have ended too; bytes read and written."""
    ticks, moved = 0, 0
    for each in (pid, *below(pid)):
        with contextlib.suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{each}/stat", "rb") as file:
                ticks += sum(map(int, file.read().rpartition(b")")[2].split()[11:15]))
            with open(f"/proc/{each}/io", "rb") as file:
                moved += sum(int(line.split()[1]) for line in file if line.startswith((b"rchar", b"wchar")))
    return ticks / os.sysconf("SC_CLK_TCK"), moved
