"""The coordinator's side of its agents' connections: who they are, proved; what they say; that they are gone."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from dataclasses import dataclass

from dalsegno.launch.words import UNREADABLE, Hello, read_hello
from dalsegno.train.frames import BadFrame, Message, Reader, pack
from dalsegno.train.proof import holds, nonce, prove

HANDSHAKE_S = 5.0


@dataclass(eq=False)
class Peer:
    """One agent's connection."""

    name: str
    hello: Hello
    address: str
    writer: asyncio.StreamWriter

    @property
    def host(self) -> str:
        """Where other nodes reach it: what it says of itself, if anything, else what we see."""
        return self.hello.address or self.address

    @property
    def probe(self) -> tuple[str, int]:
        """Where its host can be asked whether it lives."""
        return self.address, self.hello.probe

    def send(self, message: Message) -> None:
        if not self.writer.is_closing():
            self.writer.write(pack(message))

    def close(self) -> None:
        """At once: a host that is gone would never take what is still to be sent."""
        self.writer.transport.abort()


class Door:
    """Listens for agents. The three callbacks are the coordinator's."""

    def __init__(
        self,
        run: str,
        secret: bytes,
        came: Callable[[Peer], None],
        said: Callable[[Peer, Message], None],
        gone: Callable[[Peer], None],
    ) -> None:
        self.run, self.secret = run, secret
        self._came, self._said, self._gone = came, said, gone
        self._greeting: Callable[[], Message] = dict

    async def open(
        self, port: int, greeting: Callable[[], Message] | None = None, host: str = "0.0.0.0"
    ) -> tuple[asyncio.Server, int]:
        """Listen on this port, or on any if it is 0. The greeting is what strangers are told beside our nonce."""
        self._greeting = greeting or dict
        server = await asyncio.start_server(self._serve, host, port, backlog=1024)
        return server, int(server.sockets[0].getsockname()[1])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        frames = Reader()
        try:
            peer, early = await asyncio.wait_for(self._shake_hands(reader, writer, frames), HANDSHAKE_S)
        except (OSError, BadFrame, asyncio.TimeoutError, *UNREADABLE):
            writer.transport.abort()  # a stranger, or one who speaks another language
            return
        try:
            self._came(peer)
            for message in early:
                self._said(peer, message)
            await self._listen(peer, reader, frames)
        finally:
            self._gone(peer)
            peer.close()

    async def _shake_hands(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, frames: Reader
    ) -> tuple[Peer, list[Message]]:
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ours = nonce()
        writer.write(pack({**self._greeting(), "nonce": ours}))
        messages: list[Message] = []
        while not messages:
            data = await reader.read(65536)
            if not data:
                raise OSError("closed")
            messages = list(frames.feed(data))
        hello, *early = messages
        name, theirs = str(hello["agent"]), str(hello["nonce"])
        if hello.get("run") != self.run or not holds(hello["proof"], self.secret, "agent", ours, theirs, name):
            raise ValueError("no proof")
        writer.write(pack({"proof": prove(self.secret, "coordinator", theirs, ours, name)}))
        address = str(writer.get_extra_info("peername")[0])
        return Peer(name, read_hello(hello), address, writer), early

    async def _listen(self, peer: Peer, reader: asyncio.StreamReader, frames: Reader) -> None:
        with contextlib.suppress(OSError, BadFrame):
            while data := await reader.read(262144):
                for message in frames.feed(data):
                    self._said(peer, message)
