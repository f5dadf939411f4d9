"""Long-lived processes that outlive whoever started them: own sessions, no pipes, ends that can be waited for."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dalsegno.errors import DalsegnoError
from dalsegno.system.procfs import Process, start_ticks


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
