"""A worker's hand on its saver: starts it, asks it to save, hears what came of it."""

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
    """Of one save. `why` is empty if all went well. `overtaken`: given up for a newer one. `words`: of warning."""

    step: int
    slot: str
    seconds: float
    why: str
    overtaken: bool = False
    words: tuple[str, ...] = ()


class Saver:
    """Started when it is first needed. Its process outlives this one, to finish what it has begun."""

    def __init__(self, rank: int, agent: AgentLink | None, inherits: Sequence[int] = ()) -> None:
        """`inherits`: open files that a saver of our own keeps open."""
        self._rank, self._agent, self._inherits = rank, agent, tuple(inherits)
        self._sock: socket.socket | None = None
        self._buffer = b""
        self.started = False
        self._step = -1  # asked for last
        self.busy: dict[str, int] = {}  # slots it was asked to read and has not answered for, and which step

    def ask(self, request: Request) -> None:
        if self._sock is None:
            self._sock = self._from_agent() or _start(self._inherits)
            self.started = True
        self._step = request.step
        self.busy = {request.slot: request.step}  # a request that waits is replaced by a newer one
        with contextlib.suppress(OSError):  # a saver that has died is seen when its answer is read
            self._sock.sendall(render(request))

    def results(self, timeout_s: float = 0.0) -> list[SaveResult]:
        """Those that have come in, after waiting for one no longer than that."""
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
        """For the save of that step."""
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
        """Forked from the agent's warm parent: it has torch already."""
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
    """In a session of its own: a Ctrl-C at the terminal is meant for the training, not for its last save."""
    ours, its = socket.socketpair()
    with its:
        passed = [its.fileno(), *inherits]
        command = [sys.executable, "-m", "dalsegno.train.saver", *map(str, passed)]
        subprocess.Popen(command, pass_fds=passed, start_new_session=True, stdin=subprocess.DEVNULL)
    return ours


def _parse(line: bytes) -> SaveResult:
    told: dict[str, Any] = json.loads(line)
    about = (bool(told.get("overtaken")), tuple(map(str, told.get("words") or ())))
    return SaveResult(int(told["step"]), str(told["slot"]), float(told["seconds"]), str(told["why"]), *about)
