"""Run commands and calls that may hang forever, for example on a dead NFS server, in separate processes or threads.

A process that sleeps in the kernel cannot be killed. It is abandoned. Until it has ended, the same command fails at
once.
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

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


@dataclass(eq=False)
class Forked:
    """A forked process. `sock` is a non-blocking socket to the process; its other end closes when the process ends."""

    pid: int
    sock: socket.socket

    def kill(self) -> None:
        """Kill the process and its children, if they are still alive."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self.sock.close()

    def wait(self, most_s: float) -> bool:
        """Wait at most this long for the process to end; return whether it has ended."""
        with contextlib.suppress(ProcessLookupError):
            fd = os.pidfd_open(self.pid)
            try:
                select.select([fd], [], [], most_s)
            finally:
                os.close(fd)
        return self.ended()

    def ended(self) -> bool:
        """Return whether the process has ended.

        A process that hangs in the kernel has not ended, even if it was killed.
        """
        try:
            return os.waitpid(self.pid, os.WNOHANG)[0] == self.pid
        except ChildProcessError:
            return True


def fork(body: Callable[[socket.socket], None]) -> Forked:
    """Run `body` in a forked process, with only the standard streams and its end of a socket open."""
    ours, theirs = socket.socketpair()
    parent = os.getpid()
    gc.freeze()  # the child must not finalize the parent's objects
    pid = os.fork()
    if pid == 0:
        _run_child(body, theirs, parent)
    gc.unfreeze()
    theirs.close()
    with contextlib.suppress(PermissionError):  # the child may have called setpgid already
        os.setpgid(pid, pid)
    ours.setblocking(False)
    return Forked(pid, ours)


def _run_child(body: Callable[[socket.socket], None], sock: socket.socket, parent: int) -> None:
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
    except BaseException:  # after any error, this forked child must not return into the parent's code
        import traceback

        with contextlib.suppress(Exception):
            os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)  # the parent ended before the request took effect


def _close_all_but(kept: int) -> None:
    import resource  # imported here, because Windows does not have this module

    most = min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 1 << 16)
    os.closerange(3, kept)
    os.closerange(kept + 1, most)


class NoAnswer(Exception):
    """A command or call gave no answer. The message says why."""


class TooLate(NoAnswer):
    """A command or call gave no answer in time."""


class TooMuch(NoAnswer):
    """A command printed more than the limit."""


_stuck: dict[tuple[str, ...], subprocess.Popen[str]] = {}


def ask(
    argv: Sequence[str],
    *,
    stdin: str | None = None,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 5.0,
    most_bytes: int | None = None,
) -> Completed:
    """Run a command to its end. Raise NoAnswer if the program does not exist, TooLate if it does not end in time.

    With `most_bytes`, raise TooMuch if the command prints more. Such a command gets no input.
    """
    key = tuple(argv)
    _forget_ended()
    if key in _stuck:
        raise TooLate(f"`{shlex.join(argv)}` still hangs from an earlier call")
    process = _start(argv, stdin, env)
    try:
        if most_bytes is None:
            stdout, stderr = process.communicate(stdin, timeout=timeout_s)
        else:
            stdout, stderr = _read_bounded(process, timeout_s, most_bytes)
    except subprocess.TimeoutExpired:
        _abandon(key, process)
        raise TooLate(f"`{shlex.join(argv)}` gave no answer within {timeout_s:g} s") from None
    except TooMuch:
        _abandon(key, process)
        raise
    return Completed(key, process.returncode, stdout, stderr)


def _read_bounded(process: subprocess.Popen[str], timeout_s: float, most_bytes: int) -> tuple[str, str]:
    """Return the output of a process after its end, decoded like that of `communicate`."""
    assert process.stdout and process.stderr
    deadline = time.monotonic() + timeout_s
    parts = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
    waiting = list(parts)
    while waiting:
        ready, _, _ = select.select(waiting, [], [], max(deadline - time.monotonic(), 0.0))
        if not ready:
            raise subprocess.TimeoutExpired(process.args, timeout_s)
        for number in ready:
            data = os.read(number, 1 << 16)
            if not data:
                waiting.remove(number)
            parts[number] += data
        if sum(map(len, parts.values())) > most_bytes:
            raise TooMuch(f"it printed more than {most_bytes:,} bytes")
    process.wait(max(deadline - time.monotonic(), 0.0))
    stdout, stderr = (part.decode(errors="replace").replace("\r\n", "\n") for part in parts.values())
    process.stdout.close()
    process.stderr.close()
    return stdout, stderr


def pace_s(env: Mapping[str, str] | None = None, most_s: float = 1.0) -> float:
    """Run `true` and return how long that took, at most `most_s`, as a measure of the machine's speed."""
    began = time.monotonic()
    with contextlib.suppress(TooLate):
        ask(("true",), env=env, timeout_s=most_s)
    return time.monotonic() - began


USUAL_PACE_S = 0.02  # `true` takes 2 to 5 ms on an idle machine; up to this value, limits are not scaled
MAX_SLOWNESS = 30.0


@cache
def slowness() -> float:
    """Return how many times slower than usual this machine is, from 1 to 30. The factor is measured once.

    Time limits are multiplied by this factor, because a healthy daemon on a slow machine needs more time.
    """
    return slowness_at(min(pace_s(most_s=5.0) for _ in range(3)))


def slowness_at(pace: float) -> float:
    return min(max(pace / USUAL_PACE_S, 1.0), MAX_SLOWNESS)


def _start(argv: Sequence[str], stdin: str | None, env: Mapping[str, str] | None) -> subprocess.Popen[str]:
    path = program(argv[0])
    if path is None:
        raise NoAnswer(f"`{argv[0]}` is not installed")
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
            preexec_fn=partial(die_with_parent, os.getpid()),  # the command must not outlive the caller
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


def _forget_ended() -> None:
    for key in [key for key, process in _stuck.items() if process.poll() is not None]:
        del _stuck[key]


_T = TypeVar("_T")


class AbandonableCall(Generic[_T]):
    """Calls one function in a thread. A call that hangs is abandoned, and no other call is started until it returns."""

    def __init__(self, what: str, call: Callable[[], _T]) -> None:
        self._what, self._call = what, call
        self._thread: threading.Thread | None = None

    def within(self, timeout_s: float) -> _T:
        """Return the function's value or raise its exception. Raise TooLate if this or an earlier call hangs."""
        if self._thread is not None and self._thread.is_alive():
            raise TooLate(f"{self._what} still hangs from an earlier call")
        came: list[_T] = []
        failed: list[Exception] = []

        def go() -> None:
            try:
                came.append(self._call())
            except Exception as error:  # raised again in the calling thread
                failed.append(error)

        self._thread = threading.Thread(target=go, daemon=True, name=self._what)
        self._thread.start()
        self._thread.join(timeout_s)
        if failed:
            raise failed[0]
        if not came:
            raise TooLate(f"{self._what} gave no answer within {timeout_s:g} s")
        return came[0]
