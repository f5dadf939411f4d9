"""Tests of forked processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.waiting import eventually

from dalsegno.system.children import start_ticks
from dalsegno.system.hanging_calls import Forked, fork

SOURCE = Path(__file__).parents[2] / "src"


def read_all(forked: Forked) -> bytes:
    forked.sock.settimeout(60)
    received = b""
    while data := forked.sock.recv(65536):
        received += data
    return received


def test_forked_process_sends_data_and_ends():
    forked = fork(lambda sock: sock.sendall(b"well"))
    assert read_all(forked) == b"well"
    eventually(forked.ended)


def test_forked_process_has_no_inherited_files():
    held, other = socket.socketpair()
    forked = fork(lambda sock: sock.sendall(" ".join(os.listdir("/proc/self/fd")).encode()))
    open_there = {int(number) for number in read_all(forked).split()}
    assert (
        held.fileno() not in open_there - {3} and len(open_there) <= 5
    )  # three standard streams, the socket, and the directory listing
    other.close()
    assert held.recv(1) == b"", "no other process holds the other end"
    held.close()


def test_failed_forked_process_writes_traceback(capfd: pytest.CaptureFixture[str]):
    forked = fork(lambda sock: sock.sendall(str(1 / 0).encode()))
    assert read_all(forked) == b""
    eventually(forked.ended)
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_hanging_forked_process_is_killed_with_its_children():
    def hang(sock: socket.socket) -> None:
        child = subprocess.Popen(["sleep", "100"])
        sock.sendall(str(child.pid).encode())
        signal.pause()

    forked = fork(hang)
    forked.sock.settimeout(60)
    child = int(forked.sock.recv(100))
    assert not forked.ended() and start_ticks(child)
    forked.kill()
    eventually(forked.ended)
    eventually(lambda: start_ticks(child) is None)
    forked.kill()  # a second kill is not an error


def test_forked_process_does_not_outlive_its_parent():
    code = (
        "import os, signal, time; from dalsegno.system.hanging_calls import fork;"
        "forked = fork(lambda sock: time.sleep(100)); print(forked.pid, flush=True);"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=100)
    eventually(lambda: start_ticks(int(done.stdout)) is None)
