"""Reachability of hosts."""

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from dalsegno.runs.agent.agent import Address, reachable


@pytest.fixture
def accepting() -> Iterator[Address]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()


@pytest.fixture
def refusing() -> Iterator[Address]:
    """Bind a port without listening, so that it refuses connections."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()


@pytest.fixture
def silent_server() -> Iterator[socket.socket]:
    """Listen with a full queue. Linux then drops further packets, like a dead host."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        waiting = []
        for _ in range(8):
            sock = socket.socket()
            sock.setblocking(False)
            sock.connect_ex(server.getsockname())
            waiting.append(sock)
        yield server
        for sock in waiting:
            sock.close()


@pytest.fixture
def silent(silent_server: socket.socket) -> Address:
    return silent_server.getsockname()


def test_host_that_accepts_or_refuses_is_reachable(accepting: Address, refusing: Address, silent: Address):
    assert reachable([accepting, refusing, silent], 0.5) == {accepting, refusing}


def test_probing_stops_at_its_timeout(silent: Address):
    began = time.monotonic()
    assert reachable([silent], 0.1) == set()
    assert 0.1 <= time.monotonic() - began < 20.0


def test_probing_returns_when_all_have_answered(accepting: Address, refusing: Address):
    began = time.monotonic()
    assert reachable([accepting, refusing, accepting], 600.0) == {accepting, refusing}
    assert time.monotonic() - began < 60.0


def test_host_whose_first_packets_were_lost_is_reachable(silent: Address, silent_server: socket.socket):
    empty_the_queue = threading.Timer(0.1, lambda: silent_server.accept()[0].close())
    empty_the_queue.start()
    assert reachable([silent], 0.8) == {silent}, "TCP alone would try again only after a second"
    empty_the_queue.join()


def test_address_without_a_route_is_not_reachable():
    assert reachable([("255.255.255.255", 9)], 0.1) == set()


def test_probing_no_address_returns_none():
    assert reachable([], 1.0) == set()


def test_answer_before_a_delayed_check_counts(accepting: Address):
    assert reachable([accepting], 1e-9) == {accepting}
