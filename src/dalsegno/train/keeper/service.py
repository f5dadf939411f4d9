"""The keeper process: it receives the agent's orders and runs one thread for each kind of work."""

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

from dalsegno.train.keeper.plan import Drop, Fetch, KeepOrder, Order, Sent, choose_to_sum, key_of, parse_order
from dalsegno.train.keeper.server import KeeperServer
from dalsegno.train.keeper.state import KeeperState
from dalsegno.train.keeper.transfer import SnapshotFetcher, SnapshotSender
from dalsegno.train.memory.files import own_folder
from dalsegno.train.memory.snapshot import checksum
from dalsegno.wire.frames import BadFrame, Message, Reader, send
from dalsegno.wire.peer import check_peer


def checksum_loop(state: KeeperState) -> None:
    """Compute the checksums of this node's snapshots, newest first.

    Damaged or overwritten snapshots are not retried.
    """
    failed: set[Sent] = set()
    while True:
        with state.changed:
            one = choose_to_sum(state.held(), failed)
            while one is None:
                state.changed.wait()
                one = choose_to_sum(state.held(), failed)
        if checksum(state.path_of(one)) is None:
            failed.add(key_of(one))
        else:
            state.refresh()


NICE = 10  # low priority, because training comes first


def serve(agent: str, listener: socket.socket, folder: Path | None = None, nice: int = NICE) -> None:
    """Serve until the agent ends, then exit at once, whatever the threads are doing."""
    _set_up_process(nice)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect("\0" + agent)
        check_peer(sock)
        keeper = SnapshotKeeper(folder or own_folder(), sock, listener)
        keeper.start()
        with contextlib.suppress(OSError, BadFrame):
            keeper.receive_orders()
    os._exit(0)


def _set_up_process(nice: int) -> None:
    os.nice(nice)
    torch.set_num_threads(1)  # torch must not use its thread pool, whose threads do not exist in this fork
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        # These signals are meant for the workers, but sent to the whole process group.
        signal.signal(number, signal.SIG_IGN)
    threading.excepthook = _exit_on_error


def _exit_on_error(failed: threading.ExceptHookArgs) -> None:
    """End the process if a thread fails, so that the agent starts another keeper."""
    sys.excepthook(failed.exc_type, failed.exc_value or failed.exc_type(), failed.exc_traceback)
    os._exit(1)


class SnapshotKeeper:
    """The threads of a keeper and their shared state."""

    def __init__(self, folder: Path, agent: socket.socket, listener: socket.socket) -> None:
        self._agent, self._send_lock = agent, threading.Lock()
        self._state = KeeperState(folder, self._report)
        self._server = KeeperServer(self._state, listener)
        self._fetching, self._sending = SnapshotFetcher(self._state), SnapshotSender(self._state)

    def start(self) -> None:
        self._report({"keeper": self._server.port})
        works: list[Callable[[], None]] = [
            self._server.accept_loop,
            self._sending.send_loop,
            lambda: checksum_loop(self._state),
        ]
        for work in works:
            threading.Thread(target=work, daemon=True).start()

    def receive_orders(self) -> None:
        """Carry out the agent's orders until it disconnects."""
        reader = Reader()
        while True:
            data = self._agent.recv(65536)
            if not data:
                return
            for message in reader.feed(data):
                self._carry_out(parse_order(message))

    def _carry_out(self, order: Order | None) -> None:
        if isinstance(order, KeepOrder):
            self._state.order(order)
            self._sending.turn_to(order.buddy)
        elif isinstance(order, Fetch):
            self._fetching.start(order)
        elif isinstance(order, Drop):
            self._state.drop(order.ranks)
        elif order is not None:
            self._state.refresh()

    def _report(self, message: Message) -> None:
        try:
            with self._send_lock:
                send(self._agent, message)
        except OSError:
            os._exit(0)  # the agent has ended, and the keeper ends with it
