"""The door of a keeper for other keepers of its run."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from dataclasses import dataclass

from dalsegno.train.errors import CheckpointError
from dalsegno.train.frames import BadFrame
from dalsegno.train.keeper.books import Books
from dalsegno.train.keeper.giving import give
from dalsegno.train.keeper.receiving import Receiving
from dalsegno.train.keeper.wire import IDLE_S, PROOF_S, STALL_S, Channel, Stranger, prove_as_called
from dalsegno.wire.bounds import Waiting

_MOST_CALLS = 256
_MOST_UNPROVEN = 32
_MOST_HEARD = 2 * _MOST_UNPROVEN  # those who were sent away, and whose threads have not ended yet, included
_FULL_PAUSE_S = 0.1  # no file descriptor or thread is left


@dataclass(frozen=True, eq=False)
class _Stranger:
    """A caller that has not proved anything yet."""

    sock: socket.socket
    owner: str  # its address
    until: float


class Server:
    """A thread for each call. Of strangers only few may wait at a time: the address with the most loses its oldest."""

    def __init__(self, books: Books, listener: socket.socket) -> None:
        self._books, self._listener = books, listener
        self._receiving = Receiving(books)
        self._lock = threading.Lock()
        self._unproven: Waiting[_Stranger] = Waiting(_MOST_UNPROVEN)
        self._calls = threading.BoundedSemaphore(_MOST_CALLS)
        self._heard = threading.BoundedSemaphore(_MOST_HEARD)

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def accept_for_ever(self) -> None:
        """Begins when the agent has told the secret: until then callers wait in the kernel's queue, at no cost."""
        while self._books.wait_for_orders(PROOF_S) is None:
            pass
        while True:
            self._heard.acquire()
            try:
                self._accept()
            except (OSError, RuntimeError):  # gone before we looked, or there is nothing left to hear it with
                self._heard.release()
                time.sleep(_FULL_PAUSE_S)

    def _accept(self) -> None:
        sock, address = self._listener.accept()
        stranger = _Stranger(sock, str(address[0]), time.monotonic() + PROOF_S)
        self._welcome(stranger)
        try:
            threading.Thread(target=self._hear, args=(stranger,), daemon=True, name="call").start()
        except RuntimeError:
            self._forget(stranger)
            sock.close()
            raise

    def _welcome(self, stranger: _Stranger) -> None:
        with self._lock:
            excess = self._unproven.add(stranger)
            if excess is not None:
                self._unproven.remove(excess)
                with contextlib.suppress(OSError):
                    excess.sock.shutdown(socket.SHUT_RDWR)  # its thread closes it

    def _forget(self, stranger: _Stranger) -> None:
        with self._lock:
            self._unproven.remove(stranger)

    def _hear(self, stranger: _Stranger) -> None:
        with stranger.sock as sock:
            try:
                channel = self._proved(sock)
            finally:
                self._forget(stranger)
                self._heard.release()
            if channel is not None and self._calls.acquire(blocking=False):
                try:
                    self._serve(channel)
                finally:
                    self._calls.release()

    def _proved(self, sock: socket.socket) -> Channel | None:
        keep = self._books.keep
        try:
            if keep is not None:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return prove_as_called(sock, keep.run, keep.secret, keep.node)
        except (OSError, BadFrame, Stranger, ValueError):
            pass
        return None

    def _serve(self, channel: Channel) -> None:
        """Until the caller hangs up, or what it says makes no sense."""
        with contextlib.suppress(OSError, BadFrame, CheckpointError, KeyError, TypeError, ValueError):
            while True:
                channel.sock.settimeout(IDLE_S)
                message = channel.receive()
                channel.sock.settimeout(STALL_S)
                if "offer" in message:
                    self._receiving.take(channel, message)
                else:
                    give(channel, message, self._books)
