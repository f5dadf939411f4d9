"""A request server on a Unix socket that is open to every user of the machine. The kernel identifies the caller.

Each call of `turn` answers at most one request per user. The time that an answer takes is charged to the user. A user
who exceeds the allowed share of the time has to wait; other users do not.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

from dalsegno.wire.bounds import Allowances, WaitingConnections
from dalsegno.wire.frames import BadFrame, Message, Reader, encode, frame, pack, parse
from dalsegno.wire.peer import uid_of

MAX_CALLERS = 128
MAX_PER_USER = 48
CALL_S = 10.0  # a caller that has not finished after this time is disconnected
MAX_BYTES = 1 << 16  # limit on all bytes that one caller sends; valid requests are far shorter
ACCEPT_AT_ONCE = 32
BURST_S, SHARE = 1.0, 0.1  # limits on the time for one user's requests: seconds in a burst, and share of all time
TURN_S = 0.05  # after this time, a turn starts no further answers
MIN_CHARGE_S = 0.001  # minimum charge for a request

Answer = Callable[[int, Message], Message]  # (uid, request) -> answer


@dataclass(eq=False)
class Caller:
    """A connected process, its current request, and the unsent part of its answer."""

    sock: socket.socket
    uid: int
    until: float  # monotonic deadline of the caller
    reader: Reader = field(default_factory=lambda: Reader(MAX_BYTES))
    received: int = 0
    request: bytes | None = None  # the request that has no answer yet
    broken: str = ""  # why the caller's input cannot be parsed; the last answer contains it
    finished: bool = False
    unsent: bytearray = field(default_factory=bytearray)

    @property
    def owner(self) -> int:
        return self.uid

    @property
    def waits(self) -> bool:
        """Whether the caller waits for an answer and has received all of the previous one."""
        return not self.unsent and not self.finished and (self.request is not None or bool(self.broken))


class RequestServer:
    """Accepts callers and replies to each request with the result of `answer`. The event loop must call `turn`.

    If `answer` fails, `complain` is called with a message and the traceback. An answer has at most `max_answer_bytes`.
    """

    def __init__(
        self,
        listener: socket.socket,
        selector: selectors.BaseSelector,
        answer: Answer,
        complain: Callable[[str, str], None],
        max_answer_bytes: int,
    ) -> None:
        self.listener, self.selector, self.answer = listener, selector, answer
        self._complain, self._max_answer_bytes = complain, max_answer_bytes
        self.callers: WaitingConnections[Caller] = WaitingConnections(MAX_CALLERS, MAX_PER_USER)
        self._allowances = Allowances(BURST_S, SHARE)
        self._served_at: dict[int, float] = {}  # uid -> time of the last answer, for users who wait
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ, lambda events: self._accept())

    def close(self) -> None:
        for caller in self.callers.all():
            self._drop(caller)
        self.selector.unregister(self.listener)
        self.listener.close()

    def turn(self) -> float | None:
        """Answer at most one request per user and disconnect overdue callers. Return when the next turn is due."""
        now = time.monotonic()
        for caller in self.callers.overdue(now):
            self._drop(caller)
        waiting = [caller for caller in self.callers.all() if caller.waits]
        self._served_at = {caller.uid: self._served_at.get(caller.uid, 0.0) for caller in waiting}
        for caller in sorted(waiting, key=lambda caller: self._served_at[caller.uid]):
            if time.monotonic() - now > TURN_S:
                break
            if self._served_at[caller.uid] < now and not self._wait_s(caller.uid):
                self._served_at[caller.uid] = time.monotonic()
                self._serve(caller)
        again = [time.monotonic() + self._wait_s(caller.uid) for caller in self.callers.all() if caller.waits]
        return min((at for at in (self.callers.next_deadline(), *again) if at is not None), default=None)

    def _wait_s(self, uid: int) -> float:
        """Return how long a user has to wait. Root and the server's own user never wait: they may have to intervene."""
        return 0.0 if uid in (0, os.geteuid()) else self._allowances.of(uid).ready_in_s()

    def _accept(self) -> None:
        for _ in range(ACCEPT_AT_ONCE):
            try:
                sock, _ = self.listener.accept()
            except OSError:
                return  # no caller is waiting, or the caller has disconnected
            sock.setblocking(False)
            caller = Caller(sock, uid_of(sock), time.monotonic() + CALL_S)
            excess = self.callers.add(caller)
            self._watch(caller)
            if excess is not None:
                self._drop(excess)

    def _watch(self, caller: Caller) -> None:
        """Read from the caller unless one of its requests is unanswered, and write if there is unsent data."""
        reading = 0 if caller.request is not None or caller.broken or caller.finished else selectors.EVENT_READ
        events = reading | (selectors.EVENT_WRITE if caller.unsent else 0)
        known = caller.sock in self.selector.get_map()
        if not events:
            if known:
                self.selector.unregister(caller.sock)
        elif known:
            self.selector.modify(caller.sock, events, lambda events: self._exchange(caller, events))
        else:
            self.selector.register(caller.sock, events, lambda events: self._exchange(caller, events))

    def _exchange(self, caller: Caller, events: int) -> None:
        if caller not in self.callers:
            return  # the caller was dropped in this turn to make room for another one
        try:
            if events & selectors.EVENT_READ and not self._read(caller):
                self._drop(caller)
                return
            self._write(caller)
        except OSError:
            self._drop(caller)

    def _read(self, caller: Caller) -> bool:
        """Read from the caller; return False if it has disconnected or sent too much."""
        data = caller.sock.recv(MAX_BYTES)
        caller.received += len(data)
        if not data or caller.received > MAX_BYTES:
            return False
        caller.reader.add(data)
        self._next_request(caller)
        return True

    def _next_request(self, caller: Caller) -> None:
        try:
            caller.request = caller.reader.take()
        except BadFrame as error:
            caller.broken = str(error)

    def _serve(self, caller: Caller) -> None:
        began = time.monotonic()
        caller.unsent += self._make_answer(caller)
        caller.request = None
        if not caller.finished:
            self._next_request(caller)
        self._allowances.of(caller.uid).spend(max(time.monotonic() - began, MIN_CHARGE_S))
        try:
            self._write(caller)
        except OSError:
            self._drop(caller)

    def _make_answer(self, caller: Caller) -> bytes:
        try:
            if caller.request is None:
                raise BadFrame(caller.broken)
            message = parse(caller.request)
        except BadFrame as error:
            caller.finished = True
            return pack({"error": f"not a message: {error}", "hint": "check that both sides have the same version"})
        try:
            return frame(encode(self.answer(caller.uid, message)), self._max_answer_bytes)
        except Exception:  # a failed request must not stop the controller for other users
            self._complain(f"request of uid {caller.uid} failed", traceback.format_exc())
            return pack({"error": "the controller failed to answer", "hint": "see its log"})

    def _write(self, caller: Caller) -> None:
        if caller.unsent:
            with contextlib.suppress(BlockingIOError):
                del caller.unsent[: caller.sock.send(caller.unsent)]
        if caller.finished and not caller.unsent:
            self._drop(caller)
        else:
            self._watch(caller)

    def _drop(self, caller: Caller) -> None:
        self.callers.remove(caller)
        with contextlib.suppress(KeyError):
            self.selector.unregister(caller.sock)
        caller.sock.close()
