"""Which hosts answer."""

import socket
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
    """Bound, so that nobody else takes the port, but not listening."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()


@pytest.fixture
def silent() -> Iterator[Address]:
    """A listener whose queue is full: Linux drops what comes then, as a dead host would."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        waiting = []
        for _ in range(8):
            sock = socket.socket()
            sock.setblocking(False)
            sock.connect_ex(server.getsockname())
            waiting.append(sock)
        yield server.getsockname()
        for sock in waiting:
            sock.close()


def test_a_host_that_accepts_or_refuses_is_there_and_one_that_does_neither_is_not(
    accepting: Address, refusing: Address, silent: Address
):
    assert reachable([accepting, refusing, silent], 0.5) == {accepting, refusing}


def test_it_takes_no_longer_than_it_may(silent: Address):
    began = time.monotonic()
    assert reachable([silent], 0.1) == set()
    assert 0.1 <= time.monotonic() - began < 20.0


def test_it_returns_as_soon_as_all_have_answered(accepting: Address, refusing: Address):
    began = time.monotonic()
    assert reachable([accepting, refusing, accepting], 600.0) == {accepting, refusing}
    assert time.monotonic() - began < 60.0


def test_an_address_to_which_there_is_no_way_has_not_answered():
    assert reachable([("255.255.255.255", 9)], 0.1) == set()


def test_nobody_to_ask_is_nobody_who_answered():
    assert reachable([], 1.0) == set()


def test_an_answer_counts_that_came_before_a_delayed_look(accepting: Address):
    assert reachable([accepting], 1e-9) == {accepting}
