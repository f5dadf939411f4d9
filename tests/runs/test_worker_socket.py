"""The agent's socket for the workers on its node."""

import os
import selectors
import signal
import socket
from collections.abc import Callable, Iterator

import pytest

from dalsegno.runs.agent.worker_socket import WorkerSocket
from dalsegno.wire.frames import Message, Reader, send


class Room:
    """A socket and its event loop; `heard` contains the received messages."""

    def __init__(self) -> None:
        self.heard: list[tuple[Message, Callable[[Message], None]]] = []
        self.selector = selectors.DefaultSelector()
        self.name = f"dalsegno-test.{os.getpid()}.{id(self)}"
        self.door = WorkerSocket(self.name, self.selector, lambda message, answer: self.heard.append((message, answer)))

    def turn(self, wait_s: float = 0.0) -> None:
        """Run the loop once. Data on a Unix socket is available at once within one process."""
        for key, _ in self.selector.select(wait_s):
            key.data()

    def caller(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(60)
        sock.connect("\0" + self.name)
        self.turn()
        return sock


@pytest.fixture
def room() -> Iterator[Room]:
    room = Room()
    yield room
    for key in list(room.selector.get_map().values()):
        key.fileobj.close()  # type: ignore[union-attr]
    room.selector.close()


def test_worker_message_is_received_and_answered(room: Room):
    worker = room.caller()
    send(worker, {"step": 7, "generation": 2})
    send(worker, {"grant": 2})
    room.turn()
    assert [message for message, _ in room.heard] == [{"step": 7, "generation": 2}, {"grant": 2}]
    room.heard[1][1]({"granted": True, "why": ""})
    assert list(Reader().feed(worker.recv(4096))) == [{"granted": True, "why": ""}]
    worker.close()


def test_answer_goes_to_the_sender(room: Room):
    one, other = room.caller(), room.caller()
    send(other, {"grant": 1})
    room.turn()
    room.heard[0][1]({"granted": False})
    assert list(Reader().feed(other.recv(4096))) == [{"granted": False}]
    one.setblocking(False)
    with pytest.raises(BlockingIOError):
        one.recv(1)
    one.close()
    other.close()


def test_answer_to_a_closed_connection_is_dropped(room: Room):
    worker = room.caller()
    send(worker, {"grant": 1})
    room.turn()
    worker.close()
    room.turn()
    room.heard[0][1]({"granted": True})


def test_invalid_frame_closes_only_its_own_connection(room: Room):
    stranger, worker = room.caller(), room.caller()
    stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
    send(worker, {"step": 1})
    room.turn()
    assert stranger.recv(1) == b"" and [message for message, _ in room.heard] == [{"step": 1}]
    stranger.close()
    worker.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user to knock as")
def test_other_users_are_refused(room: Room):
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setuid(65534)
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.settimeout(60)
            sock.connect("\0" + room.name)
            send(sock, {"grant": 1})
            os.write(write, b"closed" if sock.recv(1) == b"" else b"answered")
        except OSError:
            os.write(write, b"closed")
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    room.turn(wait_s=60.0)
    assert os.read(read, 20) == b"closed"
    os.waitpid(pid, 0)
    os.close(read)
    os.close(write)
    assert room.heard == []
