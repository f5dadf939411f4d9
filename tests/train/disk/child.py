"""A forked child that may be killed, or given a world of its own: torch is loaded in it already."""

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

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk of its own, which needs root")
_NEW_MOUNTS = 0x00020000


def fork(work: Callable[[], None]) -> int:
    """The process id of a child that does this and ends: 0 if it went well."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        import torch

        torch.set_num_threads(1)  # the parent's threads are not in the child
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # nor is the alarm that limits the test's time
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
    """Does it in a child for which `folder` is a file system of this size; nobody else sees it, and it goes with it."""

    def inside() -> None:
        if ctypes.CDLL(None, use_errno=True).unshare(_NEW_MOUNTS):
            raise OSError(ctypes.get_errno(), "unshare")
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)
        work()

    assert wait(fork(inside)) == 0, "see the traceback of the child"
