"""Attacks on the connections of a run: by somebody who listens, who sits in between, or who floods the coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import os
import random
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from dalsegno.health.messages import MOST_PART, Reply, parts, reply_message
from dalsegno.health.wire import MOST_BYTES
from dalsegno.node_agent.loads import _accept_from
from dalsegno.recovery.client import ask
from dalsegno.runs.agent.agent import RunAgent
from dalsegno.runs.agent.link import (
    AGENT,
    COORDINATOR,
    TALK_S,
    CoordinatorLink,
    Heart,
    Heartbeat,
    beat_key,
    pack_beat,
    peek_beat,
    read_beat,
)
from dalsegno.runs.agent.snapshots import Snapshots
from dalsegno.runs.coordinator.agents import LIMITS, Peer, RunAgents
from dalsegno.runs.coordinator.group import Shape
from dalsegno.runs.coordinator.liveness import Timing
from dalsegno.runs.coordinator.messages import Noted, Word
from dalsegno.system.children import arguments, find
from dalsegno.wire.frames import Message, Reader, pack, send
from dalsegno.wire.handshake import TAG_BYTES, Seal, nonce, prove
from tests.cli.runs import make_run, tell
from tests.cluster.conftest import Cli
from tests.cluster.runs import kill
from tests.cluster.test_run_kinds import WAITS, Person, end_with
from tests.runs.played import Played
from tests.runs.small_site import SmallSite
from tests.waiting import PATIENCE_S, eventually

SECRET = b"s" * 32
RUN = "train-k3f9x"
HELLO: Message = {"run": RUN, "probe": 1, "found": {"CUDA_VISIBLE_DEVICES": "the agent's hello"}}
TOKEN = "hf_0123456789abcdef"


class InTheMiddle:
    """Passes on what client and server say, frame by frame. `change` sees each frame and says what becomes of it."""

    def __init__(self, port: int, change: Callable[[str, int, bytes], list[bytes]] | None = None) -> None:
        self._port, self._change = port, change or (lambda side, number, frame: [frame])
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.seen: dict[str, list[bytes]] = {"client": [], "server": []}
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._port), PATIENCE_S)
                for side, source, sink in (("client", client, server), ("server", server, client)):
                    threading.Thread(target=self._pass_on, args=(side, source, sink), daemon=True).start()

    def _pass_on(self, side: str, source: socket.socket, sink: socket.socket) -> None:
        reader, number = Reader(1 << 30), 0
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                for body in reader.bodies(data):
                    self.seen[side].append(body)
                    for frame in self._change(side, number, struct.pack("!I", len(body)) + body):
                        sink.sendall(frame)
                    number += 1
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()


class Coordinator:
    """The agents' side of a coordinator, on a loop of its own; `log` is what it was told."""

    def __init__(self, timing: Timing | None = None) -> None:
        self.log: list[tuple[object, ...]] = []
        self.peers: dict[str, Peer] = {}
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.agents = RunAgents(RUN, SECRET, timing or Timing(60.0), self)
        self.port = self.run(self.agents.open(0, host="127.0.0.1"))
        self._watching = asyncio.run_coroutine_threadsafe(self.agents.watch(), self.loop)

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(PATIENCE_S)

    def agent_came(self, peer: Peer) -> None:
        self.peers[peer.name] = peer
        self.log.append(("came", peer.name))

    def agent_said(self, peer: Peer, word: Word) -> None:
        self.log.append(("said", peer.name, word))

    def agent_lost(self, agent: str, why: str, silent: bool) -> None:
        self.log.append(("lost", agent, why))

    def message_too_long(self, agent: str, detail: str) -> None:
        self.log.append(("too long", agent, detail))

    def tell(self, name: str, *messages: Message) -> None:
        def send_all() -> None:
            for message in messages:
                self.peers[name].send(message)

        self.loop.call_soon_threadsafe(send_all)

    def link(self, name: str = "n1", port: int = 0, secret: bytes = SECRET) -> CoordinatorLink:
        return CoordinatorLink(secret, ["127.0.0.1"], port or self.port, name)

    def close(self) -> None:
        async def end() -> None:
            self.agents.close()
            for peer in self.peers.values():
                peer.close()

        self._watching.cancel()
        self.run(end())
        self.loop.call_soon_threadsafe(self.loop.stop)


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    one = Coordinator()
    yield one
    one.close()


