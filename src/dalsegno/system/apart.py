"""Questions that may hang for ever, asked in processes of their own: a dead NFS server holds whoever asks.

A process that sleeps in the kernel cannot be killed. It is left behind, and until it has ended the same question is
answered at once: it still hangs.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from functools import cache, partial

from dalsegno.system.forked import die_with_parent
from dalsegno.system.machine import program
from dalsegno.system.processes import Completed


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
