"""The controller's socket, open to every user of the machine: who calls, the kernel tells; none can hold up another.

One request of a user is answered in one turn of the controller's loop. The time that answers take is charged to the
user who asked: beyond its share, a user's next requests wait, and nobody else's do.
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
from pathlib import Path

from dalsegno.recovery.client import MOST_ANSWER
from dalsegno.recovery.complaints import Complaints
from dalsegno.system.network import listen_at, peer_uid
from dalsegno.train.frames import BadFrame, Message, Reader, encode, frame, pack, parse
from dalsegno.wire.bounds import Allowances, Waiting

MOST_CALLERS = 128
MOST_PER_USER = 48
CALL_S = 10.0  # a caller that has not said and heard all by then is cut off
MOST_BYTES = 1 << 16  # of one caller: no request of ours is near it
ACCEPT_AT_ONCE = 32
BURST_S, SHARE = 1.0, 0.1  # of the loop's time, for the requests of one user
TURN_S = 0.05  # for the answers of one turn
LEAST_S = 0.001  # that a request counts for

Answer = Callable[[int, Message], Message]  # uid, request -> answer


@dataclass(eq=False)
class Caller:
    sock: socket.socket
    uid: int
    until: float  # monotonic
    reader: Reader = field(default_factory=lambda: Reader(MOST_BYTES))
    received: int = 0
    request: bytes | None = None  # that waits for its answer
    broken: str = ""  # why nothing more that it says can be understood: one answer says so, and is the last
    finished: bool = False
    unsent: bytearray = field(default_factory=bytearray)

    @property
    def owner(self) -> int:
        return self.uid

    @property
    def waits(self) -> bool:
        """Whether it has asked something, and has taken the last answer."""
        return not self.unsent and not self.finished and (self.request is not None or bool(self.broken))


class Door:
    """Takes calls and has `answer` answer them. `turn` is called in every turn of the loop."""

    def __init__(
        self, path: Path, selector: selectors.BaseSelector, answer: Answer, say: Callable[[str], None]
    ) -> None:
        self.selector, self.answer, self.complaints = selector, answer, Complaints(say)
        self.callers: Waiting[Caller] = Waiting(MOST_CALLERS, MOST_PER_USER)
        self._allowances = Allowances(BURST_S, SHARE)
        self._served_at: dict[int, float] = {}  # by uid, of those who wait
        self.listener = listen_at(path, 0o666)  # everyone may knock: who it is, the kernel tells
        self.listener.setblocking(False)
        selector.register(self.listener, selectors.EVENT_READ, lambda events: self._accept())

    def close(self) -> None:
        for caller in self.callers.all():
            self._drop(caller)
        self.selector.unregister(self.listener)
        self.listener.close()

    def turn(self) -> float | None:
        """Answer one request of each user, and cut off callers whose time is over; returns when to look again."""
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
        """How long a user has to wait; never the administrator, who has to stop what the others do."""
        return 0.0 if uid in (0, os.geteuid()) else self._allowances.of(uid).ready_in_s()

    def _accept(self) -> None:
        for _ in range(ACCEPT_AT_ONCE):
            try:
                sock, _ = self.listener.accept()
            except OSError:
                return  # nobody is left, or gone before we looked
            sock.setblocking(False)
            caller = Caller(sock, peer_uid(sock), time.monotonic() + CALL_S)
            excess = self.callers.add(caller)
            self._watch(caller)
            if excess is not None:
                self._drop(excess)

    def _watch(self, caller: Caller) -> None:
        """Hear what the caller says, unless it has said something that is not answered yet; and speak to it."""
        reading = 0 if caller.request is not None or caller.broken or caller.finished else selectors.EVENT_READ
        events = reading | (selectors.EVENT_WRITE if caller.unsent else 0)
        known = caller.sock in self.selector.get_map()
        if not events:
            if known:
                self.selector.unregister(caller.sock)
        elif known:
            self.selector.modify(caller.sock, events, lambda events: self._talk(caller, events))
        else:
            self.selector.register(caller.sock, events, lambda events: self._talk(caller, events))

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
        """False when the caller has gone, or says more than any caller of ours would."""
        data = caller.sock.recv(MOST_BYTES)
        caller.received += len(data)
        if not data or caller.received > MOST_BYTES:
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
        caller.unsent += self._answered(caller)
        caller.request = None
        if not caller.finished:
            self._next_request(caller)
        self._allowances.of(caller.uid).spend(max(time.monotonic() - began, LEAST_S))
        try:
            self._speak(caller)
        except OSError:
            self._drop(caller)

    def _answered(self, caller: Caller) -> bytes:
        try:
            if caller.request is None:
                raise BadFrame(caller.broken)
            message = parse(caller.request)
        except BadFrame as error:
            caller.finished = True
            return pack({"error": f"not a message: {error}", "hint": "is it the same version on both sides?"})
        try:
            return frame(encode(self.answer(caller.uid, message)), MOST_ANSWER)
        except Exception:  # whatever a stranger's words do to us, the others' runs must go on being kept
            self.complaints.about(f"a call of uid {caller.uid} that went wrong", traceback.format_exc())
            return pack({"error": "the controller cannot answer this", "hint": "its log says why"})

    def _speak(self, caller: Caller) -> None:
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
