"""Run a program as a child process that takes the place of this one.

The child shares this process's streams, terminal and process group. Signals are forwarded to the child, and this
process ends in the same way as the child.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

from dalsegno.system.hanging_calls import die_with_parent

_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGINT)
_PASSED_ON = (*_ENDING, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)
_INTERRUPT_S = 5.0  # a SIGINT counts as a request to end only if the program ends within this time


@dataclass(frozen=True)
class ProgramEnd:
    """The result of a program: its exit code, its notes, and whether a signal asked it to end.

    The exit code is negative if a signal ended the program. `hung_up` is true after a SIGHUP that did not come from the
    terminal.
    """

    code: int
    notes: str = ""
    asked: bool = False
    hung_up: bool = False


class ProcessWrapper:
    """Runs a program in place of this process.

    This process must be single-threaded, because signals are blocked and waited for.
    """

    def __init__(self, poll_s: float = 5.0) -> None:
        self._poll_s = poll_s
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # `nohup` and `&` start a program with some signals ignored. These signals stay ignored.
        ignored = {each for each in _PASSED_ON if signal.getsignal(each) is signal.SIG_IGN}
        self._ending = set(_ENDING) - ignored
        self._handled = {*_PASSED_ON, signal.SIGCHLD} - ignored
        signal.pthread_sigmask(signal.SIG_BLOCK, self._handled)

    def run(
        self, program: str, argv: Sequence[str], env: Mapping[str, str], notes: str, over: Callable[[str], bool]
    ) -> ProgramEnd:
        """Run the program to its end, or kill it when `over` returns true twice in a row.

        `over` is called at intervals with the program's notes. The program may write notes to a file descriptor, whose
        number is in the environment variable named `notes`.
        """
        reader, writer = os.pipe()
        os.set_blocking(reader, False)  # do not wait for a background process that keeps the other end open
        child = subprocess.Popen(
            list(argv),
            executable=program,
            env={**env, notes: str(writer)},
            pass_fds=(writer,),
            preexec_fn=partial(_prepare_child, os.getpid()),
        )
        os.close(writer)
        try:
            return self._watch(child, reader, over)
        finally:
            os.close(reader)

    def pause(self, seconds: float) -> bool:
        """Wait. Return whether this process was asked to end in the meantime."""
        return signal.sigtimedwait(self._ending, seconds) is not None

    def _watch(self, child: subprocess.Popen[bytes], reader: int, over: Callable[[str], bool]) -> ProgramEnd:
        noted, hangs, next_poll = "", 0, time.monotonic() + self._poll_s
        requests = _EndRequests()
        while child.poll() is None:
            received = signal.sigtimedwait(self._handled, max(0.0, next_poll - time.monotonic()))
            if received is None:
                noted, next_poll = noted + _read(reader), time.monotonic() + self._poll_s
                hangs = hangs + 1 if over(noted) else 0
                if hangs == 2:
                    child.kill()
                    child.wait()
                    return requests.at_the_end(1, noted)
            elif received.si_signo != signal.SIGCHLD:
                requests.add(received)
                if not _from_terminal(received):  # the terminal has already signalled the child
                    child.send_signal(received.si_signo)
        return requests.at_the_end(child.returncode, noted + _read(reader))


class _EndRequests:
    """The received signals that asked this process to end."""

    def __init__(self) -> None:
        self._asked = self._hung_up = False
        self._interrupted_at = 0.0

    def add(self, received: signal.struct_siginfo) -> None:
        if received.si_signo == signal.SIGINT:
            self._interrupted_at = time.monotonic()
        elif received.si_signo == signal.SIGHUP and not _from_terminal(received):
            self._hung_up = True
        elif received.si_signo in _ENDING:
            self._asked = True

    def at_the_end(self, code: int, notes: str) -> ProgramEnd:
        interrupted = self._interrupted_at > 0 and time.monotonic() - self._interrupted_at < _INTERRUPT_S
        return ProgramEnd(code, notes, self._asked or interrupted, self._hung_up)


def _from_terminal(received: signal.struct_siginfo) -> bool:
    return received.si_code > 0


def _read(reader: int) -> str:
    try:
        return os.read(reader, 1 << 16).decode(errors="replace")
    except BlockingIOError:
        return ""


def end_as(code: int) -> NoReturn:
    """End this process as the program did: with its code, or by its signal."""
    if code < 0:
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)


def _prepare_child(parent: int) -> None:
    """Unblock all signals in the child, and have the kernel kill the child when its parent ends."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    die_with_parent(parent)
