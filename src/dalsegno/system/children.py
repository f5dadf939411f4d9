"""Long-lived processes that outlive whoever started them: own sessions, no pipes, ends that can be waited for."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dalsegno.errors import DalsegnoError

# ---- Finding and ending processes by what /proc says of them: a PID with its start time, or a mark in the
# environment.


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


# ---- Long-lived processes that outlive whoever started them: own sessions, no pipes, ends that can be waited for.


@dataclass(frozen=True)
class Identity:
    """Whom a process shall be: uid, gid, and all groups."""

    uid: int
    gid: int
    groups: tuple[int, ...] = ()


@dataclass
class Child:
    """A process that was started here, or by a former self. `fd` becomes readable when it has ended."""

    process: Process
    fd: int
    popen: subprocess.Popen[bytes] | None = None  # None: not our own child, so its exit code is not ours to know

    def poll(self) -> int | None:
        """Its exit code (negative: a signal's number), or None while it runs; also None where it cannot be known."""
        return self.popen.poll() if self.popen else None

    def alive(self) -> bool:
        return self.poll() is None and self.process.alive()

    def kill(self) -> None:
        """End it and all of its session's first group."""
        if self.alive():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


_USUAL_FILES = 0  # how many files this process could have open before it asked for more; 0: it did not


def allow_many_files(most: int = 1 << 16) -> None:
    """As many open files and connections as this process may have. Those that it starts get what is usual: Slurm would
    pass it on to every task."""
    import resource  # not on Windows

    global _USUAL_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most if hard == resource.RLIM_INFINITY else min(hard, most)
    if soft < wanted:
        _USUAL_FILES = soft
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def start(
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    cwd: str = "/",
    stdin: Path | None = None,
    output: Path | None = None,
    identity: Identity | None = None,
) -> Child:
    """Start a process in a session of its own. Its output is appended to a file, or goes where ours goes."""
    source = os.open(stdin or os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    target = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644) if output else None
    try:
        popen = subprocess.Popen(
            list(argv),
            env=dict(env),
            cwd=cwd,
            stdin=source,
            stdout=target,
            stderr=target,
            start_new_session=True,
            user=identity.uid if identity else None,
            group=identity.gid if identity else None,
            extra_groups=identity.groups if identity else None,
        )
    except OSError as error:
        raise _cannot_start(argv[0], error) from error
    finally:
        os.close(source)
        if target is not None:
            os.close(target)
    _give_usual_files(popen.pid)
    return Child(Process(popen.pid, start_ticks(popen.pid) or 0), os.pidfd_open(popen.pid), popen)


def _give_usual_files(pid: int) -> None:
    if _USUAL_FILES:
        import resource

        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        with contextlib.suppress(OSError):  # it has ended already
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (_USUAL_FILES, most))


def _cannot_start(program: str, error: OSError) -> DalsegnoError:
    hint = f"`ls -l {program}` shows whether it is there, and who may run it"
    if error.errno in (errno.EAGAIN, errno.ENOMEM):
        hint = "there is no room for another process of this user: see `free` and `ulimit -u`"
    what = f"`{program}` cannot be started: {error.strerror or error}"
    return DalsegnoError(what, where=str(error.filename or ""), hint=hint)


def adopt(process: Process) -> Child | None:
    """A hold on a process that a former self started; None if it is gone."""
    try:
        fd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    if process.alive():
        return Child(process, fd)
    os.close(fd)
    return None
