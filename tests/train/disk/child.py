"""Forked children that can be killed or run in their own mount namespace. torch is already loaded in them."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
_NEW_MOUNTS = 0x00020000


def fork(work: Callable[[], None]) -> int:
    """Run the work in a child and return its process id. The child exits with 0 on success."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        import torch

        torch.set_num_threads(1)  # a fork does not copy the parent's threads
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # nor the alarm that limits the test's time
        work()
        code = 0
    except BaseException:
        traceback.print_exc(file=sys.stderr)
    finally:
        sys.stderr.flush()
        os._exit(code)


def wait(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def on_a_small_disk(folder: Path, size: str, work: Callable[[], None]) -> None:
    """Run the work in a child, for which `folder` is a file system of this size until the child ends."""

    def inside() -> None:
        if ctypes.CDLL(None, use_errno=True).unshare(_NEW_MOUNTS):
            raise OSError(ctypes.get_errno(), "unshare")
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)
        work()

    assert wait(fork(inside)) == 0, "see the traceback of the child"
