"""Questions that may hang for ever, asked in processes of their own: a dead NFS server holds whoever asks.

A process that sleeps in the kernel cannot be killed. It is left behind, and until it has ended the same question is
answered at once: it still hangs.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import select
import shlex
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Generic, TypeVar

from dalsegno.system.machine import program
from dalsegno.system.processes import Completed

# ---- A part of a program in a process of its own: it may hang, grow or die, and be killed, and never outlives the
# program.


_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


@dataclass(eq=False)
class Forked:
    """The other process. `sock` speaks to it, does not block, and ends when it does."""

    pid: int
    sock: socket.socket

    def kill(self) -> None:
        """End it and all that it has started, whatever it does; one that has ended is fine."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self.sock.close()

    def wait(self, most_s: float) -> bool:
        """Whether it is gone for good, within this time."""
        with contextlib.suppress(ProcessLookupError):
            fd = os.pidfd_open(self.pid)
            try:
                select.select([fd], [], [], most_s)
            finally:
                os.close(fd)
        return self.ended()

    def ended(self) -> bool:
        """Whether it is gone for good. One that hangs in the kernel is not, though it was killed."""
        try:
            return os.waitpid(self.pid, os.WNOHANG)[0] == self.pid
        except ChildProcessError:
            return True


def fork(body: Callable[[socket.socket], None]) -> Forked:
    """Run `body` in a process of its own, with nothing open but the standard streams and its end of a socket."""
    ours, theirs = socket.socketpair()
    parent = os.getpid()
    gc.freeze()  # nothing of ours is to be tidied up over there
    pid = os.fork()
    if pid == 0:
        _live(body, theirs, parent)
    gc.unfreeze()
    theirs.close()
    with contextlib.suppress(PermissionError):  # it has done so itself by now
        os.setpgid(pid, pid)
    ours.setblocking(False)
    return Forked(pid, ours)


def _live(body: Callable[[socket.socket], None], sock: socket.socket, parent: int) -> None:
    code = 1
    try:
        os.setpgid(0, 0)
        die_with_parent(parent)
        _close_all_but(sock.fileno())
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        body(sock)
        code = 0
    except BaseException:  # whatever it is, this copy must not go on as if it were the program
        import traceback

        with contextlib.suppress(Exception):
            os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def die_with_parent(parent: int) -> None:
    """Be killed when the process that started this one ends, however it does."""
    _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)  # it ended before we asked


def _close_all_but(kept: int) -> None:
    import resource  # not on Windows, where this module is imported too

    most = min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 1 << 16)
    os.closerange(3, kept)
    os.closerange(kept + 1, most)


# ---- Questions that may hang for ever, asked in processes of their own: a dead NFS server holds whoever asks.


class NoAnswer(Exception):
    """A question that was not answered: why."""


class Late(NoAnswer):
    """No answer within its time."""


_stuck: dict[tuple[str, ...], subprocess.Popen[str]] = {}


def ask(
    argv: Sequence[str], *, stdin: str | None = None, env: Mapping[str, str] | None = None, timeout_s: float = 5.0
) -> Completed:
    """Run a command to its end; NoAnswer if it is not there, Late if it takes longer than this."""
    key = tuple(argv)
    _leave_ended()
    if key in _stuck:
        raise Late(f"`{shlex.join(argv)}` still hangs from before")
    process = _start(argv, stdin, env)
    try:
        stdout, stderr = process.communicate(stdin, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        _abandon(key, process)
        raise Late(f"`{shlex.join(argv)}` gave no answer within {timeout_s:g} s") from None
    return Completed(key, process.returncode, stdout, stderr)


def pace_s(env: Mapping[str, str] | None = None, most_s: float = 1.0) -> float:
    """How long a program that does nothing takes now, at most `most_s`: what a slow machine does, it does slowly."""
    began = time.monotonic()
    with contextlib.suppress(Late):
        ask(("true",), env=env, timeout_s=most_s)
    return time.monotonic() - began


USUAL_PACE_S = 0.02  # a quiet machine takes 2 to 5 ms; a busy one is given its limits as they are
MOST_PATIENT = 30.0


@cache
def slowness() -> float:
    """Return how many times longer than usual this machine takes, from 1 to 30, measured once, to scale time limits.

    A limit is there to end a wait for something that will not happen. On a machine that does everything more slowly, a
    healthy daemon needs more time by the same factor.
    """
    return slowness_at(min(pace_s(most_s=5.0) for _ in range(3)))


def slowness_at(pace: float) -> float:
    return min(max(pace / USUAL_PACE_S, 1.0), MOST_PATIENT)


def _start(argv: Sequence[str], stdin: str | None, env: Mapping[str, str] | None) -> subprocess.Popen[str]:
    path = program(argv[0])
    if path is None:
        raise NoAnswer(f"`{argv[0]}` is not on this machine")
    source = subprocess.DEVNULL if stdin is None else subprocess.PIPE
    try:
        return subprocess.Popen(
            [path, *argv[1:]],
            stdin=source,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=env,
            start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid()),  # who asks may be killed: nothing is to stay behind
        )
    except OSError as error:
        raise NoAnswer(f"`{argv[0]}` cannot be started: {error.strerror or error}") from error


def _abandon(key: tuple[str, ...], process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(0.2)
    if process.returncode is None:
        _stuck[key] = process


def _leave_ended() -> None:
    for key in [key for key, process in _stuck.items() if process.poll() is not None]:
        del _stuck[key]


# ---- Calls into libraries that may hang, waited for only so long.


_T = TypeVar("_T")


class Patient(Generic[_T]):
    """Calls one function in a thread. One that hangs is left, and until it has come back nobody is sent after it."""

    def __init__(self, what: str, call: Callable[[], _T]) -> None:
        self._what, self._call = what, call
        self._thread: threading.Thread | None = None

    def within(self, timeout_s: float) -> _T:
        """Its value or its exception; Late if it takes longer."""
        if self._thread is not None and self._thread.is_alive():
            raise Late(f"{self._what} still hangs from before")
        came: list[_T] = []
        failed: list[Exception] = []

        def go() -> None:
            try:
                came.append(self._call())
            except Exception as error:  # it is the caller's, and is raised there
                failed.append(error)

        self._thread = threading.Thread(target=go, daemon=True, name=self._what)
        self._thread.start()
        self._thread.join(timeout_s)
        if failed:
            raise failed[0]
        if not came:
            raise Late(f"{self._what} gave no answer within {timeout_s:g} s")
        return came[0]
