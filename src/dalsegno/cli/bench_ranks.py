"""A benchmark's processes on this machine: started, waited for, and ended together if one of them fails."""

from __future__ import annotations

import os
import select
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dalsegno.bench.ladder import LadderAsk, LadderReport, count_processes, local_env, read_report
from dalsegno.bench.ladder_rank import ASK, PROGRESS, REPORT
from dalsegno.cli.interrupts import interruptible
from dalsegno.errors import DalsegnoError
from dalsegno.system.children import Child, start
from dalsegno.targets.base import Say

_LOOK_S = 0.5
_LAST_LINES = 12


def measure_here(ask: LadderAsk, processes: int, say: Say) -> LadderReport:
    say(f"starting {count_processes(processes)}")
    with tempfile.TemporaryDirectory(prefix="dalsegno-bench-") as name, interruptible():
        folder = Path(name)
        (folder / ASK).write_text(ask.to_json())
        run_ranks([_rank(folder, rank, processes) for rank in range(processes)], folder, say)
        return read_report((folder / REPORT).read_text())


@dataclass(frozen=True)
class Rank:
    """A process to start."""

    argv: Sequence[str]
    env: Mapping[str, str]


def run_ranks(commands: Sequence[Rank], folder: Path, say: Say) -> None:
    """Start all, and wait until all are over; whatever happens, none is left behind."""
    ranks: list[Child] = []
    try:
        for number, rank in enumerate(commands):
            ranks.append(start(rank.argv, rank.env, output=_log(folder, number)))
        _wait(folder, ranks, say)
    finally:
        for child in ranks:
            child.kill()
            child.close()


def _rank(folder: Path, rank: int, processes: int) -> Rank:
    # Ours and torch come from where this process has them, user's site-packages included.
    path = os.pathsep.join(entry for entry in sys.path if entry)
    loopback = {} if "GLOO_SOCKET_IFNAME" in os.environ else {"GLOO_SOCKET_IFNAME": "lo"}
    env = {**os.environ, **local_env(rank, processes), **loopback, "PYTHONPATH": path}
    return Rank([sys.executable, "-m", "dalsegno.bench.ladder_rank", str(folder)], env)


def _wait(folder: Path, ranks: Sequence[Child], say: Say) -> None:
    """Until all are over. The first that fails ends the others, which would wait for it."""
    poll, said = select.poll(), ""
    left = {child.fd: rank for rank, child in enumerate(ranks)}
    for fd in left:
        poll.register(fd, select.POLLIN)
    while left:
        for fd, _ in poll.poll(_LOOK_S * 1000):
            poll.unregister(fd)
            rank = left.pop(fd)
            _check(rank, ranks[rank].poll(), _log(folder, rank))
        now = _text(folder / PROGRESS)
        if now and now != said:
            say(now)
        said = now


def _check(rank: int, code: int | None, log: Path) -> None:
    if code:
        tail = "".join(f"\n  {line}" for line in _text(log).splitlines()[-_LAST_LINES:])
        raise DalsegnoError(
            f"rank {rank} ended with code {code}:{tail}",
            hint="`--device cpu` leaves GPUs out; a smaller --model-mb or --nproc takes less memory",
        )


def _log(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.log"


def _text(file: Path) -> str:
    return file.read_text(errors="replace") if file.exists() else ""
