"""In a batch step there is no controller: the step's first process keeps the coordinator, and starts it again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence

from dalsegno.system.children import Child, start
from dalsegno.system.procfs import send

CRASHED = 70  # a coordinator's word for "not my run's fault, start me again"
SHORT_LIFE_S = 10.0
MOST_SHORT_LIVES = 8


def keep(argv: Sequence[str]) -> int:
    """Run the coordinator until it ends by itself; its code is the run's. Once Slurm ends the step, it is let go."""
    short, ended_by_slurm = 0, False
    while True:
        began = time.monotonic()
        code, terminated = _live(start(argv, os.environ))
        ended_by_slurm = ended_by_slurm or terminated
        short = short + 1 if time.monotonic() - began < SHORT_LIFE_S else 0
        if 0 <= code != CRASHED or ended_by_slurm or short >= MOST_SHORT_LIVES:
            return code if code >= 0 else 128 - code


def _live(child: Child) -> tuple[int, bool]:
    """Until it has ended: its code, and whether it was told to end. Slurm's signals are for it, not for us."""
    caught: list[int] = []

    def pass_on(number: int, _: object) -> None:
        caught.append(number)
        send(child.process, signal.Signals(number))

    for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
        signal.signal(number, pass_on)
    assert child.popen is not None
    code = child.popen.wait()
    child.close()
    return code, signal.SIGTERM in caught
