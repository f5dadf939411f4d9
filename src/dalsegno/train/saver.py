"""The saver: a process beside a worker, which writes the worker's snapshots to disk while the training goes on.

It has its own Python, so that it does not slow the training down, and it outlives the worker: a save that has begun is
finished when the worker is killed. Requests and results are lines of JSON on one socket; a request that waits while
another is at work is replaced by a newer one.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from dalsegno.train.agent import find_agent
from dalsegno.train.disk.commit import commit, moved_on
from dalsegno.train.disk.format import TemporaryName
from dalsegno.train.disk.write import write_share
from dalsegno.train.errors import CheckpointError
from dalsegno.train.memory.files import is_current, sweep_rank
from dalsegno.train.memory.snapshot import held_snapshot, state_of
from dalsegno.train.state import TrainingState

# ---- What a worker asks its saver for: one line of JSON.


@dataclass(frozen=True)
class SaverTerms:
    """What is the same for all saves of one rank in one generation."""

    folder: str
    run: str
    generation: int
    rank: int
    world: int
    keep: int
    keep_every: int | None = None
    sweep: bool = False  # nobody else removes the run's files in memory when the worker is gone


@dataclass(frozen=True)
class Request:
    """Write a rank's share of a snapshot; the first rank makes a checkpoint of all shares."""

    terms: SaverTerms
    step: int
    slot: str  # the file that holds the snapshot


def render(request: Request) -> bytes:
    return json.dumps(asdict(request)).encode() + b"\n"


def parse(line: bytes) -> Request:
    told = json.loads(line)
    return Request(SaverTerms(**told["terms"]), int(told["step"]), str(told["slot"]))


# ---- The saver: a process beside a worker, which writes the worker's snapshots to disk while the training goes on.


Warn = Callable[[str], None]
NICE = 5  # the training comes first


def serve(sock: socket.socket, alive: int | None = None) -> None:
    """Until the worker hangs up and nothing is left to do. `alive`: the locked file that keeps its snapshots."""
    os.nice(NICE)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # meant for the worker, sent to the whole group
    asked, terms = Asked(sock), None
    while True:
        request = asked.next()
        if request is None:
            break
        terms, began = request.terms, time.monotonic()
        words: list[str] = []
        why = save(request, asked.overtaken, words.append)
        told = {"step": request.step, "slot": request.slot, "seconds": time.monotonic() - began, "why": why}
        told["words"] = words
        asked.tell({**told, "overtaken": bool(why) and asked.overtaken()})
    if terms is not None and terms.sweep and (alive is None or is_current(alive, terms.run, terms.rank)):
        sweep_rank(terms.run, terms.rank)


def save(request: Request, overtaken: Callable[[], bool], warn: Warn) -> str:
    """A snapshot that is in memory. Empty if it went well, else why not."""
    with held_snapshot(Path(request.slot)) as snapshot:
        if snapshot is None or snapshot.record.step != request.step:
            return f"the snapshot of step {request.step} is gone"
        why = write(request, state_of(snapshot))
    return why or finish(request, warn, overtaken)


def save_here(request: Request, state: TrainingState, warn: Warn) -> str:
    """A state that is not in a slot, while the training waits."""
    return write(request, state) or finish(request, warn)


def write(request: Request, state: TrainingState) -> str:
    """This rank's share."""
    terms = request.terms
    try:
        write_share(Path(terms.folder), state, terms.run, terms.generation)
    except CheckpointError as error:
        return str(error)
    return ""


def finish(request: Request, warn: Warn, overtaken: Callable[[], bool] = lambda: False) -> str:
    """The first rank makes a checkpoint of all shares."""
    terms = request.terms
    if terms.rank != 0:
        return ""
    grant, ours = grant_for(terms.generation), TemporaryName(request.step, terms.run, terms.generation)
    try:
        commit(
            Path(terms.folder), request.step, terms.world, terms.run, terms.generation, grant,
            keep=terms.keep, every=terms.keep_every, warn=warn,
            abandoned=lambda missing: overtaken() and moved_on(Path(terms.folder), ours, missing),
        )  # fmt: skip
    except CheckpointError as error:
        return str(error)
    return ""


def grant_for(generation: int) -> Callable[[], bool]:
    """Under an agent only the coordinator may say that this generation still counts."""
    agent = find_agent()
    if agent is None:
        return lambda: True
    return lambda: bool(agent.ask({"grant": generation}).get("granted"))


class Asked:
    """What the worker has asked for."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = b""
        self._waiting: Request | None = None
        self._over = False

    def next(self) -> Request | None:
        """Waits for it; None when the worker has hung up."""
        while self._waiting is None and not self._over:
            self._hear(timeout_s=None)
        request, self._waiting = self._waiting, None
        return request

    def overtaken(self) -> bool:
        """A newer request waits. A slow rank's share may come all the same: it works off what it was asked in order."""
        self._hear(timeout_s=0.0)
        return self._waiting is not None

    def tell(self, result: dict[str, object]) -> None:
        try:
            self._sock.sendall(json.dumps(result).encode() + b"\n")
        except OSError:
            self._over = True

    def _hear(self, timeout_s: float | None) -> None:
        if self._over or not select.select([self._sock], [], [], timeout_s)[0]:
            return
        try:
            data = self._sock.recv(65536)
        except ConnectionResetError:  # said once if the worker died with answers unread; what it asked is still to come
            return
        self._over = not data
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            self._waiting = parse(line)


def main() -> None:
    """`python -m dalsegno.train.saver FD [ALIVE]`: where there is no warm parent to fork from."""
    serve(socket.socket(fileno=int(sys.argv[1])), *map(int, sys.argv[2:]))


if __name__ == "__main__":
    main()
