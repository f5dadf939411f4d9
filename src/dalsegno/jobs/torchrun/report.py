"""What torchrun says when a worker failed for good, in its own layout: log readers know it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from dalsegno.launch.causes import signal_name

MAX_WIDTH = 60
_NO_TRACEBACK = "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"


@dataclass(frozen=True)
class FailedWorker:
    rank: int
    local_rank: int
    pid: int
    exit_code: int  # negative: a signal
    at: float
    error_file: str = ""  # "": it wrote none
    traceback: str = ""


def render_report(name: str, host: str, root: FailedWorker, others: Sequence[FailedWorker] = ()) -> str:
    """The first failure last, where the eye falls; `others` are further ones of the same node."""
    cause = _render_failure(0, host, root)
    rest = [_render_failure(number, host, each) for number, each in enumerate(others, 1)]
    title = f"{name} FAILED"
    lines = [title, *(line for block in (cause, *rest) for line in block.splitlines())]
    width = min(max(map(len, lines)), MAX_WIDTH)
    border, section = "=" * width, "-" * width
    return "\n".join(
        [border, title, section, "Failures:", *(rest or ["  <NO_OTHER_FAILURES>"]), section,
         "Root Cause (first observed failure):", cause, border]
    )  # fmt: skip


def _render_failure(number: int, host: str, failed: FailedWorker) -> str:
    by = f" ({_signal_name(-failed.exit_code)})" if failed.exit_code < 0 else ""
    traceback = failed.traceback.strip().replace("\n", "\n  ") or _no_traceback(failed)
    return (
        f"[{number}]:\n"
        f"  time      : {datetime.fromtimestamp(int(failed.at)).isoformat(sep='_')}\n"
        f"  host      : {host}\n"
        f"  rank      : {failed.rank} (local_rank: {failed.local_rank})\n"
        f"  exitcode  : {failed.exit_code} (pid: {failed.pid}) {by}\n"
        f"  error_file: {failed.error_file or '<N/A>'}\n"
        f"  traceback : {traceback}"
    )


def _no_traceback(failed: FailedWorker) -> str:
    if failed.exit_code < 0:
        return f"Signal {-failed.exit_code} ({_signal_name(-failed.exit_code)}) received by PID {failed.pid}"
    return _NO_TRACEBACK


def _signal_name(number: int) -> str:
    return signal_name(number) or "<N/A>"
