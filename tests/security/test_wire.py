"""Attacks on the connections of a run: eavesdropping, tampering, impersonation and floods."""

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

from dalsegno.health.messages import MAX_PART, Reply, parts, reply_message
from dalsegno.health.wire import MAX_MESSAGE_BYTES
from dalsegno.node_agent.loads import _accept_from
from dalsegno.recovery.client import ask
from dalsegno.runs.agent.agent import RunAgent
from dalsegno.runs.agent.link import (
    AGENT,
    COORDINATOR,
    TALK_S,
    CoordinatorLink,
    Heartbeat,
    HeartbeatSender,
    beat_key,
    pack_beat,
    peek_beat,
    read_beat,
)
from dalsegno.runs.agent.snapshots import Snapshots
from dalsegno.runs.coordinator.agents.agents import LIMITS, Peer, RunAgents
from dalsegno.runs.coordinator.agents.liveness import Timing
from dalsegno.runs.coordinator.agents.messages import AgentMessage, UserNote
from dalsegno.runs.coordinator.generations.group import Shape
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
    """A proxy between client and server. `change` gets each frame and returns the frames to forward."""

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
    """The agents' side of a coordinator on its own event loop; `log` records its callbacks."""

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

    def agent_connected(self, peer: Peer) -> None:
        self.peers[peer.name] = peer
        self.log.append(("came", peer.name))

    def agent_message(self, peer: Peer, word: AgentMessage) -> None:
        self.log.append(("received", peer.name, word))

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
    """Return all messages until the agent disconnects or is ordered to finish."""
    messages: list[Message] = []
    while link.sock is not None and not any("finish" in message for message in messages):
        messages += link.receive()
    return messages


# Eavesdropping


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
async def test_eavesdropper_learns_nothing_about_a_run(tmp_path: Path):
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
        assert any(TOKEN in line for line in run.log(0)), "the worker has the token"
        seen = b"".join(listener.seen["client"] + listener.seen["server"])
        assert len(listener.seen["client"]) > 2 and len(listener.seen["server"]) > 2
        for private in (TOKEN, "HF_TOKEN", str(tmp_path), "traceback", "generation", "setup", "RANK"):
            assert private.encode() not in seen, private
        listener.close()
    finally:
        await run.close()


# Man in the middle


def replay(side: str, number: int, frame: bytes) -> list[bytes]:
    return [frame, frame] if side == "server" and number == 2 else [frame]


def change(side: str, number: int, frame: bytes) -> list[bytes]:
    return [frame[:-1] + bytes([frame[-1] ^ 1])] if side == "server" and number == 2 else [frame]


def leave_out(side: str, number: int, frame: bytes) -> list[bytes]:
    return [] if side == "server" and number == 2 else [frame]


def inject(side: str, number: int, frame: bytes) -> list[bytes]:
    return [frame, pack({"setup": {"python": "/tmp/evil"}})] if side == "server" and number == 2 else [frame]


class Swap:
    """Swaps two messages of the coordinator."""

    def __init__(self) -> None:
        self._held: list[bytes] = []

    def __call__(self, side: str, number: int, frame: bytes) -> list[bytes]:
        if side != "server" or number not in (2, 3):
            return [frame]
        self._held.append(frame)
        return self._held[::-1] if len(self._held) == 2 else []


class Reflect:
    """Sends the agent its own messages."""

    def __init__(self) -> None:
        self._said: list[bytes] = []

    def __call__(self, side: str, number: int, frame: bytes) -> list[bytes]:
        if side == "client":
            self._said.append(frame)
            return [frame]
        return [self._said[1]] if number == 2 else [frame]


@pytest.mark.parametrize(
    "attack",
    [replay, change, leave_out, inject, Swap(), Reflect()],
    ids=["replay", "change", "leave-out", "inject", "swap", "reflect"],
)
def test_agent_rejects_tampered_coordinator_messages(coordinator: Coordinator, attack: Any):
    middle = InTheMiddle(coordinator.port, attack)
    link = coordinator.link(port=middle.port)
    assert link.connect(HELLO)
    eventually(lambda: ("came", "n1") in coordinator.log)
    orders: list[Message] = [{"first": 1}, {"second": 2}, {"third": 3}, {"finish": 0}]
    coordinator.tell("n1", *orders)
    obeyed = heard(link)
    assert obeyed == orders[: len(obeyed)] and len(obeyed) < len(orders), "only messages before the attack"
    assert link.sock is None
    middle.close()


