"""The saver: a separate process that writes a worker's snapshots to disk while training continues.

A separate process does not slow down training. The saver outlives the worker, so that a save is completed even if the
worker is killed. Requests and results are lines of JSON on one socket. A newer request replaces a waiting one.
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
from dalsegno.train.disk.commit import commit, has_moved_on
from dalsegno.train.disk.format import TemporaryName
from dalsegno.train.disk.write import write_share
from dalsegno.train.errors import CheckpointError
from dalsegno.train.memory.files import is_current, sweep_rank
from dalsegno.train.memory.snapshot import hold_snapshot, state_of
from dalsegno.train.state import TrainingState


@dataclass(frozen=True)
class SaverTerms:
    """The settings that are the same for all saves of one rank in one generation."""

    folder: str
    run: str
    generation: int
    rank: int
    world: int
    keep: int
    keep_every: int | None = None
    sweep: bool = False  # whether the saver removes the rank's files in memory after the worker has ended
    verified: int | None = None  # the last verified step; the newest checkpoint up to it is kept


@dataclass(frozen=True)
class Request:
    """A request to write a rank's share of a checkpoint from its snapshot. The first rank commits all shares."""

    terms: SaverTerms
    step: int
    slot: str  # the file that holds the snapshot


def render(request: Request) -> bytes:
    return json.dumps(asdict(request)).encode() + b"\n"


def parse(line: bytes) -> Request:
    message = json.loads(line)
    return Request(SaverTerms(**message["terms"]), int(message["step"]), str(message["slot"]))


Warn = Callable[[str], None]
NICE = 5  # low priority, because training comes first


def serve(sock: socket.socket, alive: int | None = None) -> None:
    """Serve until the worker disconnects and all work is done.

    `alive` is the descriptor of the locked file that protects the worker's snapshots from removal.
    """
    os.nice(NICE)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        # These signals are meant for the worker, but sent to the whole process group.
        signal.signal(number, signal.SIG_IGN)
    requests, terms = SaverRequests(sock), None
    while True:
        request = requests.next()
        if request is None:
            break
        terms, began = request.terms, time.monotonic()
        warnings: list[str] = []
        why = save(request, requests.overtaken, warnings.append)
        result = {"step": request.step, "slot": request.slot, "seconds": time.monotonic() - began, "why": why}
        result["words"] = warnings
        requests.report({**result, "overtaken": bool(why) and requests.overtaken()})
    if terms is not None and terms.sweep and (alive is None or is_current(alive, terms.run, terms.rank)):
        sweep_rank(terms.run, terms.rank)


def save(request: Request, overtaken: Callable[[], bool], warn: Warn) -> str:
    """Save a snapshot from memory to disk. Return the reason if it fails, otherwise an empty string."""
    with hold_snapshot(Path(request.slot)) as snapshot:
        if snapshot is None or snapshot.record.step != request.step:
            return f"the snapshot of step {request.step} is gone"
        why = write(request, state_of(snapshot))
    return why or finish(request, warn, overtaken)


def save_here(request: Request, state: TrainingState, warn: Warn) -> str:
    """Save a state that is not in a slot, in this process, while training waits.

    Return the reason if it fails, otherwise an empty string.
    """
    return write(request, state) or finish(request, warn)


def write(request: Request, state: TrainingState) -> str:
    """Write this rank's share. Return the reason if it fails, otherwise an empty string."""
    terms = request.terms
    try:
        write_share(Path(terms.folder), state, terms.run, terms.generation)
    except CheckpointError as error:
        return str(error)
    return ""


def finish(request: Request, warn: Warn, overtaken: Callable[[], bool] = lambda: False) -> str:
    """On the first rank, wait for the shares of all ranks and commit them. On other ranks, do nothing.

    Return the reason if it fails, otherwise an empty string.
    """
    terms = request.terms
    if terms.rank != 0:
        return ""
    grant, ours = grant_for(terms.generation), TemporaryName(request.step, terms.run, terms.generation)
    try:
        commit(
            Path(terms.folder), request.step, terms.world, terms.run, terms.generation, grant,
            keep=terms.keep, every=terms.keep_every, verified=terms.verified, warn=warn,
            abandoned=lambda missing: overtaken() and has_moved_on(Path(terms.folder), ours, missing),
        )  # fmt: skip
    except CheckpointError as error:
        return str(error)
    return ""


def grant_for(generation: int) -> Callable[[], bool]:
    """Return a function that asks whether this generation may commit.

    Under an agent, the coordinator decides. Without an agent, the generation always may.
    """
    agent = find_agent()
    if agent is None:
        return lambda: True
    return lambda: bool(agent.ask({"grant": generation}).get("granted"))


class SaverRequests:
    """The saver's side of the socket: it receives requests from the worker and sends results."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = b""
        self._waiting: Request | None = None
        self._over = False

    def next(self) -> Request | None:
        """Wait for the next request and return it; None if the worker has disconnected."""
        while self._waiting is None and not self._over:
            self._receive(timeout_s=None)
        request, self._waiting = self._waiting, None
        return request

    def overtaken(self) -> bool:
        """Return whether a newer request is waiting."""
        self._receive(timeout_s=0.0)
        return self._waiting is not None

    def report(self, result: dict[str, object]) -> None:
        try:
            self._sock.sendall(json.dumps(result).encode() + b"\n")
        except OSError:
            self._over = True

    def _receive(self, timeout_s: float | None) -> None:
        if self._over or not select.select([self._sock], [], [], timeout_s)[0]:
            return
        try:
            data = self._sock.recv(65536)
        except (
            ConnectionResetError
        ):  # raised once if the worker ended with unread answers; the next `recv` returns its requests
            return
        self._over = not data
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            self._waiting = parse(line)


def main() -> None:
    """Run as `python -m dalsegno.train.saver FD [ALIVE]` and serve on the socket FD.

    A worker uses this program if no warm parent can fork a saver.
    """
    serve(socket.socket(fileno=int(sys.argv[1])), *map(int, sys.argv[2:]))


if __name__ == "__main__":
    main()
