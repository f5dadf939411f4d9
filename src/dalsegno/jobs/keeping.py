"""In a batch step there is no controller: the step's first process keeps the coordinator, and starts it again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence

from dalsegno.system.children import Child, start
from dalsegno.system.procfs import send

CRASHED = 70  # a coordinator's word for "not my run's fault, start me again"
SHORT_S = 10.0
MAX_SHORT_LIVES = 8


def keep(argv: Sequence[str]) -> int:
    """Run the coordinator until it ends by itself; its code is the run's."""
    short = 0
    while True:
        began = time.monotonic()
        code = _live(start(argv, os.environ))
        short = short + 1 if time.monotonic() - began < SHORT_S else 0
        if 0 <= code != CRASHED or short >= MAX_SHORT_LIVES:
            return code if code >= 0 else 128 - code


def _live(child: Child) -> int:
    """Until it has ended. Slurm's signals are for it, not for us."""
    for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
        signal.signal(number, lambda caught, frame: send(child.process, signal.Signals(caught)))
    assert child.popen is not None
    code = child.popen.wait()
    child.close()
    return code
