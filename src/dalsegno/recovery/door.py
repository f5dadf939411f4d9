"""The controller's socket: many callers at once, each known by its uid, none able to hold up another."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from dalsegno.system.sockets import listen_at, peer_uid
from dalsegno.train.frames import BadFrame, Message, Reader, pack

MOST_CALLERS = 128
CALL_S = 10.0  # whoever has not said and heard all by then is cut off
MOST_BYTES = 1 << 16  # of one caller: no request of ours is near it

Answer = Callable[[int, Message], Message]  # uid, request -> answer


@dataclass(eq=False)
class Caller:
    sock: socket.socket
    uid: int
    until: float  # monotonic
    reader: Reader = field(default_factory=Reader)
    received: int = 0
    unsent: bytes = b""


class Door:
    """Takes calls and has `answer` answer them."""

    def __init__(
        self, path: Path, selector: selectors.BaseSelector, answer: Answer, say: Callable[[str], None]
    ) -> None:
        self.selector, self.answer, self.say = selector, answer, say
        self.callers: list[Caller] = []  # the longest there first
        self.listener = listen_at(path, 0o666)  # everyone may knock: who it is, the kernel tells
        self.listener.setblocking(False)
        selector.register(self.listener, selectors.EVENT_READ, lambda events: self._accept())

    def close(self) -> None:
        for caller in list(self.callers):
            self._drop(caller)
        self.selector.unregister(self.listener)
        self.listener.close()

    def tidy(self) -> float | None:
        """Cut off who has been there for too long; returns when to look again (monotonic)."""
        for caller in [caller for caller in self.callers if caller.until <= time.monotonic()]:
            self._drop(caller)
        return self.callers[0].until if self.callers else None

    def _accept(self) -> None:
        try:
            sock, _ = self.listener.accept()
        except OSError:
            return  # gone before we looked
        sock.setblocking(False)
        if len(self.callers) >= MOST_CALLERS:
            self._drop(self.callers[0])
        caller = Caller(sock, peer_uid(sock), time.monotonic() + CALL_S)
        self.callers.append(caller)
        self.selector.register(sock, selectors.EVENT_READ, lambda events: self._talk(caller, events))

    def _talk(self, caller: Caller, events: int) -> None:
        if caller not in self.callers:
            return  # dropped in this very turn, for another that came
        try:
            if events & selectors.EVENT_READ and not self._hear(caller):
                self._drop(caller)
                return
            self._speak(caller)
        except OSError:
            self._drop(caller)

    def _hear(self, caller: Caller) -> bool:
        """False when the caller has gone, or says what no caller of ours would."""
        data = caller.sock.recv(65536)
        caller.received += len(data)
        if not data or caller.received > MOST_BYTES:
            return False
        try:
            for message in caller.reader.feed(data):
                caller.unsent += pack(self.answer(caller.uid, message))
        except BadFrame as error:
            caller.unsent += pack({"error": f"not a message: {error}", "hint": "is it the same version on both sides?"})
        except Exception:  # whatever a stranger's words do to us, the others' runs must go on being kept
            import traceback

            self.say(f"a call of uid {caller.uid} went wrong\n{traceback.format_exc()}")
            caller.unsent += pack({"error": "the controller cannot answer this", "hint": "its log says why"})
        return True

    def _speak(self, caller: Caller) -> None:
        if caller.unsent:
            with contextlib.suppress(BlockingIOError):
                caller.unsent = caller.unsent[caller.sock.send(caller.unsent) :]
        more = selectors.EVENT_WRITE if caller.unsent else 0
        key = self.selector.get_key(caller.sock)
        self.selector.modify(caller.sock, selectors.EVENT_READ | more, key.data)

    def _drop(self, caller: Caller) -> None:
        self.callers.remove(caller)
        self.selector.unregister(caller.sock)
        caller.sock.close()
