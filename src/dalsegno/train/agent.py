"""The connection of a worker or its saver to the run agent.

Over this connection, a worker reports steps and snapshots, and asks for a saved state and for a saver. A saver asks for
permission to commit a checkpoint.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any

from dalsegno.train import contract
from dalsegno.wire.frames import BadFrame, Reader, pack, send
from dalsegno.wire.peer import check_peer

ANSWER_S = 60.0  # a live agent answers at once, but its coordinator may be restarting


class AgentLink:
    """The connection of one process, opened on first use.

    A message that cannot be sent is dropped. If the agent has died, this does no harm: the worker ends too.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._sock: socket.socket | None = None
        self._reader = Reader()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message without waiting, because a training step must not block."""
        data = pack(dict(message))
        try:
            sock = self._open()
            sock.settimeout(0.0)
            if sock.send(data) < len(data):
                self.close()  # the agent would take the next message for the rest of this one
        except BlockingIOError:
            pass  # nothing was sent, so the connection can still be used
        except OSError:
            self.close()

    def ask(self, message: Mapping[str, Any], wait_s: float = ANSWER_S) -> dict[str, Any]:
        """Send a message and return the answer; an empty dict if no answer comes within `wait_s`."""
        try:
            sock = self._open()
            sock.settimeout(wait_s)
            send(sock, dict(message))
            while True:
                data = sock.recv(65536)
                for answer in self._reader.feed(data):
                    return answer
                if not data:
                    self.close()
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
            self._sock, self._reader = None, Reader()


def find_agent(environ: Mapping[str, str] = os.environ) -> AgentLink | None:
    """Return a link to the run agent; None without Dal Segno's launcher, for example under torchrun."""
    name = environ.get(contract.AGENT)
    return AgentLink(name) if name else None
