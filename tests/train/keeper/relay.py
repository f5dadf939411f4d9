"""A relay between two keepers that injects faults."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from dalsegno.train.keeper.plan import KeeperAddress
from tests.train.memory.processes import fork
from tests.waiting import eventually

Spoil = Callable[[int, bytes], bytes]  # from the bytes sent before and the next data; empty: disconnect


@contextlib.contextmanager
def relay(to: KeeperAddress, forth: Spoil | None = None, back: Spoil | None = None) -> Iterator[KeeperAddress]:
    """Yield the address of a process that forwards to the keeper."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pid = fork(lambda: _relay(listener, to, forth or _as_it_is, back or _as_it_is))
        address = KeeperAddress(*listener.getsockname(), to.node)
    try:
        yield address
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def cut_after(count: int) -> Spoil:
    return lambda before, data: data[: max(0, count - before)]


def flip_at(count: int) -> Spoil:
    def flip(before: int, data: bytes) -> bytes:
        at = count - before
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] if 0 <= at < len(data) else data

    return flip


def held_back(count: int, until: Path) -> Spoil:
    """Let this many bytes through, and the rest when the file exists."""

    def hold(before: int, data: bytes) -> bytes:
        if before + len(data) > count:
            eventually(until.exists)
        return data

    return hold


def _as_it_is(before: int, data: bytes) -> bytes:
    return data


def _relay(listener: socket.socket, to: KeeperAddress, forth: Spoil, back: Spoil) -> None:
    while True:
        near, _ = listener.accept()
        with near, socket.create_connection(to[:2]) as far, contextlib.suppress(OSError):
            _carry({near: (far, forth), far: (near, back)})


def _carry(ways: dict[socket.socket, tuple[socket.socket, Spoil]]) -> None:
    before = dict.fromkeys(ways, 0)
    while True:
        for sock in select.select(list(ways), [], [])[0]:
            target, spoil = ways[sock]
            data = sock.recv(65536)
            left = spoil(before[sock], data)
            before[sock] += len(data)
            target.sendall(left)
            if len(left) < len(data) or not data:
                return
