"""Messages between the plugin and its helper: text and descriptors over a socket."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dalsegno.containers.native import FLAGS, source_folder

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    target = tmp_path_factory.mktemp("native") / "message.so"
    words = ["gcc", *FLAGS, "-fPIC", "-shared", "message.c", "-o", str(target)]
    subprocess.run(words, cwd=source_folder(), check=True)
    return ctypes.CDLL(str(target))


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, theirs


def receive(native: ctypes.CDLL, from_: socket.socket, count: int) -> tuple[int, bytes, list[int]]:
    text, fds = ctypes.create_string_buffer(64), (ctypes.c_int * 4)(*[-1] * 4)
    came = native.receive_message(from_.fileno(), text, ctypes.c_size_t(len(text)), fds, count)
    return came, text.value, list(fds)


def send(native: ctypes.CDLL, to: socket.socket, text: bytes, *fds: int) -> bool:
    return bool(native.send_message(to.fileno(), text, (ctypes.c_int * 16)(*fds), len(fds)) & 0xFF)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_text_and_descriptors_are_received_as_sent(native: ctypes.CDLL, pair: Pair, tmp_path: Path):
    (tmp_path / "a").write_text("of a")
    file = os.open(tmp_path / "a", os.O_RDONLY)
    assert send(native, pair[0], b"mnt user", file, file)
    came, text, fds = receive(native, pair[1], 3)
    assert (came, text, fds[2:]) == (2, b"mnt user", [-1, -1])
    assert os.pread(fds[0], 9, 0) == b"of a" and not os.get_inheritable(fds[1])
    for each in (file, *fds[:2]):
        os.close(each)


def test_empty_text_is_a_message_and_a_closed_socket_is_not(native: ctypes.CDLL, pair: Pair):
    assert send(native, pair[0], b"")
    assert receive(native, pair[1], 0)[:2] == (0, b"")
    assert not send(native, pair[0], b"many", *[0] * 10), "more than the receiver reads"
    pair[0].close()
    assert receive(native, pair[1], 0)[0] == -1
    assert not send(native, pair[1], b"to nobody"), "and raises no signal"


def test_unrequested_descriptors_are_closed(native: ctypes.CDLL, pair: Pair):
    before = open_files()
    assert send(native, pair[0], b"three", 0, 1, 2)
    came, text, fds = receive(native, pair[1], 1)
    assert (came, text) == (1, b"three") and open_files() == before + 1
    os.close(fds[0])
    assert send(native, pair[0], b"none wanted", 0)
    assert receive(native, pair[1], 0)[0] == 0 and open_files() == before


FORGED = """
import ctypes, os, socket, sys
native, (ours, theirs) = ctypes.CDLL(sys.argv[1]), socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
before, text, fds = len(os.listdir("/proc/self/fd")), ctypes.create_string_buffer(64), (ctypes.c_int * 4)()
for count in range(4, 40):
    socket.send_fds(ours, [b"many"], [0] * count)
    assert native.receive_message(theirs.fileno(), text, ctypes.c_size_t(64), fds, 4) == 4, count
    for fd in fds:
        os.close(fd)
    assert len(os.listdir("/proc/self/fd")) == before, count
"""


def test_excess_descriptors_are_closed_without_harm(native: ctypes.CDLL):
    """A helper with the user's id could be made to send anything. slurmstepd runs as root and must survive that."""
    done = subprocess.run([sys.executable, "-c", FORGED, native._name], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_long_text_is_truncated(native: ctypes.CDLL, pair: Pair):
    assert send(native, pair[0], b"x" * 200)
    assert receive(native, pair[1], 0)[:2] == (0, b"x" * 63)
