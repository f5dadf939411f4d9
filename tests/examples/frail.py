"""Run an example that is interrupted by a signal: `frail.py SIGNAL RANK STEP SCRIPT ARGUMENTS…`

On its first start, that rank sends itself the signal when its optimizer has done STEP steps.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys

from torch.optim.optimizer import register_optimizer_step_post_hook

name, rank, step, *sys.argv = sys.argv[1:]
made = 0


def count(*ignored: object) -> None:
    global made
    made += 1
    if made == int(step):
        os.kill(os.getpid(), signal.Signals[name])


if os.environ.get("RANK", "0") == rank and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
    register_optimizer_step_post_hook(count)
runpy.run_path(sys.argv[0], run_name="__main__")