@pytest.mark.parametrize("attack", [replay, change, inject], ids=["replay", "change", "inject"])
def test_coordinator_rejects_tampered_agent_messages(coordinator: Coordinator, attack: Any):
    middle = InTheMiddle(
        coordinator.port,
        lambda side, number, frame: attack("server", number, frame) if side == "client" else [frame],
    )
    link = coordinator.link(port=middle.port)
    assert link.connect(HELLO)
    for text in ("one", "two", "three"):
        link.send({"note": text})
    eventually(lambda: any(entry[0] == "lost" for entry in coordinator.log))
    received = [entry[2] for entry in coordinator.log if entry[0] == "received"]
    assert received == [UserNote("one"), UserNote("two")][: len(received)]
    middle.close()
    link.close()


def test_man_in_the_middle_gains_nothing_by_relaying_proofs(coordinator: Coordinator):
    """Both proofs are genuine, but the attacker does not know the secret."""
    middle = InTheMiddle(coordinator.port)
    link = coordinator.link(port=middle.port)
    assert link.connect(HELLO)
    eventually(lambda: ("came", "n1") in coordinator.log)
    coordinator.tell("n1", {"setup": {"env": {"HF_TOKEN": TOKEN}}}, {"finish": 0})
    assert len(heard(link)) == 2
    assert TOKEN.encode() not in b"".join(middle.seen["server"])
    middle.close()


def test_reflected_proof_is_refused(coordinator: Coordinator):
    """A stranger answers a coordinator with its own nonce, and an agent with its own proof."""
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
    """The agent and the secret are the same, but the handshake differs."""
    handshake = ("0" * 32, "1" * 32, RUN, "n1")
    recorded = Seal(SECRET, AGENT, *handshake).close({"note": "from an earlier connection"})
    link = coordinator.link()
    assert link.connect(HELLO) and link.sock is not None
    link.sock.sendall(recorded)
    eventually(lambda: ("lost", "n1", "its agent is gone") in coordinator.log)
    assert not [entry for entry in coordinator.log if entry[0] == "received"]


@pytest.mark.parametrize("side", [AGENT.partition("/")[0], AGENT.partition("/")[0] + "/2", COORDINATOR])
def test_the_proof_of_another_version_or_role_is_refused(coordinator: Coordinator, side: str):
    with socket.create_connection(("127.0.0.1", coordinator.port), PATIENCE_S) as sock:
        theirs, ours = next(iter(Reader().feed(sock.recv(4096))))["nonce"], nonce()
        proof = prove(SECRET, side, theirs, ours, RUN, "n1")
        send(sock, {"run": RUN, "agent": "n1", "nonce": ours, "proof": proof})
        assert sock.recv(4096) == b"" and coordinator.log == []


# Random input

NOISE = 400 if os.environ.get("DALSEGNO_LONG") else 8


