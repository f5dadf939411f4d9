"""The process: hears the agent's orders, and has each kind of work done by a thread of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from dalsegno.train.keeper.books import Books
from dalsegno.train.keeper.plan import Drop, Fetch, KeepOrder, Order, Sent, key_of, parse_order, to_sum
from dalsegno.train.keeper.server import KeeperServer
from dalsegno.train.keeper.transfer import Fetching, Sending
from dalsegno.train.memory.files import own_folder
from dalsegno.train.memory.snapshot import checksum
from dalsegno.wire.frames import BadFrame, Message, Reader, send
from dalsegno.wire.peer import check_peer

# ---- Checksums of what the ranks of this node commit, made when the training has gone on.


def sum_for_ever(books: Books) -> None:
    """The newest first. What cannot be read, because it is damaged or was overwritten, is not tried again."""
    failed: set[Sent] = set()
    while True:
        with books.changed:
            one = to_sum(books.held(), failed)
            while one is None:
                books.changed.wait()
                one = to_sum(books.held(), failed)
        if checksum(books.path_of(one)) is None:
            failed.add(key_of(one))
        else:
            books.look()


# ---- The process: hears the agent's orders, and has each kind of work done by a thread of its own.


NICE = 10  # the training comes first


def serve(agent: str, listener: socket.socket, folder: Path | None = None, nice: int = NICE) -> None:
    """Until the agent goes: then the process ends at once, whatever its threads are doing."""
    _be_modest(nice)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect("\0" + agent)
        check_peer(sock)
        keeper = SnapshotKeeper(folder or own_folder(), sock, listener)
        keeper.start()
        with contextlib.suppress(OSError, BadFrame):
            keeper.hear()
    os._exit(0)


def _be_modest(nice: int) -> None:
    os.nice(nice)
    torch.set_num_threads(1)  # and those of a process that this one was forked from did not come along
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # meant for workers, sent to the whole group
    threading.excepthook = _end


def _end(failed: threading.ExceptHookArgs) -> None:
    """A keeper without one of its threads would only seem to keep: the agent starts another."""
    sys.excepthook(failed.exc_type, failed.exc_value or failed.exc_type(), failed.exc_traceback)
    os._exit(1)


class SnapshotKeeper:
    """The threads and what they share."""

    def __init__(self, folder: Path, agent: socket.socket, listener: socket.socket) -> None:
        self._agent, self._telling = agent, threading.Lock()
        self._books = Books(folder, self._tell)
        self._server = KeeperServer(self._books, listener)
        self._fetching, self._sending = Fetching(self._books), Sending(self._books)

    def start(self) -> None:
        self._tell({"keeper": self._server.port})
        works: list[Callable[[], None]] = [
            self._server.accept_for_ever,
            self._sending.send_for_ever,
            lambda: sum_for_ever(self._books),
        ]
        for work in works:
            threading.Thread(target=work, daemon=True).start()

    def hear(self) -> None:
        """Do what the agent says, until it says no more."""
        reader = Reader()
        while True:
            data = self._agent.recv(65536)
            if not data:
                return
            for message in reader.feed(data):
                self._do(parse_order(message))

    def _do(self, order: Order | None) -> None:
        if isinstance(order, KeepOrder):
            self._books.order(order)
            self._sending.turn_to(order.buddy)
        elif isinstance(order, Fetch):
            self._fetching.start(order)
        elif isinstance(order, Drop):
            self._books.drop(order.ranks)
        elif order is not None:
            self._books.look()

    def _tell(self, message: Message) -> None:
        try:
            with self._telling:
                send(self._agent, message)
        except OSError:
            os._exit(0)  # the agent is gone
