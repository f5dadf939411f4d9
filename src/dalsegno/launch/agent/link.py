"""The agent's connection to its coordinator: found, proved, lost and found again."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Sequence

from dalsegno.train.frames import BadFrame, Message, Reader, send
from dalsegno.train.proof import holds, nonce, prove

CONNECT_S = 1.0
TALK_S = 5.0


class Refused(Exception):
    """Whoever answered there does not know the run's secret."""


class Link:
    """One connection at a time. `send` never raises: what a broken connection swallows is told again after the next.

    Who has no secret yet finds it in the coordinator's greeting, if it may: that is what `unlock` does.
    """

    def __init__(
        self,
        secret: bytes,
        addresses: Sequence[str],
        port: int,
        name: str,
        unlock: Callable[[Message], bytes] | None = None,
    ) -> None:
        self._unlock = unlock
        self.secret, self.addresses, self.port, self.name = secret, tuple(addresses), port, name
        self.sock: socket.socket | None = None
        self.peer = ""  # the address that answered
        self.heard = time.monotonic()
        self._reader = Reader()
        self._early: list[Message] = []  # came together with the end of the handshake
        self.on_close: Callable[[], None] = lambda: None

    def connect(self, hello: Message) -> bool:
        """Try each address once; whether one of them was our coordinator."""
        for address in self.addresses:
            try:
                self._dial(address, hello)
            except (OSError, BadFrame, Refused, KeyError):
                self.close()
            else:
                return True
        return False

    def _dial(self, address: str, hello: Message) -> None:
        self.sock = socket.create_connection((address, self.port), CONNECT_S)
        self.sock.settimeout(TALK_S)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reader, self._early = Reader(), []
        greeting = self._next()
        theirs = str(greeting["nonce"])
        if self._unlock is not None:
            self.secret = self._unlock(greeting)
        ours = nonce()
        proof = prove(self.secret, "agent", theirs, ours, self.name)
        send(self.sock, dict(hello, agent=self.name, nonce=ours, proof=proof))
        if not holds(self._next().get("proof"), self.secret, "coordinator", ours, theirs, self.name):
            raise Refused(address)
        self.peer, self.heard = address, time.monotonic()

    def _next(self) -> Message:
        """The next message of the handshake, in which the two sides take turns."""
        assert self.sock is not None
        while True:
            data = self.sock.recv(65536)
            if not data:
                raise OSError("closed")
            messages = list(self._reader.feed(data))
            if messages:
                self._early += messages[1:]
                return messages[0]

    def early(self) -> list[Message]:
        """What came on the heels of the handshake; no selector will tell of it."""
        messages, self._early = self._early, []
        return messages

    def receive(self) -> list[Message]:
        """What has come; a connection that is gone is closed."""
        assert self.sock is not None
        try:
            data = self.sock.recv(262144)
            messages = list(self._reader.feed(data))
        except socket.timeout:
            return []
        except (OSError, BadFrame):
            data, messages = b"", []
        self.heard = time.monotonic()
        if not data:
            self.close()
        return messages

    def send(self, message: Message) -> bool:
        """Whether it was sent, as far as can be known."""
        if self.sock is None:
            return False
        try:
            send(self.sock, message)
        except OSError:
            self.close()
            return False
        return True

    def close(self) -> None:
        if self.sock is not None:
            self.on_close()
            with contextlib.suppress(OSError):
                self.sock.close()
            self.sock = None
