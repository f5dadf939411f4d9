"""The run agent as a worker sees it: told of steps, asked whether a checkpoint may be committed, asked for a saver."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping
from typing import Any

from dalsegno.train import contract
from dalsegno.wire.frames import BadFrame, Reader, send
from dalsegno.wire.peer import check_peer

ANSWER_S = 60.0  # an agent that is alive answers at once; its coordinator may be on its way back


class AgentLink:
    """Of one process. What cannot be delivered is lost: an agent that is gone takes its workers along."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._sock: socket.socket | None = None
        self._reader = Reader()

    def tell(self, message: Mapping[str, Any]) -> None:
        """Never waits: a training step is no time to wait for anyone."""
        with contextlib.suppress(OSError):
            sock = self._open()
            sock.settimeout(0.0)
            send(sock, dict(message))

    def ask(self, message: Mapping[str, Any], wait_s: float = ANSWER_S) -> dict[str, Any]:
        """The answer, or an empty one if there is none."""
        try:
            sock = self._open()
            sock.settimeout(wait_s)
            send(sock, dict(message))
            while True:
                data = sock.recv(65536)
                for answer in self._reader.feed(data):
                    return answer
                if not data:
                    return {}
        except (OSError, BadFrame):
            self.close()
            return {}

    def _open(self) -> socket.socket:
        if self._sock is None:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.connect("\0" + self._name)
                check_peer(sock)
            except OSError:
                sock.close()
                raise
            self._sock = sock
        return self._sock

    def close(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None


def find_agent(environ: Mapping[str, str] = os.environ) -> AgentLink | None:
    """None under torchrun, or alone."""
    name = environ.get(contract.AGENT)
    return AgentLink(name) if name else None
