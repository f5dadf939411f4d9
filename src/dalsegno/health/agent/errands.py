"""What the controller orders, each in a process of its own, so that none holds up the heartbeat: done, or killed."""

from __future__ import annotations

import selectors
from collections.abc import Callable
from dataclasses import dataclass, field
from socket import socket

from dalsegno.health.validation_times import LISTEN_S, VALIDATE_S
from dalsegno.health.words import Order, Reply, reply_message
from dalsegno.system.forked import Forked, fork
from dalsegno.train.frames import BadFrame, Message, Reader, pack

MOST = 4  # at a time
PATIENCE_S = {"check": 40.0, "validate": VALIDATE_S, "evidence": 40.0, "pair-listen": LISTEN_S}

Send = Callable[[Reply], None]
Do = Callable[[Order, Send], None]  # does what was ordered; sends parts of the answer, but not that it is done


@dataclass(eq=False)
class _Errand:
    order: Order
    until: float
    forked: Forked
    reader: Reader = field(default_factory=Reader)
    listening: bool = True


class Errands:
    """`say` sends an answer to the controller, `room` tells whether it can be sent now."""

    def __init__(
        self, do: Do, selector: selectors.BaseSelector, say: Callable[[Message], None], room: Callable[[], bool]
    ) -> None:
        self._do, self._selector, self._say, self._room = do, selector, say, room
        self._under_way: list[_Errand] = []
        self._killed: list[Forked] = []

    def begin(self, order: Order, now: float) -> None:
        if order.do not in PATIENCE_S:
            self._refuse(order, f"this agent does not know how to {order.do}")
        elif len(self._under_way) >= MOST:
            self._refuse(order, "this agent has too much to do already")
        else:
            forked = fork(lambda sock: _carry_out(self._do, order, sock))
            errand = _Errand(order, now + PATIENCE_S[order.do], forked)
            self._under_way.append(errand)
            self._register(errand)

    def wake(self, now: float) -> float | None:
        """Kill what takes too long, and go on with those that had to wait for room; returns when to look again."""
        self._killed = [forked for forked in self._killed if not forked.ended()]
        for errand in [each for each in self._under_way if each.until <= now]:
            self._end(errand, "it took too long, and was ended")
        if self._room():
            for errand in self._under_way:
                if not errand.listening:
                    self._register(errand)
        waiting = any(not errand.listening for errand in self._under_way)
        return now + 0.05 if waiting else min((errand.until for errand in self._under_way), default=None)

    def drop_all(self) -> None:
        """Nobody waits for the answers any more."""
        for errand in list(self._under_way):
            self._stop(errand)

    def _register(self, errand: _Errand) -> None:
        errand.listening = True
        self._selector.register(errand.forked.sock, selectors.EVENT_READ, lambda events, now: self._listen(errand))

    def _listen(self, errand: _Errand) -> None:
        if errand not in self._under_way:
            return
        if not self._room():  # let it wait: its own socket holds what it says meanwhile
            self._selector.unregister(errand.forked.sock)
            errand.listening = False
            return
        try:
            data = errand.forked.sock.recv(16384)
            for message in errand.reader.feed(data):
                self._say(message)
                if message.get("done"):
                    self._stop(errand)
                    return
        except BlockingIOError:
            return
        except (OSError, BadFrame):
            data = b""
        if not data:
            self._end(errand, "it ended without an answer")

    def _end(self, errand: _Errand, why: str) -> None:
        self._stop(errand)
        self._refuse(errand.order, why)

    def _stop(self, errand: _Errand) -> None:
        self._under_way.remove(errand)
        if errand.listening:
            self._selector.unregister(errand.forked.sock)
        errand.forked.kill()
        self._killed.append(errand.forked)

    def _refuse(self, order: Order, why: str) -> None:
        self._say(reply_message(Reply(order.number, done=True, error=why)))


def _carry_out(do: Do, order: Order, sock: socket) -> None:
    """In the process of its own."""
    sock.setblocking(True)

    def send(reply: Reply) -> None:
        sock.sendall(pack(reply_message(reply)))

    try:
        do(order, send)
        send(Reply(order.number, done=True))
    except Exception as error:  # the controller must hear why there is no answer
        send(Reply(order.number, done=True, error=f"{type(error).__name__}: {error}"))
        raise
