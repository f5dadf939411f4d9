"""The worker's side of a saver: start the saver, request saves, collect the results."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from dalsegno.train.agent import AgentLink
from dalsegno.train.saver import Request, render
from dalsegno.wire.peer import check_peer


class SaveResult(NamedTuple):
    """The result of one save.

    `why` is empty on success. `overtaken` means that the save was abandoned for a newer one.
    """

    step: int
    slot: str
    seconds: float
    why: str
    overtaken: bool = False
    warnings: tuple[str, ...] = ()


class Saver:
    """A connection to a saver, which is started on first use. The saver outlives the worker to finish a save."""

    def __init__(self, rank: int, agent: AgentLink | None, inherits: Sequence[int] = ()) -> None:
        """Create the client. `inherits` contains descriptors that a saver started by this process keeps open."""
        self._rank, self._agent, self._inherits = rank, agent, tuple(inherits)
        self._sock: socket.socket | None = None
        self._buffer = b""
        self.started = False
        self._step = -1  # the step of the last request
        self.busy: dict[str, int] = {}  # slots of unanswered requests, with their steps

    def ask(self, request: Request) -> None:
        if self._sock is None:
            self._sock = self._from_agent() or _start(self._inherits)
            self.started = True
        self._step = request.step
        self.busy = {request.slot: request.step}  # the saver drops a waiting request when a newer one arrives
        with contextlib.suppress(OSError):  # a dead saver is detected when its answers are read
            self._sock.sendall(render(request))

    def results(self, timeout_s: float = 0.0) -> list[SaveResult]:
        """Return the results that have arrived. Wait at most `timeout_s` for the first."""
        if self._sock is None or not select.select([self._sock], [], [], timeout_s)[0]:
            return []
        try:
            data = self._sock.recv(65536)
        except OSError:
            data = b""
        if not data:
            return self._lost()
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        found = [_parse(line) for line in lines]
        done = {(each.slot, each.step) for each in found}
        self.busy = dict(self.busy.items() - done)
        return found

    def wait(self, step: int, timeout_s: float) -> SaveResult:
        """Wait for the save of that step and return its result.

        If the saver dies or `timeout_s` passes, return a result that says so.
        """
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            for result in self.results(until - time.monotonic()):
                if result.step == step:
                    return result
            if not self.busy:
                return SaveResult(step, "", 0.0, "the saver has died")
        return SaveResult(step, "", timeout_s, f"not done within {timeout_s:.0f} s")

    def close(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def _from_agent(self) -> socket.socket | None:
        """Connect to a saver forked from the agent's warm parent, which has torch loaded.

        Return None if there is no such saver.
        """
        name = self._agent.ask({"saver": self._rank}).get("saver") if self._agent else None
        if not name:
            return None
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect("\0" + name)
            check_peer(sock)
        except OSError:
            sock.close()
            return None
        return sock

    def _lost(self) -> list[SaveResult]:
        lost, self.busy = self.busy, {}
        self.close()
        return [SaveResult(self._step, slot, 0.0, "the saver has died") for slot in lost]


def _start(inherits: Sequence[int]) -> socket.socket:
    """Start a saver in its own session, so that Ctrl-C at the terminal does not interrupt the last save."""
    ours, theirs = socket.socketpair()
    with theirs:
        passed = [theirs.fileno(), *inherits]
        command = [sys.executable, "-m", "dalsegno.train.saver", *map(str, passed)]
        subprocess.Popen(command, pass_fds=passed, start_new_session=True, stdin=subprocess.DEVNULL)
    return ours


def _parse(line: bytes) -> SaveResult:
    result: dict[str, Any] = json.loads(line)
    rest = (bool(result.get("overtaken")), tuple(map(str, result.get("words") or ())))
    return SaveResult(int(result["step"]), str(result["slot"]), float(result["seconds"]), str(result["why"]), *rest)
