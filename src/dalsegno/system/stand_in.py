"""Standing in a program's place: it runs as a child, and whoever speaks to us speaks to it.

Streams, terminal and process group are the child's too; signals are passed on, and its end becomes ours.
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

from dalsegno.system.apart import die_with_parent

_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGINT)
_PASSED_ON = (*_ENDING, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)
_INTERRUPT_S = 5.0  # a program may take one interrupt for a question, and live on


@dataclass(frozen=True)
class ProgramEnd:
    """How the program ended (negative: by that signal), what it noted, and whether somebody had asked it to end.

    `hung_up`: only by a hangup, and not the terminal's own.
    """

    code: int
    notes: str = ""
    asked: bool = False
    hung_up: bool = False


class StandIn:
    """Only for programs with one thread, from their start on: signals are waited for, not handled."""

    def __init__(self, look_every_s: float = 5.0) -> None:
        self._look_every_s = look_every_s
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        ignored = {each for each in _PASSED_ON if signal.getsignal(each) is signal.SIG_IGN}  # `nohup`, `&`
        self._ending = set(_ENDING) - ignored
        self._heard = {*_PASSED_ON, signal.SIGCHLD} - ignored
        signal.pthread_sigmask(signal.SIG_BLOCK, self._heard)

    def run(
        self, program: str, argv: Sequence[str], env: Mapping[str, str], notes: str, over: Callable[[str], bool]
    ) -> ProgramEnd:
        """Run it to its end, or until `over`, asked with its notes now and then, has said twice that it hangs.

        The variable `notes` tells it the descriptor on which it may note something for us.
        """
        reader, writer = os.pipe()
        os.set_blocking(reader, False)  # something that it leaves behind may hold the other end
        child = subprocess.Popen(
            list(argv),
            executable=program,
            env={**env, notes: str(writer)},
            pass_fds=(writer,),
            preexec_fn=partial(_be_itself, os.getpid()),
        )
        os.close(writer)
        try:
            return self._watch(child, reader, over)
        finally:
            os.close(reader)

    def pause(self, seconds: float) -> bool:
        """Whether somebody has asked us to end meanwhile."""
        return signal.sigtimedwait(self._ending, seconds) is not None

    def _watch(self, child: subprocess.Popen[bytes], reader: int, over: Callable[[str], bool]) -> ProgramEnd:
        noted, hangs, look_at = "", 0, time.monotonic() + self._look_every_s
        wishes = _Wishes()
        while child.poll() is None:
            told = signal.sigtimedwait(self._heard, max(0.0, look_at - time.monotonic()))
            if told is None:
                noted, look_at = noted + _read(reader), time.monotonic() + self._look_every_s
                hangs = hangs + 1 if over(noted) else 0
                if hangs == 2:
                    child.kill()
                    child.wait()
                    return wishes.at_the_end(1, noted)
            elif told.si_signo != signal.SIGCHLD:
                wishes.hear(told)
                if not _from_terminal(told):  # that, the child has had as well
                    child.send_signal(told.si_signo)
        return wishes.at_the_end(child.returncode, noted + _read(reader))


class _Wishes:
    """Who has asked for an end meanwhile."""

    def __init__(self) -> None:
        self._asked = self._hung_up = False
        self._interrupted_at = 0.0

    def hear(self, told: signal.struct_siginfo) -> None:
        if told.si_signo == signal.SIGINT:
            self._interrupted_at = time.monotonic()
        elif told.si_signo == signal.SIGHUP and not _from_terminal(told):
            self._hung_up = True
        elif told.si_signo in _ENDING:
            self._asked = True

    def at_the_end(self, code: int, notes: str) -> ProgramEnd:
        interrupted = self._interrupted_at > 0 and time.monotonic() - self._interrupted_at < _INTERRUPT_S
        return ProgramEnd(code, notes, self._asked or interrupted, self._hung_up)


def _from_terminal(told: signal.struct_siginfo) -> bool:
    return told.si_code > 0


def _read(reader: int) -> str:
    try:
        return os.read(reader, 1 << 16).decode(errors="replace")
    except BlockingIOError:
        return ""


def end_as(code: int) -> NoReturn:
    """End as the program did: with its code, or by its signal."""
    if code < 0:
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)


def _be_itself(parent: int) -> None:
    """In the child: nothing is blocked, and it does not outlive us."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    die_with_parent(parent)
