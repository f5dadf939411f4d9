"""Tests of probing hosts and slurmd on real sockets."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Iterator

import pytest

from dalsegno.recovery.agents.probes import PROBE_S, NodeAddress, Probes


class Asked:
    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.results: dict[str, tuple[bool | None, bool | None]] = {}
        self.probes = Probes(self.selector, lambda node, host, slurmd: self.results.update({node: (host, slurmd)}))

    def ask(self, node: str, place: NodeAddress, slurmd: bool = True) -> tuple[bool | None, bool | None]:
        began = time.monotonic()
        self.probes.start(node, place, began, slurmd=slurmd)
        while node not in self.results:
            assert time.monotonic() - began < 60
            for key, events in self.selector.select(0.01):
                key.data(events)
            self.probes.wake(time.monotonic())
        assert not self.selector.get_map() and self.probes.wake(time.monotonic()) is None
        return self.results.pop(node)


@pytest.fixture
def asked() -> Iterator[Asked]:
    one = Asked()
    yield one
    one.probes.cancel()
    one.selector.close()


@pytest.fixture
def slurmd() -> Iterator[socket.socket]:
    """Listen without ever answering: the kernel completes connections."""
    with socket.create_server(("127.0.0.1", 0), backlog=1) as server:
        yield server


def test_a_refusing_host_and_an_accepting_slurmd_are_alive(asked: Asked, slurmd: socket.socket):
    assert asked.ask("a", NodeAddress("127.0.0.1", slurmd.getsockname()[1])) == (True, True)


def test_a_dead_slurmd_on_a_live_host_is_detected(asked: Asked, slurmd: socket.socket):
    port = slurmd.getsockname()[1]
    slurmd.close()
    assert asked.ask("a", NodeAddress("127.0.0.1", port)) == (True, False)


def test_slurmd_is_not_contacted_when_only_the_host_is_probed(asked: Asked, slurmd: socket.socket):
    assert asked.ask("a", NodeAddress("127.0.0.1", slurmd.getsockname()[1]), slurmd=False) == (True, None)
    slurmd.settimeout(0.05)
    with pytest.raises(TimeoutError):
        slurmd.accept()


def full(server: socket.socket) -> list[socket.socket]:
    """Fill the queue of a server that never accepts: packets of the next caller are dropped."""
    callers = []
    for _ in range(3):
        sock = socket.socket()
        sock.setblocking(False)
        sock.connect_ex(server.getsockname())
        callers.append(sock)
    return callers


def test_a_missing_answer_counts_after_the_time_of_a_probe(asked: Asked, slurmd: socket.socket):
    callers = full(slurmd)
    asked.probes.start("a", NodeAddress("127.0.0.1", slurmd.getsockname()[1]), 0.0, slurmd=True)
    asked.probes.wake(PROBE_S - 0.01)
    assert asked.results == {}
    asked.probes.wake(PROBE_S)
    assert asked.results == {"a": (True, False)} and not asked.selector.get_map()
    for sock in callers:
        sock.close()


@pytest.mark.parametrize("address", ["no such host.", "", "999.1.1.1", "x" * 300])
def test_an_invalid_address_gives_no_verdict(asked: Asked, address: str):
    assert asked.ask("a", NodeAddress(address, 1)) == (None, None)


def test_cancelled_probes_report_nothing(asked: Asked, slurmd: socket.socket):
    callers = full(slurmd)
    asked.probes.start("a", NodeAddress("127.0.0.1", slurmd.getsockname()[1]), time.monotonic(), slurmd=True)
    asked.probes.cancel()
    assert asked.probes.wake(time.monotonic() + 10) is None and asked.results == {} and not asked.selector.get_map()
    for sock in callers:
        sock.close()


def test_on_a_shared_address_only_slurmd_counts(asked: Asked, slurmd: socket.socket):
    place = NodeAddress("127.0.0.1", slurmd.getsockname()[1], shared=True)
    assert asked.ask("a", place, slurmd=False) == (True, True)
    slurmd.close()
    assert asked.ask("a", place, slurmd=False) == (False, False)
    assert asked.ask("a", NodeAddress("127.0.0.1", 0, shared=True)) == (None, None)