def heard(link: CoordinatorLink) -> list[Message]:
    """Everything until the agent hangs up, or has been told to finish."""
    messages = link.early()
    while link.sock is not None and not any("finish" in message for message in messages):
        messages += link.receive()
    return messages


# Listening


class SecretSite(SmallSite):
    """A run whose environment holds a token."""

    def setup(self) -> Message:
        return {**super().setup(), "env": {**super().setup()["env"], "HF_TOKEN": TOKEN}}


def in_loop(test: Callable[..., Any]) -> Callable[..., None]:
    @wraps(test)
    def run(*args: Any, **more: Any) -> None:
        asyncio.run(test(*args, **more))

    return run


@in_loop
async def test_a_listener_on_the_network_learns_nothing_of_a_run(tmp_path: Path):
    script = "print('the worker has', os.environ['HF_TOKEN']); sys.exit('a traceback of the user')"
    run = Played(tmp_path, script, shape=Shape(1, 1, 1), max_restarts=0)
    run.site = SecretSite(**{name: getattr(run.site, name) for name in run.site.__dataclass_fields__})
    try:
        await run.coordinate()
        connect = json.loads(run.folder.connect.read_text())
        listener = InTheMiddle(connect["port"])
        run.folder.connect.write_text(json.dumps({**connect, "addresses": ["127.0.0.1"], "port": listener.port}))
        run.join("n1")
        assert await run.ends() == 1
        assert any(TOKEN in line for line in run.log(0)), "the worker itself had it"
        seen = b"".join(listener.seen["client"] + listener.seen["server"])
        assert len(listener.seen["client"]) > 2 and len(listener.seen["server"]) > 2
        for private in (TOKEN, "HF_TOKEN", str(tmp_path), "traceback", "generation", "setup", "RANK"):
            assert private.encode() not in seen, private
        listener.close()
    finally:
        await run.close()


# In between


def replay(side: str, number: int, frame: bytes) -> list[bytes]:
    return [frame, frame] if side == "server" and number == 2 else [frame]


def change(side: str, number: int, frame: bytes) -> list[bytes]:
    return [frame[:-1] + bytes([frame[-1] ^ 1])] if side == "server" and number == 2 else [frame]


def leave_out(side: str, number: int, frame: bytes) -> list[bytes]:
    return [] if side == "server" and number == 2 else [frame]


def inject(side: str, number: int, frame: bytes) -> list[bytes]:
    return [frame, pack({"setup": {"python": "/tmp/evil"}})] if side == "server" and number == 2 else [frame]


class Swap:
    """Exchanges two messages of the coordinator."""

    def __init__(self) -> None:
        self._held: list[bytes] = []

    def __call__(self, side: str, number: int, frame: bytes) -> list[bytes]:
        if side != "server" or number not in (2, 3):
            return [frame]
        self._held.append(frame)
        return self._held[::-1] if len(self._held) == 2 else []


class Reflect:
    """Sends the agent what it has said itself."""

    def __init__(self) -> None:
        self._said: list[bytes] = []

    def __call__(self, side: str, number: int, frame: bytes) -> list[bytes]:
        if side == "client":
            self._said.append(frame)
            return [frame]
        return [self._said[1]] if number == 2 else [frame]


@pytest.mark.parametrize("attack", [replay, change, leave_out, inject, Swap(), Reflect()], ids=str)
def test_an_agent_obeys_nothing_that_its_coordinator_has_not_said_now(coordinator: Coordinator, attack: Any):
    middle = InTheMiddle(coordinator.port, attack)
    link = coordinator.link(port=middle.port)
    assert link.connect(HELLO)
    eventually(lambda: ("came", "n1") in coordinator.log)
    orders: list[Message] = [{"first": 1}, {"second": 2}, {"third": 3}, {"finish": 0}]
    coordinator.tell("n1", *orders)
    obeyed = heard(link)
    assert obeyed == orders[: len(obeyed)] and len(obeyed) < len(orders), "what came before the attack, and no more"
    assert link.sock is None
    middle.close()


@pytest.mark.parametrize("attack", [replay, change, inject], ids=str)
def test_a_coordinator_believes_nothing_that_its_agent_has_not_said_now(coordinator: Coordinator, attack: Any):
    middle = InTheMiddle(
        coordinator.port,
        lambda side, number, frame: attack("server", number, frame) if side == "client" else [frame],
    )
    link = coordinator.link(port=middle.port)
    assert link.connect(HELLO)
    for text in ("one", "two", "three"):
        link.send({"note": text})
    eventually(lambda: any(entry[0] == "lost" for entry in coordinator.log))
    said = [entry[2] for entry in coordinator.log if entry[0] == "said"]
    assert said == [Noted("one"), Noted("two")][: len(said)]
    middle.close()
    link.close()


