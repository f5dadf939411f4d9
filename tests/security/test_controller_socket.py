"""Attacks on the controller's socket, to which every user of the machine can connect."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dalsegno.recovery.client import MAX_ANSWER, ask
from dalsegno.recovery.journal.event import EventKind
from dalsegno.recovery.journal.store import Journal
from dalsegno.recovery.watch import JOURNAL
from dalsegno.system.network import listen_at
from dalsegno.wire.frames import Message, Reader, pack
from dalsegno.wire.requests import CALL_S, MAX_CALLERS, MAX_PER_USER, Answer, RequestServer
from tests.recovery.stage import SOURCE, Stage
from tests.waiting import eventually

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="plays another user")

ATTACK = """
    import os, select, socket, sys
    sys.path.insert(0, sys.argv[2])
    from dalsegno.wire.frames import pack
    os.setuid(65534)
    frames = pack({"events": 0}) * 300
    print("begun", flush=True)
    while os.getppid() != 1:
        held = []
        for _ in range(20):
            sock = socket.socket(socket.AF_UNIX)
            sock.setblocking(False)
            try:
                sock.connect(sys.argv[1])
                sock.send(frames)
            except OSError:
                continue
            held.append(sock)
        for sock in select.select(held, [], [], 0.2)[0]:
            try:
                sock.recv(1 << 20)
            except OSError:
                pass
"""


@contextlib.contextmanager
def attack(path: Path) -> Iterator[None]:
    """Let a plain user repeatedly send thousands of expensive requests on twenty connections."""
    argv = [sys.executable, "-c", textwrap.dedent(ATTACK), str(path), str(SOURCE)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None and child.stdout.readline() == b"begun\n"
            yield
        finally:
            child.kill()


def open_up(path: Path) -> None:
    """Open pytest's folders to other users."""
    for folder in (path, *path.parents):
        if any(part.startswith("pytest-") for part in folder.parts):
            folder.chmod(0o755)


@as_root
def test_a_user_who_floods_the_socket_does_not_stall_the_controller(tmp_path: Path):
    """An earlier version did not answer callers in turn: one write of 6 KB blocked everyone for seconds."""
    open_up(tmp_path)
    stage = Stage(tmp_path)
    (tmp_path / JOURNAL).parent.mkdir(parents=True, exist_ok=True)
    store = Journal(tmp_path / JOURNAL)
    with store._changing(store.records):
        for number in range(500):
            store._event(float(number), f"gpu-{number % 64}", EventKind.DRAIN, "text " * 100)
    store.close()
    stage.up()
    (tmp_path / "run").chmod(0o755)
    try:
        with attack(stage.socket):
            waits = []
            for _ in range(10):
                began = time.monotonic()
                assert "runs" in ask(stage.socket, {"runs": True}, 60)
                waits.append(time.monotonic() - began)
        assert sorted(waits)[5] < 1.0, waits
    finally:
        stage.close()


