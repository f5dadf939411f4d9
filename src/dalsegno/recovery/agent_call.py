"""One connection to the controller's door for agents: a stranger's at first, then an agent's. It never blocks."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from dataclasses import dataclass, field

from dalsegno.health.wire import AGENT, CONTROLLER, MOST_BYTES, STRANGER_BYTES, Hello, Seal
from dalsegno.train.frames import Message, Reader, pack
from dalsegno.train.proof import nonce

MOST_UNSENT = 256 << 10
BURST, PER_S = 400.0, 100.0  # messages: an agent says ten in its busiest second


@dataclass(eq=False)
class Call:
    """`hello` is None until the caller has proved who it is."""

    sock: socket.socket
    address: str
    until: float  # monotonic: when a stranger's time is over
    nonce: str = field(default_factory=nonce)
    reader: Reader = field(default_factory=lambda: Reader(STRANGER_BYTES))
    hello: Hello | None = None
    unsent: bytes = b""
    writing: bool = False
    open: bool = True
    _opener: Seal | None = None
    _closer: Seal | None = None
    _tokens: float = BURST
    _tokens_at: float = field(default_factory=time.monotonic)

    def become(self, hello: Hello, secret: bytes) -> None:
        """From now on every message is sealed."""
        self.hello, self.reader = hello, Reader(MOST_BYTES)
        self._opener = Seal(secret, hello, self.nonce, AGENT)
        self._closer = Seal(secret, hello, self.nonce, CONTROLLER)

    def unseal(self, frame: Message) -> Message:
        assert self._opener is not None
        return self._opener.open(frame)

    def say(self, message: Message) -> None:
        self.unsent += self._closer.close(message) if self._closer else pack(message)

    def spend(self, now: float) -> bool:
        """Whether one more message may come: no node may keep the controller busy."""
        self._tokens = min(self._tokens + (now - self._tokens_at) * PER_S, BURST) - 1
        self._tokens_at = now
        return self._tokens >= 0

    def flush(self, selector: selectors.BaseSelector) -> None:
        """Send what the socket takes; OSError if it takes nothing any more, or the other side takes too little."""
        if self.unsent:
            with contextlib.suppress(BlockingIOError):
                self.unsent = self.unsent[self.sock.send(self.unsent) :]
        if len(self.unsent) > MOST_UNSENT:
            raise OSError("it does not listen")
        if bool(self.unsent) != self.writing:
            self.writing = bool(self.unsent)
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self.writing else 0)
            selector.modify(self.sock, events, selector.get_key(self.sock).data)