def test_who_relays_the_proofs_of_both_sides_has_gained_nothing(coordinator: Coordinator):
    """The classic man in the middle: both proofs are genuine, and he knows neither key."""
    middle = InTheMiddle(coordinator.port)
    link = coordinator.link(port=middle.port)
    assert link.connect(HELLO)
    eventually(lambda: ("came", "n1") in coordinator.log)
    coordinator.tell("n1", {"setup": {"env": {"HF_TOKEN": TOKEN}}}, {"finish": 0})
    assert len(heard(link)) == 2
    assert TOKEN.encode() not in b"".join(middle.seen["server"])
    middle.close()


def test_a_proof_sent_back_to_its_sender_proves_nothing(coordinator: Coordinator):
    """A stranger who answers a coordinator with its own nonce, or an agent with its own proof."""
    with socket.create_connection(("127.0.0.1", coordinator.port), PATIENCE_S) as sock:
        theirs = next(iter(Reader().feed(sock.recv(4096))))["nonce"]
        send(sock, {"run": RUN, "agent": "n1", "nonce": theirs, "proof": theirs})
        assert sock.recv(4096) == b""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def reflect() -> None:
            sock, _ = server.accept()
            with sock:
                send(sock, {"nonce": nonce()})
                proof = next(iter(Reader().feed(sock.recv(65536))))["proof"]
                send(sock, {"proof": proof})

        thread = threading.Thread(target=reflect)
        thread.start()
        assert not coordinator.link(port=server.getsockname()[1]).connect(HELLO)
        thread.join()
    assert coordinator.log == []


def test_a_message_of_another_connection_is_refused(coordinator: Coordinator):
    """The same agent, the same secret, one handshake later."""
    said = ("0" * 32, "1" * 32, RUN, "n1")
    recorded = Seal(SECRET, AGENT, *said).close({"note": "from an earlier connection"})
    link = coordinator.link()
    assert link.connect(HELLO) and link.sock is not None
    link.sock.sendall(recorded)
    eventually(lambda: ("lost", "n1", "its agent is gone") in coordinator.log)
    assert not [entry for entry in coordinator.log if entry[0] == "said"]


@pytest.mark.parametrize("side", [AGENT.partition("/")[0], AGENT.partition("/")[0] + "/2", COORDINATOR])
def test_the_proof_of_another_version_or_role_is_refused(coordinator: Coordinator, side: str):
    with socket.create_connection(("127.0.0.1", coordinator.port), PATIENCE_S) as sock:
        theirs, ours = next(iter(Reader().feed(sock.recv(4096))))["nonce"], nonce()
        proof = prove(SECRET, side, theirs, ours, RUN, "n1")
        send(sock, {"run": RUN, "agent": "n1", "nonce": ours, "proof": proof})
        assert sock.recv(4096) == b"" and coordinator.log == []


# Noise

NOISE = 400 if os.environ.get("DALSEGNO_LONG") else 15


