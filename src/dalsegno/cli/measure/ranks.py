"""Run the processes of a benchmark: ranks on this machine, or one srun. Show their output while they run."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dalsegno.errors import DalsegnoError, UsageError

if TYPE_CHECKING:
    from dalsegno.system.children import Child

_POLL_S = 0.5
_LAST_LINES = 12
_GRACE_S = 10.0  # srun needs this time to end its job after it is terminated


@dataclass(frozen=True)
class Rank:
    """The command line and environment of one rank."""

    argv: Sequence[str]
    env: Mapping[str, str]


def local_ranks(argv: Sequence[str], processes: int) -> list[Rank]:
    """Return the ranks of a benchmark on this machine. They use the loopback interface."""
    from dalsegno.bench.ladder.ladder import local_env

    # The ranks import Dal Segno and torch from the same places as this process, user site-packages included.
    path = os.pathsep.join(entry for entry in sys.path if entry)
    loopback = {} if "GLOO_SOCKET_IFNAME" in os.environ else {"GLOO_SOCKET_IFNAME": "lo"}
    base = {**os.environ, **loopback, "PYTHONPATH": path}
    return [Rank(argv, {**base, **local_env(rank, processes)}) for rank in range(processes)]


def run_ranks(
    commands: Sequence[Rank],
    folder: Path,
    watch: Callable[[], None] = lambda: None,
    *,
    hint: str = "",
    cwd: str = "/",
    errors_apart: bool = False,
    grace_s: float = _GRACE_S,
) -> None:
    """Start all ranks and wait until they have ended; meanwhile call `watch` regularly.

    If a rank fails or this process is interrupted, terminate all ranks, and kill them after `grace_s`. With
    `errors_apart`, the files that `log_of` names contain only standard output.
    """
    from dalsegno.system.children import start, stop

    ranks: list[Child] = []
    try:
        for number, rank in enumerate(commands):
            errors = errors_of(folder, number) if errors_apart else None
            ranks.append(start(rank.argv, rank.env, cwd=cwd, output=log_of(folder, number), errors=errors))
        names = [name_of(rank, number) for number, rank in enumerate(commands)]
        _wait(folder, ranks, names, watch, hint)
    finally:
        stop((child.process for child in ranks), grace_s=grace_s)
        for child in ranks:
            child.kill()
            child.close()


def name_of(rank: Rank, number: int) -> str:
    """Return the name of a process in messages. If there is only srun, its name stands for all ranks."""
    return "srun" if rank.argv[0] == "srun" else f"rank {number}"


def _wait(folder: Path, ranks: Sequence[Child], names: Sequence[str], watch: Callable[[], None], hint: str) -> None:
    """Wait until all ranks have ended. Raise an error at the first failure: the other ranks would wait forever."""
    poll = select.poll()
    left = {child.fd: rank for rank, child in enumerate(ranks)}
    for fd in left:
        poll.register(fd, select.POLLIN)
    while left:
        for fd, _ in poll.poll(_POLL_S * 1000):
            poll.unregister(fd)
            rank = left.pop(fd)
            _check(names[rank], rank, ranks[rank].poll(), folder, hint)
        watch()


class RankFailed(DalsegnoError):
    """The error that a rank has ended with an exit code other than 0."""

    def __init__(self, what: str, hint: str, exit_code: int) -> None:
        super().__init__(what, hint=hint)
        self.code = exit_code


def _check(name: str, rank: int, code: int | None, folder: Path, hint: str) -> None:
    if code:
        lines = (text_of(errors_of(folder, rank)) or text_of(log_of(folder, rank))).splitlines()
        tail = "".join(f"\n  {line}" for line in lines[-_LAST_LINES:])
        hint = "" if code == UsageError.exit_code else hint  # the rank has already printed what to change
        raise RankFailed(f"{name} ended with code {code}:{tail}", hint, code)


def log_of(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.log"


def errors_of(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.errors"


def text_of(file: Path) -> str:
    return file.read_text(errors="replace") if file.exists() else ""


class LineFollower:
    """Passes on the complete lines that are added to a file."""

    def __init__(self, file: Path, show: Callable[[str], None]) -> None:
        self._file, self._show, self._shown = file, show, 0

    def __call__(self) -> None:
        if not self._file.exists():
            return
        with self._file.open("rb") as file:
            file.seek(self._shown)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._shown += len(whole)
        for line in whole.decode(errors="replace").splitlines():
            self._show(line)
