"""A part of a program in a process of its own: it may hang, grow or die, and be killed, and never outlives the program.

Only for programs with one thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import select
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass

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
    most = min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 1 << 16)
    os.closerange(3, kept)
    os.closerange(kept + 1, most)