@pytest.mark.parametrize("seed", range(NOISE))
def test_whatever_a_stranger_sends_changes_nothing(coordinator: Coordinator, seed: int):
    """Pieces of a real handshake, cut, changed and repeated; huge lengths; deep and wide JSON; noise."""
    chance = random.Random(seed)
    link = coordinator.link("n2")
    assert link.connect(HELLO)
    eventually(lambda: ("came", "n2") in coordinator.log)
    before = list(coordinator.log)
    said = (nonce(), nonce(), RUN, "n1")
    hello = pack({"run": RUN, "agent": "n1", "nonce": said[1], "proof": prove(SECRET, AGENT, *said)})
    deep, wide = b"[" * 2000, b'{"a":' * 400
    pieces = [
        hello, Seal(SECRET, AGENT, *said).close(HELLO), struct.pack("!I", len(deep)) + deep,
        struct.pack("!I", len(wide)) + wide, struct.pack("!I", (1 << 32) - 1), struct.pack("!I", 0),
        pack({"agent": ["n1"], "nonce": {}, "run": RUN, "proof": "\ud800"}), pack({"n": 10**1500}),
        b'\0\0\0\x0a{"a": NaN}', chance.randbytes(100),
    ]  # fmt: skip
    for _ in range(10):
        data = bytearray(b"".join(chance.choices(pieces, k=3)))
        for _ in range(chance.randrange(5)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        sock = socket.create_connection(("127.0.0.1", coordinator.port), PATIENCE_S)
        with sock, contextlib.suppress(ConnectionError):
            sock.sendall(bytes(data))
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(4096):
                pass
    link.send({"note": "still here"})
    eventually(lambda: ("said", "n2", Noted("still here")) in coordinator.log)
    assert coordinator.log == [*before, ("said", "n2", Noted("still here"))]
    link.close()


# Floods

FLOOD = """
    import os, select, socket, sys, time
    kind, source, host, port = sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4]
    if os.getuid() == 0:
        os.setuid(65534)
    until, held = time.monotonic() + 100, []
    beat = bytes.fromhex(sys.argv[5])
    frames = ((12).to_bytes(4, "big") + b'{"events":0}') * 300
    print("begun", flush=True)
    while time.monotonic() < until and not select.select([0], [], [], 0)[0]:  # until the test closes our input
        try:
            if kind == "udp":
                held = held or [socket.socket(socket.AF_INET, socket.SOCK_DGRAM)]
                held[0].sendto(beat, (host, int(port)))
                continue
            sock = socket.socket(socket.AF_UNIX if kind == "unix" else socket.AF_INET)
            sock.settimeout(1.0)
            if source:
                sock.bind((source, 0))
            sock.connect(host if kind == "unix" else (host, int(port)))
            sock.setblocking(False)
            said = {"fat": (1 << 20).to_bytes(4, "big") + b"x" * 60000, "slow": bytes(2), "unix": frames}
            sock.send(said[kind])
            held = [*held[-900:], sock]
        except OSError:
            pass
"""
FORGED = pack_beat(b"x" * 32, Heartbeat("n1", 1 << 62)).hex()


@contextlib.contextmanager
def flood(port: int, *kinds: str) -> Iterator[None]:
    """Strangers with another uid, at other addresses of the loopback network."""
    with begun(
        [sys.executable, "-c", textwrap.dedent(FLOOD), kind, f"127.66.0.{number + 1}", "127.0.0.1", str(port), FORGED]
        for number, kind in enumerate(kinds)
    ):
        yield


@contextlib.contextmanager
def begun(commands: Iterable[list[str]], env: dict[str, str] | None = None) -> Iterator[None]:
    """Attackers that have begun, until they are ended."""
    pipe = subprocess.PIPE
    children = [subprocess.Popen(argv, stdin=pipe, stdout=pipe, env=env) for argv in commands]
    try:
        for child in children:
            assert child.stdout is not None and child.stdout.readline() == b"begun\n"
        yield
    finally:
        for child in children:
            child.communicate()


def own_sockets() -> int:
    return sum(1 for fd in os.listdir("/proc/self/fd") if "socket" in _target(fd))


def _target(fd: str) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/self/fd/{fd}")
    return ""


def test_agents_join_and_stay_while_strangers_flood_the_coordinator():
    coordinator = Coordinator(Timing(gone_s=600.0))  # these agents have no heart: it is their connections that count
    before = own_sockets()
    links = [coordinator.link(f"n{number}") for number in range(16)]
    try:
        with flood(coordinator.port, "slow", "fat", "udp"), ThreadPoolExecutor(16) as pool:
            for joined in [pool.submit(eventually, lambda link=link: link.connect(HELLO)) for link in links]:
                joined.result()
            assert own_sockets() - before < 2 * 16 + 300, "strangers are bounded in number"
            for link in links:
                link.send({"note": "here"})
            eventually(lambda: sum(entry[0] == "said" for entry in coordinator.log) == 16)
            assert not [entry for entry in coordinator.log if entry[0] == "lost"]
    finally:
        for link in links:
            link.close()
        coordinator.close()


def test_strangers_cannot_take_more_connections_than_there_are_for_them(coordinator: Coordinator):
    strangers = [socket.create_connection(("127.0.0.1", coordinator.port), PATIENCE_S) for _ in range(600)]
    eventually(lambda: sum(is_cut_off(sock) for sock in strangers) >= 600 - LIMITS.strangers)
    link = coordinator.link()
    assert link.connect(HELLO)
    for sock in strangers:
        sock.close()
    link.close()


def is_cut_off(sock: socket.socket) -> bool:
    sock.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        try:
            while sock.recv(4096):
                pass
        except ConnectionError:
            pass
        return True
    return False


def test_a_flood_of_datagrams_leaves_the_coordinator_time_for_its_work():
    coordinator = Coordinator()
    try:
        link = coordinator.link()
        assert link.connect(HELLO)
        with flood(coordinator.port, "udp", "udp"):
            for number in range(20):
                link.send({"note": str(number)})
                eventually(lambda number=number: ("said", "n1", Noted(str(number))) in coordinator.log, every_s=0.01)
        link.close()
    finally:
        coordinator.close()


def test_a_stranger_who_says_nothing_is_sent_away_in_time(coordinator: Coordinator):
    began = time.monotonic()
    with socket.create_connection(("127.0.0.1", coordinator.port), PATIENCE_S) as sock:
        while sock.recv(4096):
            pass
    assert time.monotonic() - began < PATIENCE_S / 2 and len(coordinator.agents._door._server.strangers) == 0


# A hostile server


@contextlib.contextmanager
def hostile(answers: Callable[[socket.socket], None]) -> Iterator[int]:
    """Somebody who took a coordinator's port; gives the port."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    sock, _ = server.accept()
                    with sock, contextlib.suppress(OSError):
                        answers(sock)

        threading.Thread(target=serve, daemon=True).start()
        yield int(server.getsockname()[1])
        server.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("seed", range(NOISE))
def test_an_agent_survives_whatever_answers_in_its_coordinators_place(seed: int):
    chance = random.Random(seed)
    pieces = [
        pack({"nonce": nonce()}), pack({"nonce": "é" * 32}), pack({"nonce": ["0" * 32]}), pack({}), b"\0\0\0\2[]",
        pack({"proof": "0" * 64}), struct.pack("!I", 1 << 31), struct.pack("!I", 5000) + b"[" * 5000,
        pack({"nonce": nonce(), "run": None, "sealed": 17}), chance.randbytes(60), b"",
    ]  # fmt: skip

    def answers(sock: socket.socket) -> None:
        sock.settimeout(0.2)
        for _ in range(chance.randrange(1, 4)):
            sock.sendall(chance.choice(pieces))
            with contextlib.suppress(socket.timeout):
                sock.recv(65536)

    with hostile(answers) as port:
        link = CoordinatorLink(SECRET, ["127.0.0.1"], port, "n1")
        assert not link.connect(HELLO) and link.sock is None


def test_an_agent_does_not_wait_for_ever_for_one_that_drips_its_greeting():
    """Five seconds are for the whole handshake, not for each byte."""

    def drip(sock: socket.socket) -> None:
        for byte in pack({"nonce": "0" * 32, "more": "x" * 4000}):
            sock.sendall(bytes([byte]))
            time.sleep(0.05)

    with hostile(drip) as port:
        began = time.monotonic()
        assert not CoordinatorLink(SECRET, ["127.0.0.1"], port, "n1").connect(HELLO)
        assert time.monotonic() - began < PATIENCE_S / 2


def test_who_takes_a_dead_coordinators_port_and_says_nothing_holds_agents_up_once(coordinator: Coordinator):
    """A successor waits ten seconds for agents. They must not spend that time with somebody who has its old port."""
    addresses = [f"127.0.0.{number}" for number in (1, 2, 3)]
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(socket.create_server((addresses[0], 0)))
        port = int(first.getsockname()[1])
        for address in addresses[1:]:
            stack.enter_context(socket.create_server((address, port)))  # their kernel answers, and nobody greets
        link = CoordinatorLink(SECRET, addresses, port, "n1")
        began = time.monotonic()
        assert not link.connect(HELLO)
        assert time.monotonic() - began < 2 * TALK_S, "one of the three was waited for"
        link.addresses = ("127.0.0.1", *addresses[1:])
        link.port = coordinator.port  # as on one of the ports that a successor falls back on
        began = time.monotonic()
        assert link.connect(HELLO) and time.monotonic() - began < TALK_S, "and it is not the first to be asked again"
        link.close()


def test_an_agent_holds_no_more_than_a_greeting_of_one_that_has_proved_nothing():
    sent: list[int] = []

    def pour(sock: socket.socket) -> None:
        sock.sendall(struct.pack("!I", 1 << 20))
        while True:
            sent.append(sock.send(b"x" * 65536))

    with hostile(pour) as port:
        assert not CoordinatorLink(SECRET, ["127.0.0.1"], port, "n1").connect(HELLO)
    assert sum(sent) < 8 << 20, "it hung up at the length"


# Datagrams


@pytest.mark.parametrize("seed", range(3))
def test_whatever_datagrams_come_only_signed_ones_count(seed: int):
    chance = random.Random(seed)
    good, answer = pack_beat(SECRET, Heartbeat("n1", 1 << 60)), pack_beat(SECRET, Heartbeat("", 5))
    for _ in range(2000):
        data = bytearray(chance.choice([good, answer, chance.randbytes(40), b"", b"\xff" * 500]))
        for _ in range(chance.randrange(1, 4)):
            if data:
                data[chance.randrange(len(data))] ^= chance.randrange(1, 256)
        assert bytes(data) in (good, answer) or read_beat(SECRET, bytes(data)) is None


def recorded(link: CoordinatorLink, count: int) -> list[bytes]:
    """Heartbeats as a real agent sends them over this connection, and as a listener sees them."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        sock.settimeout(PATIENCE_S)
        heart = Heart(link.name)
        heart.aim("127.0.0.1", int(sock.getsockname()[1]), beat_key(link.secret, *link.said))
        return [sock.recv(512) for _ in range(count)]


def test_recorded_heartbeats_count_for_nothing_after_the_coordinator_has_restarted():
    """A successor does not know which numbers its predecessor has heard. What counts is answered."""
    before, after = Coordinator(), Coordinator()
    try:
        links = [each.link() for each in (before, after)]
        assert all(link.connect(HELLO) for link in links)
        old, new = (recorded(link, 3) for link in links)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.settimeout(PATIENCE_S)
            for data in (*old, *new):
                sock.sendto(data, ("127.0.0.1", after.port))
            answers = [peek_beat(sock.recv(512)) for _ in new]
        assert answers == [Heartbeat("", beat.number) for data in new if (beat := peek_beat(data))]
        for link in links:
            link.close()
    finally:
        before.close()
        after.close()


def test_a_signature_of_a_heartbeat_is_of_no_use_elsewhere():
    """Neither is what is signed as a proof: each kind has a label of its own."""
    beat = pack_beat(SECRET, Heartbeat("n1", 7))
    assert beat[-8:] != hmac.digest(SECRET, beat[:-8], "sha256")[:8]


# On a real cluster


@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_a_user_who_floods_every_port_and_socket_disturbs_neither_runs_nor_nodes(shared: Cli):
    """bob attacks from a login node: ada's coordinator, the controller's server for agents, and its socket."""
    ada = Person(shared.home, shared.uid)
    (shared.home / "runs").mkdir(exist_ok=True)
    (shared.home / "runs").chmod(0o1777)
    work = shared.home / f"work-flood-{os.urandom(2).hex()}"
    work.mkdir()
    work.chmod(0o777)
    run = ada.begin(work, WAITS, "-N", "2", "--nproc-per-node", "1")
    coordinator = json.loads(run.folder.connect.read_text())
    controller = shared.home / "clusters/shared/run/controller.sock"
    head, port = coordinator["addresses"][0], str(coordinator["port"])
    agents_host, _, agents_port = server_for_agents(shared).rpartition(":")

    def bob(*words: str) -> list[str]:
        return shared.argv("shell", "-u", "bob", "--", sys.executable, "-c", textwrap.dedent(FLOOD), *words, FORGED)

    attackers = [
        bob("slow", "", head, port), bob("fat", "", head, port), bob("udp", "", head, port),
        bob("slow", "", agents_host, agents_port), bob("unix", "", str(controller), "0"),
    ]  # fmt: skip
    with begun(attackers, shared.env):
        kill(run.workers()[0])
        run.wait_for_generation(2)
        assert "runs" in ask(controller, {"runs": True}, PATIENCE_S)
        told = ask(controller, {"agents": True}, PATIENCE_S)["agents"]
        assert {node["presence"] for node in told} == {"connected"}
        assert end_with(run, 0) == 0
    assert run.journal("lost") == []


def server_for_agents(cli: Cli) -> str:
    """Where the node agents of this home's cluster call their controller, as every user sees it in their arguments."""
    agents = find(
        lambda pid: "--controller" in arguments(pid) and any(str(cli.home) in each for each in arguments(pid))
    )
    (found,) = {words[words.index("--controller") + 1] for words in (arguments(agent.pid) for agent in agents)}
    return found


# What users write, on its way through what root runs


@pytest.mark.parametrize("letter", ["a", "\x01", "é", "\U0001f600"])
def test_no_text_of_a_user_makes_a_message_that_the_controller_refuses(letter: str):
    """The arguments of a process are in the evidence of its node. JSON makes up to twelve bytes of one letter."""
    text = letter * (256 << 10)
    cut = list(parts(text))
    assert "".join(cut) == text and list(parts("")) == [""]
    seal = Seal(SECRET, "agent")
    for part in cut:
        body = seal.close(reply_message(Reply(1, file="ps.txt", part=part)))[4:]
        assert len(body) <= MOST_BYTES + TAG_BYTES and len(part) <= MOST_PART
    assert len(cut) <= 64


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be tricked into being root")
@pytest.mark.parametrize("words", [["cancel"], ["logs", "--follow"]], ids=str)
def test_root_starts_nothing_that_the_path_of_another_users_run_leads_to(tmp_path: Path, words: list[str]):
    """`sudo dalsegno cancel RUN`, in a folder where several users have their runs."""
    tmp_path.chmod(0o755)
    trap, sprung = tmp_path / "bin", tmp_path / "sprung"
    trap.mkdir()
    for name in ("squeue", "scontrol", "scancel", "sinfo"):
        (trap / name).write_text(f"#!/bin/sh\nid -u >> {sprung}\n")
        (trap / name).chmod(0o755)
    run = make_run(tmp_path / "runs")
    tell(run, coordinator_pid=1)
    run.environment.write_text(json.dumps({"PATH": f"{trap}:/usr/bin:/bin"}))
    for path in (run.root, *run.root.rglob("*")):
        os.chown(path, 65534, 65534)
    env = {**os.environ, "DALSEGNO_RUNS": str(tmp_path / "runs"), "DALSEGNO_HOME": str(tmp_path / "home")}
    argv = [sys.executable, "-m", "dalsegno", words[0], "train-k3f9x", *words[1:]]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert not sprung.exists(), "a program of the user's ran as root"
    assert done.returncode == 1 and "belongs to nobody" in done.stderr and "sudo -u nobody" in done.stderr, done.stderr
    assert not run.cancel.exists()


@contextlib.contextmanager
def taken(names: Iterable[str]) -> Iterator[None]:
    """Any user can bind any abstract name, and can read in /proc/net/unix which ones others have."""
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(socket.socket(socket.AF_UNIX)).bind("\0" + name)
        yield


def test_nobody_can_take_the_name_of_an_agents_socket_before_it():
    with taken([f"dalsegno.{os.getuid()}.{RUN}.{os.getpid()}"]):
        agent = RunAgent({"run": RUN, "secret": SECRET.hex(), "addresses": ["127.0.0.1"], "port": 1}, "n1")
        agent.door._listener.close()


def test_nobody_can_end_an_agent_by_taking_the_names_of_its_savers():
    door = f"dalsegno.{os.getpid()}.door"
    snapshots = Snapshots(RUN, "n1", b"", door, lambda *task: True, lambda message: None)
    answers: list[Message] = []
    with taken(f"{door}.saver.0.{number}" for number in range(1, 50)):
        for _ in range(3):
            snapshots.hear({"saver": 0}, answers.append)
    assert len({answer["saver"] for answer in answers}) == 3


def test_the_longest_id_of_a_run_still_makes_a_name_for_a_socket():
    agent = RunAgent({"run": "r" * 120, "secret": SECRET.hex(), "addresses": ["127.0.0.1"], "port": 1}, "n1")
    answers: list[Message] = []
    agent.snapshots._fork = lambda *task: True
    agent.snapshots.hear({"saver": 1023}, answers.append)
    assert answers[0]["saver"]
    agent.door._listener.close()


def test_a_stranger_who_calls_first_is_not_taken_for_the_nodes_own_loopback():
    """A node whose loopback changes bytes is replaced. Any user of the node can call the port and send other bytes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(PATIENCE_S)
        strangers = [socket.create_connection(server.getsockname()) for _ in range(3)]
        for stranger in strangers:
            stranger.sendall(b"other bytes")
        with socket.create_connection(server.getsockname()) as own, _accept_from(server, own.getsockname()) as sock:
            own.sendall(b"own")
            sock.settimeout(PATIENCE_S)
            assert sock.recv(16) == b"own"
        for stranger in strangers:
            stranger.close()
