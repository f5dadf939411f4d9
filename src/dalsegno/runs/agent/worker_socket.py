"""The agent's socket for messages from workers and helpers on its node, such as step reports and requests."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
from collections.abc import Callable

from dalsegno.wire.frames import BadFrame, Message, Reader, send
from dalsegno.wire.peer import uid_of

_MAX_CALLERS = 1024

OnMessage = Callable[[Message, Callable[[Message], None]], None]  # called with a message and a function to answer it


class WorkerSocket:
    """Listens on an abstract socket, which leaves no file behind. Only processes of the same user are accepted."""

    def __init__(self, name: str, selector: selectors.BaseSelector, on_message: OnMessage) -> None:
        self.name, self._selector, self._on_message = name, selector, on_message
        self._readers: dict[socket.socket, Reader] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind("\0" + name)
        self._listener.listen(128)
        self._listener.setblocking(False)
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            sock, _ = self._listener.accept()
            if uid_of(sock) != os.getuid() or len(self._readers) >= _MAX_CALLERS:
                sock.close()
                return
            sock.settimeout(1.0)
            self._readers[sock] = Reader()
            self._selector.register(sock, selectors.EVENT_READ, lambda: self._listen(sock))

    def _listen(self, sock: socket.socket) -> None:
        try:
            data = sock.recv(65536)
            messages = list(self._readers[sock].feed(data))
        except (OSError, BadFrame):
            data, messages = b"", []
        for message in messages:
            self._on_message(message, lambda answer: self._answer(sock, answer))
        if not data:
            self._close(sock)

    def _answer(self, sock: socket.socket, answer: Message) -> None:
        if sock in self._readers:
            try:
                send(sock, answer)
            except OSError:
                self._close(sock)

    def _close(self, sock: socket.socket) -> None:
        if self._readers.pop(sock, None) is not None:
            self._selector.unregister(sock)
            sock.close()
