"""The controller's server for node agents: which secret proves which node, and what is refused goes to the log."""

from __future__ import annotations

import selectors
from collections.abc import Callable
from typing import Protocol

from dalsegno.errors import DalsegnoError
from dalsegno.health.messages import BadReport
from dalsegno.health.wire import AGENT, CONTROLLER, MOST_BYTES, STRANGER_BYTES, Hello, is_proved, read_hello, words_of
from dalsegno.recovery.complaints import Complaints
from dalsegno.train.frames import BadFrame, Message
from dalsegno.train.proof import TAG_BYTES
from dalsegno.wire.server import Connection, Limits, Proved, SelectorWatcher, Server

STRANGERS = 256  # at a time
STRANGER_S = 3.0  # for the proof: it is one packet each way

Call = Connection[Hello]


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
        self._secret_of, self._inside, self._complaints = secret_of, inside, complaints
        limits = Limits(
            strangers=STRANGERS,
            stranger_s=stranger_s,
            stranger_bytes=STRANGER_BYTES,
            message_bytes=MOST_BYTES + TAG_BYTES,
            unsent_bytes=256 << 10,
            burst=400.0,  # an agent says ten messages in its busiest second
            per_s=100.0,
        )
        self._server = Server(SelectorWatcher(selector), self, AGENT, CONTROLLER, limits)
        self.close, self.wake = self._server.close, self._server.wake
        self.send, self.drop = self._server.send, self._server.drop
        self.came, self.gone = inside.came, inside.gone

    def open(self, host: str, port: int) -> int:
        """Listen; returns the port, which is any free one for 0."""
        try:
            return self._server.listen(host, port)
        except OSError as error:
            hint = "`ss -ltnp` shows who listens there; `dalsegno down` ends what an earlier cluster has left"
            what = f"the controller cannot listen on {host}:{port}: {error.strerror or error}"
            raise DalsegnoError(what, hint=hint) from error

    # What the server asks

    def greeting(self) -> Message:
        return {}

    def identify(self, hello: Message, ours: str) -> Proved[Hello]:
        told = read_hello(hello)
        secret = self._secret_of(told.node)
        if secret is None or not is_proved(hello, told, secret, ours):
            raise BadFrame(f"no proof that it is {told.node}")
        return Proved(told, secret, words_of(told, ours))

    def admit(self, call: Call, hello: Hello) -> str:
        why = self._inside.admit(call, hello)
        return f"an agent of {hello.node}: {why}" if why else ""

    def said(self, call: Call, message: Message) -> None:
        try:
            self._inside.said(call, message)
        except BadReport as error:
            raise BadFrame(str(error)) from error

    def refused(self, cause: str, detail: str) -> None:
        self._complaints.about(cause, detail)
