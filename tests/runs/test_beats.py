"""Heartbeats: signed, numbered, and of no use to an attacker."""

import asyncio
import socket
from collections.abc import Iterable, Iterator

import pytest

from dalsegno.runs.agent.link import AGENT, COORDINATOR, Heartbeat, HeartbeatSender, beat_key, pack_beat, read_beat
from dalsegno.runs.coordinator.agents.liveness import AgentLiveness, Timing
from dalsegno.wire.handshake import Session

KEY = b"s" * 32


def test_beat_survives_the_round_trip():
    for beat in (Heartbeat("n1", 1), Heartbeat("", 1 << 62), Heartbeat("knoten-é", 7)):
        assert read_beat(KEY, pack_beat(KEY, beat)) == beat


def test_unsigned_datagram_is_not_a_beat():
    data = pack_beat(KEY, Heartbeat("n1", 7))
    assert read_beat(b"x" * 32, data) is None
    for position in range(len(data)):
        changed = bytearray(data)
        changed[position] ^= 1
        assert read_beat(KEY, bytes(changed)) is None
    for length in range(len(data)):
        assert read_beat(KEY, data[:length]) is None
    assert read_beat(KEY, data + b"\0") is None


class Listening:
    """A socket in place of the coordinator; `beat`, `data` and `address` are those of the last datagram."""

    def __init__(self) -> None:
        self.sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.sock.bind(("127.0.0.1", 0))
        self.sock.settimeout(60)
        self.heartbeats = HeartbeatSender("n1")
        self.heartbeats.aim("127.0.0.1", self.sock.getsockname()[1], KEY)
        self.next()

    def next(self) -> Heartbeat:
        self.data, self.address = self.sock.recvfrom(512)
        beat = read_beat(KEY, self.data)
        assert beat is not None
        self.beat = beat
        return beat

    def hears(self, data: bytes) -> bool:
        """Send the data. Return whether the sender has accepted it as an answer two heartbeats later."""
        before = self.heartbeats.last_seen
        self.sock.sendto(data, self.address)
        self.next()
        self.next()
        return self.heartbeats.last_seen > before


@pytest.fixture
def listening() -> Iterator[Listening]:
    listening = Listening()
    yield listening
    listening.sock.close()


def test_beats_are_sent_periodically_with_growing_numbers(listening: Listening):
    first = listening.beat
    assert [listening.next(), listening.next()] == [
        Heartbeat("n1", first.number + 1),
        Heartbeat("n1", first.number + 2),
    ]


def test_answer_to_a_beat_counts_once(listening: Listening):
    answer = pack_beat(KEY, Heartbeat("", listening.beat.number))
    assert listening.hears(answer)
    assert not listening.hears(answer), "anyone who has seen it can replay it"


def test_forged_answer_is_ignored(listening: Listening):
    assert not listening.hears(pack_beat(b"x" * 32, Heartbeat("", listening.beat.number)))


def test_reflected_beat_is_not_an_answer(listening: Listening):
    assert not listening.hears(listening.data)


def gone_after(datagrams: Iterable[bytes]) -> tuple[bool, list[bytes]]:
    """Return whether an agent that sends these datagrams, one per check, is lost, and the coordinator's answers."""

    async def watch() -> tuple[bool, list[bytes]]:
        pulse = AgentLiveness(Timing(gone_s=0.2), lambda agent: None)
        pulse.open(0)
        lost = asyncio.Event()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.bind(("127.0.0.1", 0))
            sock.setblocking(False)
            home = ("127.0.0.1", pulse._socket.getsockname()[1])
            task = asyncio.ensure_future(pulse.watch(lambda agent, why: lost.set()))
            pulse.expect("n1", KEY)
            for data in datagrams:
                sock.sendto(data, home)
                await asyncio.sleep(0.025)
                if lost.is_set():
                    break
            task.cancel()
            pulse._socket.close()
            return lost.is_set(), answers(sock)

    return asyncio.run(watch())


def answers(sock: socket.socket) -> list[bytes]:
    heard = []
    while True:
        try:
            heard.append(sock.recv(512))
        except BlockingIOError:
            return heard


def test_beating_agent_is_alive_and_gets_answers():
    lost, heard = gone_after([pack_beat(KEY, Heartbeat("n1", number)) for number in range(1, 16)])
    assert not lost and [read_beat(KEY, data) for data in heard][:3] == [
        Heartbeat("", 1),
        Heartbeat("", 2),
        Heartbeat("", 3),
    ]


def test_every_connection_has_its_own_beat_key():
    said = ("nonce of the coordinator", "nonce of the agent", "run", "n1")
    keys = {key_of(b"s", *said[:at], "another", *said[at + 1 :]) for at in range(len(said))}
    assert len(keys | {key_of(b"s", *said), key_of(b"x", *said)}) == len(said) + 2


def key_of(secret: bytes, *transcript: str) -> bytes:
    return beat_key(Session(secret, AGENT, COORDINATOR, transcript))


def test_replayed_beats_keep_no_agent_alive():
    lost, _ = gone_after([pack_beat(KEY, Heartbeat("n1", 7))] * 200)
    assert lost


def test_forged_beats_keep_no_agent_alive_and_get_no_answer():
    lost, heard = gone_after([pack_beat(b"x" * 32, Heartbeat("n1", number)) for number in range(3, 203)])
    assert lost and heard == []
