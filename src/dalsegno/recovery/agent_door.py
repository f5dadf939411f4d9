"""The controller's door for node agents: strangers prove who they are, in little time and with few words, or go.

What is refused changes nothing. The door knows no nodes: who may come in, `admit` decides once the proof holds.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from dalsegno.errors import DalsegnoError
from dalsegno.health.report import BadReport
from dalsegno.health.wire import Hello, is_proved, read_hello, welcome_message
from dalsegno.recovery.agent_call import Call
from dalsegno.recovery.complaints import Complaints
from dalsegno.train.frames import BadFrame, Message

STRANGERS = 256  # at a time
STRANGER_S = 3.0  # for the proof: it is one packet each way
ACCEPT_AT_ONCE = 64  # so that a flood of callers does not hold up those who are in


class Inside(Protocol):
    """Who deals with agents once they are known."""

    def admit(self, call: Call, hello: Hello) -> str:
        """Why this agent may not come in; "" if it may."""

    def came(self, call: Call) -> None: ...
    def said(self, call: Call, message: Message) -> None: ...
    def gone(self, call: Call) -> None: ...


class AgentDoor:
    """`secret_of` gives a node's secret, None for one that there is not."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        secret_of: Callable[[str], bytes | None],
        inside: Inside,
        complaints: Complaints,
        stranger_s: float = STRANGER_S,
    ) -> None:
        self._stranger_s = stranger_s
        self._selector, self._secret_of, self._inside, self._complaints = selector, secret_of, inside, complaints
        self.strangers: list[Call] = []  # the longest there first
        self._listener: socket.socket | None = None

    def open(self, host: str, port: int) -> int:
        """Listen; the port, which is any free one for 0."""
        try:
            self._listener = socket.create_server((host, port), backlog=1024)
        except OSError as error:
            hint = "`ss -ltnp` shows who listens there; `dalsegno down` ends what an earlier cluster has left"
            what = f"the controller cannot listen on {host}:{port}: {error.strerror or error}"
            raise DalsegnoError(what, hint=hint) from error
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, lambda events: self._accept())
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        for call in list(self.strangers):
            self._refuse(call)
        if self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()

    def wake(self, now: float) -> float | None:
        """Send those strangers away whose time is over; returns when to look again (monotonic)."""
        while self.strangers and self.strangers[0].until <= now:
            self._complaints.about("a caller who does not say who it is", self.strangers[0].address)
            self._refuse(self.strangers[0])
        return self.strangers[0].until if self.strangers else None

    def send(self, call: Call, message: Message) -> None:
        """To an agent; one that does not take it is gone."""
        if call.open:
            call.say(message)
            self._try(call, lambda: call.flush(self._selector))

    def drop(self, call: Call) -> None:
        """End a connection, and tell nobody."""
        if call.open:
            call.open = False
            self._selector.unregister(call.sock)
            call.sock.close()

    def _accept(self) -> None:
        assert self._listener is not None
        with contextlib.suppress(OSError):  # no one left, or gone before we looked, or no more files
            for _ in range(ACCEPT_AT_ONCE):
                sock, address = self._listener.accept()
                self._greet(Call(sock, str(address[0]), time.monotonic() + self._stranger_s))

    def _greet(self, call: Call) -> None:
        call.sock.setblocking(False)
        call.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if len(self.strangers) >= STRANGERS:
            self._make_room()
        self.strangers.append(call)
        self._selector.register(call.sock, selectors.EVENT_READ, lambda events: self._talk(call, events))
        self.send(call, {"nonce": call.nonce})

    def _make_room(self) -> None:
        """Whoever has the most strangers here loses the one that waits longest."""
        (crowd, _), *_ = Counter(call.address for call in self.strangers).most_common(1)
        self._complaints.about("too many callers who do not say who they are", crowd)
        self._refuse(next(call for call in self.strangers if call.address == crowd))

    def _talk(self, call: Call, events: int) -> None:
        if not call.open:
            return  # dropped in this very turn, for another that came
        if events & selectors.EVENT_READ:
            self._try(call, lambda: self._hear(call))
        if call.open:
            self._try(call, lambda: call.flush(self._selector))

    def _try(self, call: Call, step: Callable[[], None]) -> None:
        who = call.hello.node if call.hello else call.address
        try:
            step()
        except (BadFrame, BadReport) as error:
            self._complaints.about(f"what {who} says", str(error))
            self._refuse(call)
        except OSError:
            self._refuse(call)
        except Exception:  # whatever one caller's words do to us, the other nodes must go on being watched
            import traceback

            self._complaints.about(f"what {who} says, which went wrong here", traceback.format_exc())
            self._refuse(call)

    def _hear(self, call: Call) -> None:
        try:
            data = call.sock.recv(65536)
        except BlockingIOError:
            return
        if not data:
            raise OSError("closed")
        for frame in call.reader.feed(data):
            if not call.open:
                return
            if call.hello is None:
                self._identify(call, frame)
            elif not call.spend(time.monotonic()):
                raise BadFrame("it says too much")
            else:
                self._inside.said(call, call.unseal(frame))

    def _identify(self, call: Call, message: Message) -> None:
        hello = read_hello(message)
        secret = self._secret_of(hello.node)
        if secret is None or not is_proved(message, hello, secret, call.nonce):
            raise BadFrame(f"no proof that it is {hello.node}")
        if why := self._inside.admit(call, hello):
            self._complaints.about(f"an agent of {hello.node}: {why}", call.address)
            self._refuse(call)
            return
        self.strangers.remove(call)
        self.send(call, welcome_message(secret, hello, call.nonce))
        if call.open:
            call.become(hello, secret)
            self._inside.came(call)

    def _refuse(self, call: Call) -> None:
        known = call.open and call.hello is not None
        if call in self.strangers:
            self.strangers.remove(call)
        self.drop(call)
        if known:
            self._inside.gone(call)
