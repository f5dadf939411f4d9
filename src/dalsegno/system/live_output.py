"""Run a long command and show its output line by line while it runs."""

from __future__ import annotations

import io
import math
import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from dalsegno.system.hanging_calls import die_with_parent
from dalsegno.system.processes import Completed, start_stream

_LAST_LINES = 50
_LINE_CHARS = 1 << 16  # a longer line is shown in pieces of this length
_KEPT_CHARS = 2000  # the result has this much of each of the last lines


def run_showing(argv: Sequence[str], show: Callable[[str], None], grace_s: float = 10.0) -> Completed:
    """Run a command, and call `show` from a thread with each line of its output. The result has the last lines.

    If Ctrl-C or another exception ends the wait, the command is interrupted too, and killed after the grace period. If
    this process dies, the command is killed.
    """
    last: deque[str] = deque(maxlen=_LAST_LINES)
    reader: threading.Thread | None = None
    process = start_stream(
        argv, subprocess.STDOUT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        before_exec=partial(die_with_parent, os.getpid()),
    )  # fmt: skip
    try:
        reader = threading.Thread(target=_read_lines, args=(process, last, show), daemon=True)
        reader.start()
        _wait_without_reaping(process.pid, math.inf)
    except BaseException:
        os.killpg(process.pid, signal.SIGINT)
        _wait_without_reaping(process.pid, grace_s)
        raise
    finally:
        # Background processes of the command would keep its output open. Its process id is not reused before it is
        # reaped.
        os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        if reader is not None and reader.ident is not None:
            reader.join(grace_s)  # a background process in a session of its own may keep the output open
    return Completed(tuple(argv), code, "\n".join(last))


def _read_lines(process: subprocess.Popen[bytes], last: deque[str], show: Callable[[str], None]) -> None:
    assert process.stdout
    with process.stdout as output:
        text = io.TextIOWrapper(output, "utf-8", "replace")  # a progress bar ends its lines with \r
        while piece := text.readline(_LINE_CHARS):
            line = piece.rstrip("\n")
            last.append(line[:_KEPT_CHARS])
            show(line)


def _wait_without_reaping(pid: int, timeout_s: float) -> None:
    """Wait in short turns for a child to end. A signal right before a wait without a limit would be handled only after
    the wait."""
    until = time.monotonic() + timeout_s
    while time.monotonic() < until and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        time.sleep(0.02)