@pytest.mark.parametrize("seed", range(NOISE))
def test_random_input_of_strangers_changes_nothing(coordinator: Coordinator, seed: int):
    """The input is made of truncated, changed and repeated handshakes, huge lengths, deep and wide JSON, and noise."""
    chance = random.Random(seed)
    link = coordinator.link("n2")
    assert link.connect(HELLO)
    eventually(lambda: ("came", "n2") in coordinator.log)
    before = list(coordinator.log)
    handshake = (nonce(), nonce(), RUN, "n1")
    hello = pack({"run": RUN, "agent": "n1", "nonce": handshake[1], "proof": prove(SECRET, AGENT, *handshake)})
    deep, wide = b"[" * 2000, b'{"a":' * 400
    pieces = [
        hello, Seal(SECRET, AGENT, *handshake).close(HELLO), struct.pack("!I", len(deep)) + deep,
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
    eventually(lambda: ("received", "n2", UserNote("still here")) in coordinator.log)
    assert coordinator.log == [*before, ("received", "n2", UserNote("still here"))]
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
            data = {"fat": (1 << 20).to_bytes(4, "big") + b"x" * 60000, "slow": bytes(2), "unix": frames}
            sock.send(data[kind])
            held = [*held[-900:], sock]
        except OSError:
            pass
"""
FORGED = pack_beat(b"x" * 32, Heartbeat("n1", 1 << 62)).hex()


@contextlib.contextmanager
def flood(port: int, *kinds: str) -> Iterator[None]:
    """Run attackers with another uid, at other addresses of the loopback network."""
    with begun(
        [sys.executable, "-c", textwrap.dedent(FLOOD), kind, f"127.66.0.{number + 1}", "127.0.0.1", str(port), FORGED]
        for number, kind in enumerate(kinds)
    ):
        yield


@contextlib.contextmanager
def begun(commands: Iterable[list[str]], env: dict[str, str] | None = None) -> Iterator[None]:
    """Run attackers until the block ends."""
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


@pytest.mark.cluster  # many processes or connections: too slow for the unit part
def test_agents_join_and_stay_while_strangers_flood_the_coordinator():
    coordinator = Coordinator(Timing(gone_s=600.0))  # these agents send no heartbeats, so only their connections count
    before = own_sockets()
    links = [coordinator.link(f"n{number}") for number in range(16)]
    try:
        with flood(coordinator.port, "slow", "fat", "udp"), ThreadPoolExecutor(16) as pool:
            for joined in [pool.submit(eventually, lambda link=link: link.connect(HELLO)) for link in links]:
                joined.result()
            assert own_sockets() - before < 2 * 16 + 300, "strangers are bounded in number"
            for link in links:
                link.send({"note": "here"})
            eventually(lambda: sum(entry[0] == "received" for entry in coordinator.log) == 16)
            assert not [entry for entry in coordinator.log if entry[0] == "lost"]
    finally:
        for link in links:
            link.close()
        coordinator.close()


def test_unauthenticated_connections_are_limited(coordinator: Coordinator):
    strangers = [socket.create_connection(("127.0.0.1", coordinator.port), PATIENCE_S) for _ in range(600)]
    eventually(lambda: sum(is_cut_off(sock) for sock in strangers) >= 600 - LIMITS.unauthenticated)
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


def test_flood_of_datagrams_does_not_delay_the_coordinator():
    coordinator = Coordinator()
    try:
        link = coordinator.link()
        assert link.connect(HELLO)
        with flood(coordinator.port, "udp", "udp"):
            for number in range(20):
                link.send({"note": str(number)})
                eventually(
                    lambda number=number: ("received", "n1", UserNote(str(number))) in coordinator.log, every_s=0.01
                )
        link.close()
    finally:
        coordinator.close()


@pytest.mark.waits
def test_silent_stranger_is_disconnected_in_time(coordinator: Coordinator):
    began = time.monotonic()
    with socket.create_connection(("127.0.0.1", coordinator.port), PATIENCE_S) as sock:
        while sock.recv(4096):
            pass
    assert time.monotonic() - began < PATIENCE_S / 2 and len(coordinator.agents._server._server.unauthenticated) == 0


# Hostile servers


@contextlib.contextmanager
def hostile(answers: Callable[[socket.socket], None]) -> Iterator[int]:
    """Run a hostile server in place of a coordinator, and yield its port."""
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
def test_agent_survives_random_answers_of_a_false_coordinator(seed: int):
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


@pytest.mark.waits
def test_slow_greeting_does_not_block_an_agent():
    """The limit of five seconds is for the whole handshake, not for each byte."""

    def drip(sock: socket.socket) -> None:
        for byte in pack({"nonce": "0" * 32, "more": "x" * 4000}):
            sock.sendall(bytes([byte]))
            time.sleep(0.05)

    with hostile(drip) as port:
        began = time.monotonic()
        assert not CoordinatorLink(SECRET, ["127.0.0.1"], port, "n1").connect(HELLO)
        assert time.monotonic() - began < PATIENCE_S / 2


@pytest.mark.waits
def test_silent_listener_on_the_old_port_delays_agents_only_once(coordinator: Coordinator):
    """A restarted coordinator waits ten seconds for agents. A listener on its old port must not use up that time."""
    addresses = [f"127.0.0.{number}" for number in (1, 2, 3)]
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(socket.create_server((addresses[0], 0)))
        port = int(first.getsockname()[1])
        for address in addresses[1:]:
            stack.enter_context(
                socket.create_server((address, port))
            )  # the kernel accepts connections, but no process answers
        link = CoordinatorLink(SECRET, addresses, port, "n1")
        began = time.monotonic()
        assert not link.connect(HELLO)
        assert time.monotonic() - began < 2 * TALK_S, "only one of the three was waited for"
        link.addresses = ("127.0.0.1", *addresses[1:])
        link.port = coordinator.port  # like a fallback port of the restarted coordinator
        began = time.monotonic()
        assert link.connect(HELLO) and time.monotonic() - began < TALK_S, "the silent address is not tried first again"
        link.close()


def test_agent_buffers_only_a_greeting_before_authentication():
    sent: list[int] = []

    def pour(sock: socket.socket) -> None:
        sock.sendall(struct.pack("!I", 1 << 20))
        while True:
            sent.append(sock.send(b"x" * 65536))

    with hostile(pour) as port:
        assert not CoordinatorLink(SECRET, ["127.0.0.1"], port, "n1").connect(HELLO)
    assert sum(sent) < 8 << 20, "it disconnected at the length"


# Datagrams


@pytest.mark.parametrize("seed", range(3))
def test_only_signed_heartbeats_are_accepted(seed: int):
    chance = random.Random(seed)
    good, answer = pack_beat(SECRET, Heartbeat("n1", 1 << 60)), pack_beat(SECRET, Heartbeat("", 5))
    for _ in range(2000):
        data = bytearray(chance.choice([good, answer, chance.randbytes(40), b"", b"\xff" * 500]))
        for _ in range(chance.randrange(1, 4)):
            if data:
                data[chance.randrange(len(data))] ^= chance.randrange(1, 256)
        assert bytes(data) in (good, answer) or read_beat(SECRET, bytes(data)) is None


def recorded(link: CoordinatorLink, count: int) -> list[bytes]:
    """Return heartbeats that a real agent sends for this connection."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        sock.settimeout(PATIENCE_S)
        heartbeats = HeartbeatSender(link.name)
        heartbeats.aim("127.0.0.1", int(sock.getsockname()[1]), beat_key(link.session))
        return [sock.recv(512) for _ in range(count)]


def test_replayed_heartbeats_are_ignored_after_a_coordinator_restart():
    """A new coordinator does not know which numbers the old one has received. It answers accepted heartbeats."""
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


def test_heartbeat_signature_is_valid_only_for_heartbeats():
    """Each kind of signature has its own label."""
    beat = pack_beat(SECRET, Heartbeat("n1", 7))
    assert beat[-8:] != hmac.digest(SECRET, beat[:-8], "sha256")[:8]


# On a real cluster


@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_a_user_who_floods_every_port_and_socket_disturbs_neither_runs_nor_nodes(shared: Cli):
    """From a login node, bob attacks ada's coordinator, and the controller's user socket and server for agents."""
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
        agents = ask(controller, {"agents": True}, PATIENCE_S)["agents"]
        assert {node["presence"] for node in agents} == {"connected"}
        assert end_with(run, 0) == 0
    assert run.journal("lost") == []


def server_for_agents(cli: Cli) -> str:
    """Return the address of the controller, which every user can read in the arguments of node agents."""
    agents = find(
        lambda pid: "--controller" in arguments(pid) and any(str(cli.home) in each for each in arguments(pid))
    )
    (found,) = {words[words.index("--controller") + 1] for words in (arguments(agent.pid) for agent in agents)}
    return found


# Text of users in processes of root


@pytest.mark.parametrize("letter", ["a", "\x01", "é", "\U0001f600"])
def test_user_text_is_split_into_messages_that_the_controller_accepts(letter: str):
    """Evidence contains arguments of processes, and JSON needs up to twelve bytes for one character."""
    text = letter * (256 << 10)
    cut = list(parts(text))
    assert "".join(cut) == text and list(parts("")) == [""]
    seal = Seal(SECRET, "agent")
    for part in cut:
        body = seal.close(reply_message(Reply(1, file="ps.txt", part=part)))[4:]
        assert len(body) <= MAX_MESSAGE_BYTES + TAG_BYTES and len(part) <= MAX_PART
    assert len(cut) <= 64


@pytest.mark.skipif(os.getuid() != 0, reason="the victim is root")
@pytest.mark.parametrize("words", [["cancel"], ["logs", "--follow"]], ids=str)
def test_root_does_not_run_programs_from_the_path_of_a_users_run(tmp_path: Path, words: list[str]):
    """An example is `sudo dalsegno cancel RUN` in a folder with runs of several users."""
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
    assert not sprung.exists(), "a program of the user ran as root"
    assert done.returncode == 1 and "belongs to nobody" in done.stderr and "sudo -u nobody" in done.stderr, done.stderr
    assert not run.cancel.exists()


@contextlib.contextmanager
def taken(names: Iterable[str]) -> Iterator[None]:
    """Occupy abstract socket names: any user can bind any name, and read those of others in /proc/net/unix."""
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(socket.socket(socket.AF_UNIX)).bind("\0" + name)
        yield


def test_agent_starts_when_a_guessable_socket_name_is_taken():
    with taken([f"dalsegno.{os.getuid()}.{RUN}.{os.getpid()}"]):
        agent = RunAgent({"run": RUN, "secret": SECRET.hex(), "addresses": ["127.0.0.1"], "port": 1}, "n1")
        agent.worker_socket._listener.close()


def test_taken_saver_names_do_not_end_an_agent():
    door = f"dalsegno.{os.getpid()}.door"
    snapshots = Snapshots(RUN, "n1", b"", door, lambda *task: True, lambda message: None)
    answers: list[Message] = []
    with taken(f"{door}.saver.0.{number}" for number in range(1, 50)):
        for _ in range(3):
            snapshots.handle({"saver": 0}, answers.append)
    assert len({answer["saver"] for answer in answers}) == 3


def test_longest_run_id_fits_into_a_socket_name():
    agent = RunAgent({"run": "r" * 120, "secret": SECRET.hex(), "addresses": ["127.0.0.1"], "port": 1}, "n1")
    answers: list[Message] = []
    agent.snapshots._fork = lambda *task: True
    agent.snapshots.handle({"saver": 1023}, answers.append)
    assert answers[0]["saver"]
    agent.worker_socket._listener.close()


def test_loopback_check_ignores_connections_of_strangers():
    """A node whose loopback corrupts data is replaced. Any user of the node can connect and send other bytes."""
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
