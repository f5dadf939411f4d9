"""The connection to the run agent: messages that do not fit into the socket are dropped as a whole."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dalsegno.train.agent import AgentLink
from dalsegno.wire.frames import Reader, pack

TEXT = "x" * 50_000  # a few of them fill the socket's buffer


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(f"\0dalsegno-test-link-{os.getpid()}")
        listener.listen()
        listener.settimeout(10.0)
        yield listener


def link_to(listener: socket.socket) -> AgentLink:
    return AgentLink(listener.getsockname()[1:].decode())


def accept(listener: socket.socket) -> socket.socket:
    accepted, _ = listener.accept()
    accepted.settimeout(10.0)
    return accepted


class PlayedAgent:
    """Simulates the agent's side. A part of a message at the end of a connection is dropped."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._readers: dict[socket.socket, Reader] = {}

    def read(self) -> list[int]:
        """Return the steps that have arrived on all connections."""
        self._listener.setblocking(False)
        while (accepted := _or_none(self._listener.accept)) is not None:
            accepted[0].setblocking(False)
            self._readers[accepted[0]] = Reader()
        return [message["step"] for sock, reader in self._readers.items() for message in self._messages(sock, reader)]

    def _messages(self, sock: socket.socket, reader: Reader) -> Iterator[dict[str, Any]]:
        while data := _or_none(lambda: sock.recv(1 << 20)):
            yield from reader.feed(data)

    def close(self) -> None:
        for sock in self._readers:
            sock.close()


def _or_none(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except BlockingIOError:
        return None


def test_messages_after_a_full_buffer_arrive_whole(listener: socket.socket) -> None:
    link, agent = link_to(listener), PlayedAgent(listener)
    for step in range(20):
        link.send({"step": step, "text": TEXT})
    steps = agent.read()
    assert steps[0] == 0 and steps == sorted(set(steps)) and len(steps) < 20
    link.send({"step": 20})
    link.send({"step": 21})
    assert agent.read() == [20, 21]
    agent.close()


def test_next_question_does_not_get_the_rest_of_an_old_answer(listener: socket.socket) -> None:
    link = link_to(listener)
    link.send({"step": 1})
    first = accept(listener)
    first.sendall(pack({"granted": False})[:-3])
    assert link.ask({"grant": 1}, wait_s=0.01) == {}
    link.send({"step": 2})
    second = accept(listener)
    second.sendall(pack({"granted": True}))
    assert link.ask({"grant": 1}, wait_s=10.0) == {"granted": True}
