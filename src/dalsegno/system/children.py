"""Find, start and end long-lived processes, which outlive the process that started them."""

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

PROC = Path("/proc")
MARK = "DALSEGNO_MARK"  # set to the cluster's state folder in every process of a cluster


@dataclass(frozen=True)
class Process:
    """A process, identified by PID and start time, so that a later one with the same PID is not mistaken for it."""

    pid: int
    start: int

    def alive(self) -> bool:
        return self.pid > 0 and start_ticks(self.pid) == self.start


def start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None if it does not exist or is a zombie."""
    try:
        # Parse from the end, because the process name may contain any bytes.
        fields = (PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def find(matches: Callable[[int], bool]) -> list[Process]:
    """Return all live processes for which `matches(pid)` is true."""
    found = []
    for name in os.listdir(PROC):
        if name.isdigit() and matches(int(name)):
            start = start_ticks(int(name))
            if start is not None:
                found.append(Process(int(name), start))
    return found


def marked(mark: str) -> list[Process]:
    """Return every process that was started with this mark in its environment."""
    entry = f"{MARK}={mark}".encode()
    return find(lambda pid: entry in environment(pid))


def environment(pid: int) -> list[bytes]:
    """Return the initial environment of a process; empty if this process may not read it."""
    try:
        return (PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return []


def owner(pid: int) -> int | None:
    """Return the uid of a process; None if it does not exist."""
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
    """Return the text of /proc/PID/maps; empty if this process may not read it."""
    try:
        return (PROC / str(pid) / "maps").read_bytes()
    except OSError:
        return b""


def descendants(pid: int) -> list[int]:
    """Return the children, their children and so on, nearest first."""
    found = [pid]
    for parent in found:
        with contextlib.suppress(OSError):
            for task in os.listdir(PROC / str(parent) / "task"):
                found += [int(child) for child in (PROC / str(parent) / "task" / task / "children").read_text().split()]
    return found[1:]


def ancestors(pid: int) -> list[int]:
    """Return the parent, its parent and so on, as far as they are visible in this PID namespace."""
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
    """Signal a process if it is still alive."""
    if process.alive():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def end(processes: Iterable[Process], timeout_s: float = 10.0) -> list[Process]:
    """Kill processes and wait for them to end. Return the processes that are still alive."""
    return _signal_and_wait(processes, signal.SIGKILL, timeout_s)


def stop(processes: Iterable[Process], grace_s: float = 5.0) -> list[Process]:
    """Terminate processes, and kill them if they are alive after the grace period.

    Return the processes that are still alive.
    """
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


@dataclass(frozen=True)
class Identity:
    """The user of a new process: uid, gid, and all groups."""

    uid: int
    gid: int
    groups: tuple[int, ...] = ()


@dataclass
class Child:
    """A process started by this process or by an earlier instance of it.

    `fd` becomes readable when the process has ended.
    """

    process: Process
    fd: int
    popen: subprocess.Popen[bytes] | None = None  # None if another process started it; its exit code is then unknown

    def poll(self) -> int | None:
        """Return the exit code (negative for a signal); None while the process runs or if the code is unknown."""
        return self.popen.poll() if self.popen else None

    def alive(self) -> bool:
        return self.poll() is None and self.process.alive()

    def kill(self) -> None:
        """Kill the process and its process group."""
        if self.alive():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


_USUAL_FILES = 0  # the limit on open files before `allow_many_files` raised it; 0 if it was not raised


def allow_many_files(most: int = 1 << 16) -> None:
    """Raise this process's limit on open files.

    Its child processes get the previous limit, because Slurm would pass a raised limit on to every task.
    """
    import resource  # Windows does not have this module

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
    errors: Path | None = None,
    identity: Identity | None = None,
) -> Child:
    """Start a process in its own session.

    It reads `stdin`, by default /dev/null. Its output is appended to the file `output`, and its standard error to the
    file `errors`, or to `output` without `errors`. Without these files, both go to the streams of this process.
    """
    source = os.open(stdin or os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    target, complaints = _open_log(output), _open_log(errors)
    try:
        popen = subprocess.Popen(
            list(argv),
            env=dict(env),
            cwd=cwd,
            stdin=source,
            stdout=target,
            stderr=target if complaints is None else complaints,
            start_new_session=True,
            user=identity.uid if identity else None,
            group=identity.gid if identity else None,
            extra_groups=identity.groups if identity else None,
        )
    except OSError as error:
        raise _cannot_start(argv[0], error) from error
    finally:
        for handle in (source, target, complaints):
            if handle is not None:
                os.close(handle)
    _restore_file_limit(popen.pid)
    return Child(Process(popen.pid, start_ticks(popen.pid) or 0), os.pidfd_open(popen.pid), popen)


def _open_log(path: Path | None) -> int | None:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644) if path else None


def _restore_file_limit(pid: int) -> None:
    if _USUAL_FILES:
        import resource

        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        with contextlib.suppress(OSError):  # the process may have ended already
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (_USUAL_FILES, most))


def _cannot_start(program: str, error: OSError) -> DalsegnoError:
    hint = f"check that it exists and that you may run it: `ls -l {program}`"
    if error.errno in (errno.EAGAIN, errno.ENOMEM):
        hint = "the limit on processes or memory is reached: see `free` and `ulimit -u`"
    what = f"`{program}` cannot be started: {error.strerror or error}"
    return DalsegnoError(what, where=str(error.filename or ""), hint=hint)


def adopt(process: Process) -> Child | None:
    """Return a handle to a process that an earlier instance of this program started; None if the process has ended."""
    try:
        fd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    if process.alive():
        return Child(process, fd)
    os.close(fd)
    return None
