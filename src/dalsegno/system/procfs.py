"""Finding and ending processes by what /proc says of them: a PID with its start time, or a mark in the environment."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
MARK = "DALSEGNO_MARK"  # set to the cluster's state folder in everything that a cluster starts


@dataclass(frozen=True)
class Process:
    """A process that cannot be mistaken for a later one with the same PID."""

    pid: int
    start: int

    def alive(self) -> bool:
        return self.pid > 0 and start_ticks(self.pid) == self.start


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if there is none, or only its zombie."""
    try:
        fields = (PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()  # a name may be any bytes
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def find(matches: Callable[[int], bool]) -> list[Process]:
    """All living processes for which `matches(pid)` holds."""
    found = []
    for name in os.listdir(PROC):
        if name.isdigit() and matches(int(name)):
            start = start_ticks(int(name))
            if start is not None:
                found.append(Process(int(name), start))
    return found


def marked(mark: str) -> list[Process]:
    """Every process that was started with this mark in its environment."""
    entry = f"{MARK}={mark}".encode()
    return find(lambda pid: entry in environment(pid))


def environment(pid: int) -> list[bytes]:
    """A process's environment as it was given to it; empty where we may not look."""
    try:
        return (PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return []


def owner(pid: int) -> int | None:
    """The uid it runs as."""
    try:
        return os.stat(PROC / str(pid)).st_uid
    except OSError:
        return None


def arguments(pid: int) -> list[str]:
    try:
        return (PROC / str(pid) / "cmdline").read_text(errors="replace").split("\0")[:-1]
    except OSError:
        return []


def mapped(pid: int) -> bytes:
    """What of files is in its memory, as the kernel lists it; empty where we may not look."""
    try:
        return (PROC / str(pid) / "maps").read_bytes()
    except OSError:
        return b""


def descendants(pid: int) -> list[int]:
    """Children, their children and so on, nearest first."""
    found = [pid]
    for parent in found:
        with contextlib.suppress(OSError):
            for task in os.listdir(PROC / str(parent) / "task"):
                found += [int(child) for child in (PROC / str(parent) / "task" / task / "children").read_text().split()]
    return found[1:]


def ancestors(pid: int) -> list[int]:
    """The parent, its parent and so on, as far as can be seen from here."""
    found: list[int] = []
    while (pid := _parent(pid)) > 0 and pid not in found:
        found.append(pid)
    return found


def _parent(pid: int) -> int:
    try:
        return int((PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()[1])
    except OSError:
        return 0


def send(process: Process, number: signal.Signals) -> None:
    """Signal a process if it still lives."""
    if process.alive():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def end(processes: Iterable[Process], timeout_s: float = 10.0) -> list[Process]:
    """Kill at once and wait until they are gone; returns those that are still there."""
    return _signal_and_wait(processes, signal.SIGKILL, timeout_s)


def stop(processes: Iterable[Process], grace_s: float = 5.0) -> list[Process]:
    """Ask them to end, so that they save what they have to; kill those that have not after the grace."""
    return end(_signal_and_wait(processes, signal.SIGTERM, grace_s))


def _signal_and_wait(processes: Iterable[Process], number: signal.Signals, timeout_s: float) -> list[Process]:
    left = [process for process in processes if process.alive()]
    for process in left:
        send(process, number)
    until = time.monotonic() + timeout_s
    while left and time.monotonic() < until:
        time.sleep(0.005)
        left = [process for process in left if process.alive()]
    return left
