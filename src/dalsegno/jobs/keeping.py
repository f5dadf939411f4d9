"""In a batch step there is no controller: the step's first process keeps the coordinator, and starts it again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence

from dalsegno.system.children import Child, send, start

CRASHED = 70  # a coordinator's word for "not my run's fault, start me again"
SHORT_LIFE_S = 10.0
MOST_SHORT_LIVES = 8


def keep(argv: Sequence[str]) -> int:
    """Run the coordinator until it ends by itself; its code is the run's. Once Slurm ends the step, it is let go.

    Slurm's signals are for the coordinator, not for us: they are passed on from before the first one is started.
    """
    caught: list[int] = []
    living: list[Child] = []

    def pass_on(number: int, _: object) -> None:
        caught.append(number)
        _send(living, number)

    for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
        signal.signal(number, pass_on)
    short = 0
    while True:
        began, known = time.monotonic(), len(caught)
        living[:] = [start(argv, os.environ)]
        for late in caught[known:]:  # while it was being started
            _send(living, late)
        code = _wait(living[0])
        living.clear()
        short = short + 1 if time.monotonic() - began < SHORT_LIFE_S else 0
        if 0 <= code != CRASHED or signal.SIGTERM in caught or short >= MOST_SHORT_LIVES:
            return code if code >= 0 else 128 - code


def _wait(child: Child) -> int:
    assert child.popen is not None
    code = child.popen.wait()
    child.close()
    return code


def _send(living: Sequence[Child], number: int) -> None:
    for child in living:
        send(child.process, signal.Signals(number))
