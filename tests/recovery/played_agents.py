"""The controller's side of the agents' connections in its own loop, and fake agents."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from dalsegno.health.messages import BEAT
from dalsegno.health.wire import AGENT, CONTROLLER, NodeHello
from dalsegno.recovery.agents.probes import NodeAddress
from dalsegno.recovery.agents.server import UNAUTHENTICATED_S
from dalsegno.recovery.agents.table import AgentTable
from dalsegno.wire.frames import Message, Reader, pack, parse
from dalsegno.wire.handshake import BadProof, ClientHandshake, Seal

T = TypeVar("T")
NODES = ("gpu-1", "gpu-2")


def secret_of(node: str) -> bytes | None:
    return f"the secret of {node}, which is long".encode() if node in NODES else None


class Scene:
    """The agents of two nodes, none connected yet."""

    def __init__(self, unauthenticated_s: float = UNAUTHENTICATED_S) -> None:
        self.selector = selectors.DefaultSelector()
        self.log: list[str] = []
        self.changed: list[str] = []
        self.callers: list[Caller] = []
        self.begin(unauthenticated_s)

    def begin(self, unauthenticated_s: float = UNAUTHENTICATED_S, port: int = 0) -> None:
        self.agents = AgentTable(self.selector, secret_of, self.log.append, self.changed.append, unauthenticated_s)
        self.port = self.agents.open("127.0.0.1", port)
        self.agents.expect({node: NodeAddress("127.0.0.1") for node in NODES})

    def turn(self, most_s: float = 0.01) -> None:
        due = self.agents.wake()
        wait = most_s if due is None else min(max(due - time.monotonic(), 0.0), most_s)
        for key, events in self.selector.select(wait):
            key.data(events)

    def until(self, true: Callable[[], T], timeout_s: float = 60.0) -> T:
        """Run the loop until a condition holds."""
        end = time.monotonic() + timeout_s
        while not (found := true()):
            assert time.monotonic() < end, f"did not happen in time; {self.log}"
            self.turn()
        return found

    def call(self) -> Caller:
        caller = Caller(self, socket.create_connection(("127.0.0.1", self.port), 60))
        caller.sock.setblocking(False)
        self.callers.append(caller)
        return caller

    def agent(self, node: str = "gpu-1", boot: str = "boot-1", started: float = 1.0) -> Caller:
        """Return an authenticated agent."""
        caller = self.call()
        caller.introduce(node, boot, started)
        assert caller.welcomed, "it was refused"
        self.until(lambda: self.agents.view(node).boot == boot)
        return caller

    def close(self) -> None:
        self.agents.close()
        for caller in self.callers:
            caller.sock.close()
        assert not self.selector.get_map(), "something was left in the loop"
        self.selector.close()


@dataclass(eq=False)
class Caller:
    """A connection whose messages the test chooses."""

    scene: Scene
    sock: socket.socket
    reader: Reader = field(default_factory=Reader)
    heard: list[bytes] = field(default_factory=list)
    hung_up: bool = False
    hello: NodeHello | None = None
    welcomed: bool = False
    opener: Seal | None = None
    closer: Seal | None = None

    def listen(self) -> None:
        try:
            data = self.sock.recv(1 << 20)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        self.hung_up = self.hung_up or not data
        self.heard += self.reader.bodies(data)

    def next(self) -> Message | None:
        """Return the next message of the handshake; None if the connection is closed."""
        body = self.next_body()
        return None if body is None else parse(body)

    def next_body(self) -> bytes | None:
        """Return the next message; None if the connection is closed."""

        def came() -> bool:
            self.listen()
            return bool(self.heard) or self.hung_up

        self.scene.until(came)
        return self.heard.pop(0) if self.heard else None

    def raw(self, data: bytes) -> None:
        while data:
            try:
                data = data[self.sock.send(data) :]
            except BlockingIOError:
                self.scene.turn()
            except ConnectionError:
                self.hung_up = True
                return

    def introduce(
        self, node: str = "gpu-1", boot: str = "boot-1", started: float = 1.0, secret: bytes | None = None
    ) -> None:
        greeting = self.next()
        assert greeting is not None
        self.hello = NodeHello(node, boot, started)
        secret = secret or secret_of(node) or b"?" * 32
        handshake = ClientHandshake(AGENT, CONTROLLER)
        self.raw(pack({**self.hello.fields(), **handshake.answer(greeting, secret, *self.hello.proven_values())}))
        answer = self.next()
        with contextlib.suppress(BadProof):
            self.welcomed = answer is not None and bool(handshake.finish(answer))
        self.opener, self.closer = handshake.session.opener, handshake.session.closer

    def sealed(self, message: Message) -> bytes:
        assert self.closer is not None
        return self.closer.close(message)

    def say(self, message: Message) -> None:
        self.raw(self.sealed(message))

    def beat(self) -> None:
        self.say(BEAT)

    def receive(self) -> Message:
        """Return the next sealed message."""
        body = self.next_body()
        assert body is not None and self.opener is not None
        return self.opener.open(body)

    def cut_off(self) -> bool:
        """Return whether the controller closes the connection."""
        while self.next_body() is not None:
            pass
        return True
