"""Agent and coordinator authenticate with the run's secret; strangers are rejected and disturb no one."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from dalsegno.runs.agent.link import AGENT, CoordinatorLink
from dalsegno.runs.coordinator.agents.agents import AgentServer, Peer
from dalsegno.wire.frames import Message, Reader, pack, send
from dalsegno.wire.handshake import Seal, holds, nonce, prove
from tests.waiting import eventually

SECRET = b"s" * 32
HELLO: Message = {"run": "train-k3f9x", "probe": 1, "found": {}}


class RunningServer:
    """A coordinator's agent server in its own event loop, with a log of its callbacks."""

    def __init__(self, secret: bytes = SECRET) -> None:
        self.log: list[tuple[object, ...]] = []
        self.peers: dict[str, Peer] = {}
        self._server = AgentServer("train-k3f9x", secret, self._came, self._said, self._gone, self._too_long)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.port = asyncio.run_coroutine_threadsafe(self._server.open(0), self.loop).result(60)

    def _came(self, peer: Peer) -> None:
        self.peers[peer.name] = peer
        self.log.append(("came", peer.name))

    def _said(self, peer: Peer, message: Message) -> None:
        self.log.append(("said", peer.name, message))

    def _gone(self, peer: Peer) -> None:
        self.log.append(("gone", peer.name))

    def _too_long(self, name: str, detail: str) -> None:
        self.log.append(("too long", name, detail))

    def heard(self, entry: tuple[object, ...]) -> bool:
        return eventually(lambda: entry in self.log, every_s=0.002)

    def tell(self, name: str, message: Message) -> None:
        self.loop.call_soon_threadsafe(lambda: self.peers[name].send(message))

    def link(self, name: str = "n1", secret: bytes = SECRET) -> CoordinatorLink:
        return CoordinatorLink(secret, ["127.0.0.1"], self.port, name)

    def stranger(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), 60)

    def close(self) -> None:
        for peer in self.peers.values():
            self.loop.call_soon_threadsafe(peer.close)
        self.loop.call_soon_threadsafe(self._server.close)
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self.loop).result(60)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(60)
        self.loop.close()


@pytest.fixture
def server() -> Iterator[RunningServer]:
    server = RunningServer()
    yield server
    server.close()


def is_cut_off(sock: socket.socket) -> bool:
    """Return once the peer closes the connection, after at most its nonce."""
    sock.settimeout(60)
    with contextlib.suppress(ConnectionResetError):
        while sock.recv(4096):
            pass
    return True


def test_agent_with_the_secret_connects_and_both_sides_send(server: RunningServer):
    link = server.link()
    assert link.connect(HELLO) and server.heard(("came", "n1"))
    link.send({"ready": 1})
    assert server.heard(("said", "n1", {"ready": 1}))
    server.tell("n1", {"setup": 2})
    messages: list[Message] = []
    while not messages:
        messages = link.receive()
    assert messages == [{"setup": 2}]
    link.close()
    assert server.heard(("gone", "n1"))


def test_agent_with_another_secret_is_refused(server: RunningServer):
    assert not server.link(secret=b"x" * 32).connect(HELLO)
    assert server.log == []


def test_agent_of_another_run_is_refused(server: RunningServer):
    assert not server.link().connect({**HELLO, "run": "train-other"})
    assert server.log == []


def test_agent_rejects_a_coordinator_without_the_secret():
    """A process that took over the coordinator's port cannot make a proof."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def pretend(proof: object) -> None:
            sock, _ = server.accept()
            with sock:
                send(sock, {"nonce": nonce()})
                sock.recv(65536)
                sock.sendall(pack({"proof": proof}) + pack({"setup": {"script": "evil.py"}}))

        for proof in ("0" * 64, None, 17, prove(b"x" * 32, "coordinator", "a", "b", "n1")):
            thread = threading.Thread(target=pretend, args=(proof,))
            thread.start()
            link = CoordinatorLink(SECRET, ["127.0.0.1"], server.getsockname()[1], "n1")
            assert not link.connect(HELLO) and link.sock is None
            thread.join(60)


@pytest.mark.parametrize("proof", ["", "0" * 64, "é", None, 17, ["x"], {}])
def test_invalid_proof_is_rejected(proof: object):
    assert not holds(proof, SECRET, "agent", "a", "b", "n1")


def test_proof_is_bound_to_side_name_and_nonce():
    proof = prove(SECRET, "agent", "a", "b", "n1")
    assert holds(proof, SECRET, "agent", "a", "b", "n1")
    for side, *said in (("coordinator", "a", "b", "n1"), ("agent", "b", "a", "n1"), ("agent", "a", "b", "n2")):
        assert not holds(proof, SECRET, side, *said)


def test_recorded_proof_cannot_be_replayed(server: RunningServer):
    link = server.link()
    assert link.connect(HELLO)
    overheard = shake(server.stranger())
    assert server.heard(("came", "n7"))
    again = server.stranger()
    read_nonce(again)
    again.sendall(overheard)
    assert is_cut_off(again)
    assert [entry for entry in server.log if entry[0] == "came"] == [("came", "n1"), ("came", "n7")]
    link.close()


def read_nonce(sock: socket.socket) -> str:
    sock.settimeout(60)
    reader = Reader()
    while True:
        for message in reader.feed(sock.recv(4096)):
            return str(message["nonce"])


def shake(sock: socket.socket) -> bytes:
    """Do a complete handshake by hand and return its bytes, as seen on the wire."""
    theirs, ours = read_nonce(sock), nonce()
    said = (theirs, ours, "train-k3f9x", "n7")
    hello = {"run": "train-k3f9x", "agent": "n7", "nonce": ours, "proof": prove(SECRET, AGENT, *said)}
    data = pack(hello) + Seal(SECRET, AGENT, *said).close(HELLO)
    sock.sendall(data)
    assert "proof" in next(iter(Reader().feed(sock.recv(4096))))
    sock.close()
    return data


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: n1\r\n\r\n",
        b"\x7f\xff\xff\xff" + b"x" * 1000,
        pack({}),
        pack({"agent": "n1", "nonce": "a", "run": "train-k3f9x", "proof": "é"}),
        pack({"agent": "n1", "nonce": "a", "run": "train-k3f9x", "proof": None}),
        b"",
    ],
)
def test_stranger_is_disconnected_and_others_are_served(server: RunningServer, data: bytes):
    stranger = server.stranger()
    stranger.sendall(data)
    if not data:
        stranger.close()
    link = server.link()
    assert link.connect(HELLO), "while the stranger is still connected"
    assert not data or is_cut_off(stranger)
    stranger.close()
    link.send({"ready": 1})
    assert server.heard(("said", "n1", {"ready": 1}))
    link.close()


def test_agent_that_breaks_the_protocol_is_disconnected(server: RunningServer):
    link = server.link()
    assert link.connect(HELLO) and link.sock is not None
    link.sock.sendall(b"\xff\xff\xff\xff")
    assert server.heard(("gone", "n1")) and is_cut_off(link.sock)
    link.close()


def test_next_address_is_tried_if_one_does_not_answer(server: RunningServer):
    link = CoordinatorLink(SECRET, ["127.0.0.99", "127.0.0.1"], server.port, "n1")
    taken = socket.socket()
    taken.bind(("127.0.0.98", 0))
    assert link.connect(HELLO)
    taken.close()
    link.close()


def test_send_on_a_closed_connection_raises_nothing():
    link = CoordinatorLink(SECRET, ["127.0.0.1"], 1, "n1")
    link.send({"ready": 1})
    assert not link.connect(HELLO)
    link.send({"ready": 1})
