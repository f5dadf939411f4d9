"""The agents of a run as its coordinator sees them."""

import asyncio
import socket
from collections.abc import Iterator

import pytest

from dalsegno.runs.agent.link import CoordinatorLink
from dalsegno.runs.coordinator.agents.agents import Peer, RunAgents
from dalsegno.runs.coordinator.agents.liveness import Timing
from dalsegno.runs.coordinator.agents.messages import AgentMessage, UserNote
from dalsegno.wire.frames import Message

SECRET = b"s" * 32
HELLO: Message = {"run": "train-k3f9x", "probe": 1, "found": {}}


class Listener:
    """Records the events that a coordinator would receive."""

    def __init__(self) -> None:
        self.log: list[tuple[object, ...]] = []

    def agent_connected(self, peer: Peer) -> None:
        self.log.append(("came", peer.name))

    def agent_message(self, peer: Peer, message: AgentMessage) -> None:
        self.log.append(("said", peer.name, message))

    def agent_lost(self, agent: str, why: str, silent: bool) -> None:
        self.log.append(("lost", agent, why, silent))

    def message_too_long(self, agent: str, detail: str) -> None:
        self.log.append(("too long", agent, detail))


@pytest.fixture
def taken() -> Iterator[None]:
    """Bind many UDP ports whose TCP ports are free."""
    sockets = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(600)]
    for sock in sockets:
        sock.bind(("", 0))
    yield
    for sock in sockets:
        sock.close()


def test_port_is_free_for_tcp_and_udp(taken: None):
    async def open_many() -> None:
        for _ in range(400):
            agents = RunAgents("train-k3f9x", SECRET, Timing(), Listener())
            try:
                await agents.open(0)
            finally:
                agents.close()

    asyncio.run(open_many())


def test_second_agent_of_a_node_replaces_the_first():
    listener = Listener()

    async def twice() -> None:
        agents = RunAgents("train-k3f9x", SECRET, Timing(), listener)
        port = await agents.open(0, host="127.0.0.1")
        first, second = (CoordinatorLink(SECRET, ["127.0.0.1"], port, "n1") for _ in range(2))
        for link in (first, second):
            assert await asyncio.to_thread(link.connect, HELLO)
        first.send({"note": "one"})
        assert await asyncio.to_thread(first.receive) == [] and first.sock is None, "the first agent is disconnected"
        second.send({"beat": True})
        second.send({"note": "two"})
        while ("said", "n1", UserNote("two")) not in listener.log:
            await asyncio.sleep(0.002)
        second.close()
        while agents.peers:
            await asyncio.sleep(0.002)
        agents.close()

    asyncio.run(twice())
    assert listener.log == [
        ("came", "n1"),
        ("lost", "n1", "another agent replaced it", False),
        ("came", "n1"),
        ("said", "n1", UserNote("two")),
        ("lost", "n1", "its agent is gone", False),
    ]


def test_agent_with_unreadable_messages_is_disconnected():
    listener = Listener()

    async def talk() -> None:
        agents = RunAgents("train-k3f9x", SECRET, Timing(), listener)
        port = await agents.open(0, host="127.0.0.1")
        link = CoordinatorLink(SECRET, ["127.0.0.1"], port, "n1")
        assert await asyncio.to_thread(link.connect, HELLO)
        link.send({"ended": "yes"})
        while agents.peers or not listener.log:
            await asyncio.sleep(0.002)
        link.close()
        agents.close()

    asyncio.run(talk())
    assert listener.log == [("came", "n1"), ("lost", "n1", "its agent is gone", False)]