@as_root
def test_coordinator_inherits_no_descriptor_of_the_controller(tmp_path: Path):
    """The user of the run controls the coordinator, and could forge or truncate the controller's log."""
    open_up(tmp_path)
    stage = Stage(tmp_path)
    stage.up()
    try:
        run = stage.run("own", owner=NOBODY)
        (tmp_path / "home").chmod(0o755)
        (tmp_path / "run").chmod(0o755)
        ask_as = "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path; import os; os.setuid(65534);"
        ask_as += "from dalsegno.recovery.client import start_run; start_run(Path(sys.argv[2]), Path(sys.argv[3]))"
        subprocess.run(
            [sys.executable, "-c", ask_as, str(SOURCE), str(stage.socket), str(run)], check=True, timeout=100
        )
        (pid,) = eventually(lambda: stage.pids(run))
        held = {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
        assert not [path for path in held if path.startswith(str(tmp_path)) and not path.startswith(str(run))], held
        assert not [path for path in held if path.startswith("socket:")], held
    finally:
        stage.close()


# The same in single turns of the loop, independent of the clock


def request_server(path: Path, selector: selectors.BaseSelector, answer: Answer) -> RequestServer:
    return RequestServer(listen_at(path, 0o666), selector, answer, lambda cause, detail: None, MAX_ANSWER)


class UserSocketSite:
    """A user socket that records requests, with callers in this process."""

    def __init__(self, folder: Path, cost_s: float = 0.0) -> None:
        self.selector = selectors.DefaultSelector()
        self.asked: list[Message] = []
        self._cost_s = cost_s
        self.path = folder / "socket"
        self.door = request_server(self.path, self.selector, self._answer)
        self.callers: list[socket.socket] = []

    def _answer(self, uid: int, message: Message) -> Message:
        self.asked.append(message)
        time.sleep(self._cost_s)
        return {"answer": message, "long": "x" * 60_000}

    def call(self, data: bytes = b"") -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(str(self.path))
        sock.setblocking(False)
        sock.send(data)
        self.callers.append(sock)
        return sock

    def turn(self, wait_s: float = 0.0) -> None:
        self.door.turn()
        for key, events in self.selector.select(wait_s):
            key.data(events)

    def close(self) -> None:
        self.door.close()
        for sock in self.callers:
            sock.close()
        assert not self.selector.get_map()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[UserSocketSite]:
    one = UserSocketSite(tmp_path)
    yield one
    one.close()


def test_one_request_per_connection_is_answered_per_turn(site: UserSocketSite):
    site.call(pack({"n": 1}) * 500)
    for turn in range(10):
        before = len(site.asked)
        site.turn()
        assert len(site.asked) - before <= 1, turn
    assert len(site.asked) <= 10


def test_user_with_many_connections_gets_one_answer_per_turn(site: UserSocketSite):
    for _ in range(30):
        site.call(pack({"n": 1}) * 10)
    for _ in range(10):
        before = len(site.asked)
        site.turn()
        assert len(site.asked) - before <= 1


def test_all_requests_are_answered_in_the_end_and_in_order(site: UserSocketSite):
    sock = site.call(b"".join(pack({"n": n}) for n in range(20)))
    reader, heard = Reader(), list[Message]()
    while len(heard) < 20:
        site.turn()
        with contextlib.suppress(BlockingIOError):
            heard += reader.feed(sock.recv(1 << 20))
    assert [message["answer"]["n"] for message in heard] == list(range(20))


def test_caller_that_does_not_read_answers_gets_no_more(site: UserSocketSite):
    site.call(pack({"n": 1}) * 500)
    for _ in range(200):
        site.turn()
    assert len(site.asked) < 20 and all(len(caller.unsent) < 1 << 17 for caller in site.door.callers.all())


def test_one_user_cannot_take_all_connections(site: UserSocketSite):
    for _ in range(MAX_CALLERS + 10):
        site.call()
        site.turn()
    assert len(site.door.callers) == MAX_PER_USER


@as_root
@pytest.mark.waits
def test_answer_time_is_charged_to_the_asking_user(tmp_path: Path):
    tmp_path.chmod(0o755)
    site = UserSocketSite(tmp_path, cost_s=0.2)
    try:
        site.call(pack({"root": 1}) * 500)
        uid = site.door.callers
        site.turn()
        (caller,) = uid.all()
        caller.uid = NOBODY  # as the kernel reports for another user
        began = time.monotonic()
        while time.monotonic() - began < 1.5:
            site.turn(wait_s=0.01)
            with contextlib.suppress(BlockingIOError):
                site.callers[0].recv(1 << 20)
        spent = 0.2 * len(site.asked)
        assert spent < 1.9, "a burst of a second, and then a tenth of the time"
        asked = len(site.asked)
        site.call(pack({"root": 2}))
        for _ in range(3):
            site.turn()
        assert site.asked[asked:] == [{"root": 2}], "another user does not wait"
    finally:
        site.close()


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xff\xff\xff", b"\0\0\0\3abc", b"\0\0\0\2[]", b"\0\0\xea\x60" + b"[" * 60_000,
        b"\0\0\xea\x60" + b'{"a":' * 12_000, b"\0\0\x10\x00" + b'{"a":' + b"9" * 4091, b"\0\0\0\0",
    ],
)  # fmt: skip
def test_malformed_message_gets_one_error_and_ends_the_connection(site: UserSocketSite, data: bytes):
    sock = site.call(data + pack({"after": "it"}))
    heard = b""
    sock.settimeout(0.01)
    for _ in range(500):
        site.turn()
        try:
            more = sock.recv(1 << 20)
        except TimeoutError:
            continue
        except ConnectionResetError:
            break
        if not more:
            break
        heard += more
    else:
        raise AssertionError("the connection is still open")
    (answer,) = Reader().feed(heard)
    assert "not a message" in answer["error"] and site.asked == []


def test_slow_caller_is_disconnected(site: UserSocketSite):
    site.call(b"\0\0\0\x09half")
    site.turn()
    (caller,) = site.door.callers.all()
    assert caller.until <= time.monotonic() + CALL_S
    caller.until = 0.0
    site.turn()
    assert len(site.door.callers) == 0


def test_long_answer_is_sent_and_accepted(tmp_path: Path):
    """The nodes of a large cluster, or long events, exceed the size limit of messages between agents."""
    selector = selectors.DefaultSelector()
    door = request_server(tmp_path / "socket", selector, lambda uid, request: {"nodes": ["x" * 1000] * 3000})
    answers: list[Message] = []
    caller = threading.Thread(target=lambda: answers.append(ask(tmp_path / "socket", {"nodes": True}, 60)))
    caller.start()
    try:
        while caller.is_alive():
            for key, events in selector.select(0.05):
                key.data(events)
            door.turn()
        assert len(answers[0]["nodes"]) == 3000
    finally:
        door.close()
