"""The coordinator's side of its agents' connections: who they are, proved; what they say; that they are gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from dalsegno.launch.agent.beats import beat_key
from dalsegno.launch.agent.link import AGENT, COORDINATOR
from dalsegno.launch.words import UNREADABLE, Hello, read_hello
from dalsegno.train.frames import BadFrame, Message
from dalsegno.train.proof import holds, read_nonce
from dalsegno.wire.server import Connection, Limits, LoopWatcher, Proved, Server

LIMITS = Limits(stranger_s=5.0, read_bytes=256 << 10)


@dataclass(eq=False)
class Peer:
    """One agent's connection."""

    name: str
    hello: Hello
    address: str
    beat_key: bytes  # of its heartbeats, while this connection lasts
    send: Callable[[Message], None]
    close: Callable[[], None]  # at once, and nobody is told

    @property
    def host(self) -> str:
        """Where other nodes reach it: what it says of itself, if anything, else what we see."""
        return self.hello.address or self.address

    @property
    def probe(self) -> tuple[str, int]:
        """Where its host can be asked whether it lives."""
        return self.address, self.hello.probe


class Door:
    """Listens for agents. The four callbacks are the coordinator's."""

    def __init__(
        self,
        run: str,
        secret: bytes,
        came: Callable[[Peer], None],
        said: Callable[[Peer, Message], None],
        gone: Callable[[Peer], None],
        too_long: Callable[[str, str], None],
        limits: Limits = LIMITS,
    ) -> None:
        self.run, self.secret = run, secret
        self._came, self._said, self._gone, self._too_long = came, said, gone, too_long
        self._limits = limits
        self._greeting: Callable[[], Message] = dict
        self._peers: dict[Connection[str], Peer] = {}
        self._server: Server[str]

    async def open(self, port: int, greeting: Callable[[], Message] | None = None, host: str = "0.0.0.0") -> int:
        """Listen on this port, or on any if it is 0. The greeting is what strangers are told beside our nonce."""
        self._greeting = greeting or dict
        watcher = LoopWatcher(asyncio.get_running_loop())
        self._server = Server(watcher, self, AGENT, COORDINATOR, self._limits)
        return self._server.listen(host, port)

    def close(self) -> None:
        """Stop listening."""
        self._server.close()

    # What the server asks

    def greeting(self) -> Message:
        return self._greeting()

    def identify(self, hello: Message, ours: str) -> Proved[str]:
        name, said = str(hello.get("agent")), (ours, read_nonce(hello), self.run, str(hello.get("agent")))
        if hello.get("run") != self.run or not holds(hello.get("proof"), self.secret, AGENT, *said):
            raise BadFrame("no proof of the run's secret")
        return Proved(name, self.secret, said)

    def admit(self, connection: Connection[str], name: str) -> str:
        return ""

    def came(self, connection: Connection[str]) -> None:
        """The first sealed message tells more."""

    def said(self, connection: Connection[str], message: Message) -> None:
        peer = self._peers.get(connection)
        if peer is not None:
            self._said(peer, message)
            return
        assert connection.who is not None
        try:
            hello = read_hello({**message, "agent": connection.who})
        except UNREADABLE as error:
            raise BadFrame(f"not the hello of an agent: {error!r}") from error
        peer = self._peers[connection] = Peer(
            connection.who,
            hello,
            connection.address,
            beat_key(self.secret, *connection.said),
            lambda told: self._send(connection, told),
            lambda: self._drop(connection),
        )
        self._came(peer)

    def gone(self, connection: Connection[str]) -> None:
        peer = self._peers.pop(connection, None)
        if peer is not None:
            self._gone(peer)

    def refused(self, cause: str, detail: str) -> None:
        """Strangers are not worth a line in the run's log."""

    def _send(self, connection: Connection[str], message: Message) -> None:
        try:
            self._server.send(connection, message)
        except BadFrame as error:
            assert connection.who is not None
            self._too_long(connection.who, f"`{next(iter(message))}`: {error}")

    def _drop(self, connection: Connection[str]) -> None:
        self._peers.pop(connection, None)
        self._server.drop(connection)
