"""Agent and coordinator know each other by the run's secret; strangers get nowhere and disturb nobody."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from dalsegno.runs.agent.link import AGENT, CoordinatorLink
from dalsegno.runs.coordinator.agents import AgentServer, Peer
from dalsegno.wire.frames import Message, Reader, pack, send
from dalsegno.wire.handshake import Seal, holds, nonce, prove
from tests.waiting import eventually

SECRET = b"s" * 32
HELLO: Message = {"run": "train-k3f9x", "probe": 1, "found": {}}


class House:
    """A coordinator's door on a loop of its own, and who came through it."""

    def __init__(self, secret: bytes = SECRET) -> None:
        self.log: list[tuple[object, ...]] = []
        self.peers: dict[str, Peer] = {}
        self.door = AgentServer("train-k3f9x", secret, self._came, self._said, self._gone, self._too_long)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.port = asyncio.run_coroutine_threadsafe(self.door.open(0), self.loop).result(60)

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
        self.loop.call_soon_threadsafe(self.door.close)
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self.loop).result(60)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(60)
        self.loop.close()


@pytest.fixture
def house() -> Iterator[House]:
    house = House()
    yield house
    house.close()


def is_cut_off(sock: socket.socket) -> bool:
    """The other side closes, after at most its nonce."""
    sock.settimeout(60)
    with contextlib.suppress(ConnectionResetError):
        while sock.recv(4096):
            pass
    return True


def test_who_knows_the_secret_is_let_in_and_both_can_talk(house: House):
    link = house.link()
    assert link.connect(HELLO) and house.heard(("came", "n1"))
    link.send({"ready": 1})
    assert house.heard(("said", "n1", {"ready": 1}))
    house.tell("n1", {"setup": 2})
    messages = link.early()
    while not messages:
        messages = link.receive()
    assert messages == [{"setup": 2}]
    link.close()
    assert house.heard(("gone", "n1"))


def test_an_agent_with_another_secret_is_refused(house: House):
    assert not house.link(secret=b"x" * 32).connect(HELLO)
    assert house.log == []


def test_an_agent_of_another_run_is_refused(house: House):
    assert not house.link().connect({**HELLO, "run": "train-other"})
    assert house.log == []


def test_an_agent_does_not_obey_who_does_not_know_the_secret():
    """One that took the coordinator's port: it has no proof of its own, whatever it was told."""
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
def test_what_is_no_proof_does_not_hold(proof: object):
    assert not holds(proof, SECRET, "agent", "a", "b", "n1")


def test_a_proof_is_of_no_use_for_the_other_side_another_name_or_another_nonce():
    proof = prove(SECRET, "agent", "a", "b", "n1")
    assert holds(proof, SECRET, "agent", "a", "b", "n1")
    for side, *said in (("coordinator", "a", "b", "n1"), ("agent", "b", "a", "n1"), ("agent", "a", "b", "n2")):
        assert not holds(proof, SECRET, side, *said)


def test_a_proof_that_was_overheard_is_of_no_use_later(house: House):
    link = house.link()
    assert link.connect(HELLO)
    overheard = shake(house.stranger())
    assert house.heard(("came", "n7"))
    again = house.stranger()
    read_nonce(again)
    again.sendall(overheard)
    assert is_cut_off(again)
    assert [entry for entry in house.log if entry[0] == "came"] == [("came", "n1"), ("came", "n7")]
    link.close()


def read_nonce(sock: socket.socket) -> str:
    sock.settimeout(60)
    reader = Reader()
    while True:
        for message in reader.feed(sock.recv(4096)):
            return str(message["nonce"])


def shake(sock: socket.socket) -> bytes:
    """A whole handshake by hand, as somebody on the wire would see it."""
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
def test_a_stranger_is_cut_off_and_others_are_served(house: House, data: bytes):
    stranger = house.stranger()
    stranger.sendall(data)
    if not data:
        stranger.close()
    link = house.link()
    assert link.connect(HELLO), "while the stranger is still there"
    assert not data or is_cut_off(stranger)
    stranger.close()
    link.send({"ready": 1})
    assert house.heard(("said", "n1", {"ready": 1}))
    link.close()


def test_an_agent_that_stops_speaking_our_language_is_gone(house: House):
    link = house.link()
    assert link.connect(HELLO) and link.sock is not None
    link.sock.sendall(b"\xff\xff\xff\xff")
    assert house.heard(("gone", "n1")) and is_cut_off(link.sock)
    link.close()


def test_the_next_address_is_tried_where_one_does_not_answer(house: House):
    link = CoordinatorLink(SECRET, ["127.0.0.99", "127.0.0.1"], house.port, "n1")
    taken = socket.socket()
    taken.bind(("127.0.0.98", 0))
    assert link.connect(HELLO)
    taken.close()
    link.close()


def test_words_to_a_connection_that_is_gone_raise_nothing():
    link = CoordinatorLink(SECRET, ["127.0.0.1"], 1, "n1")
    link.send({"ready": 1})
    assert not link.connect(HELLO)
    link.send({"ready": 1})
