"""Forked processes that share only files with the test."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable


def fork(act: Callable[[], object]) -> int:
    """Fork a process that runs the work and exits with 0 if nothing was raised."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        import torch

        torch.set_num_threads(1)  # a fork does not copy the parent's threads
        act()
        code = 0
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
    finally:
        os._exit(code)


def in_child(act: Callable[[], object]) -> None:
    _, status = os.waitpid(fork(act), 0)
    assert os.waitstatus_to_exitcode(status) == 0
