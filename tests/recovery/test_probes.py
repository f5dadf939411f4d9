"""Asking hosts and slurmd whether they answer, on sockets that are real."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Iterator

import pytest

from dalsegno.recovery.presence import PROBE_S
from dalsegno.recovery.probes import NodeAddress, Probes


class Asked:
    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.told: dict[str, tuple[bool | None, bool | None]] = {}
        self.probes = Probes(self.selector, lambda node, host, slurmd: self.told.update({node: (host, slurmd)}))

    def ask(self, node: str, place: NodeAddress, slurmd: bool = True) -> tuple[bool | None, bool | None]:
        began = time.monotonic()
        self.probes.start(node, place, began, slurmd=slurmd)
        while node not in self.told:
            assert time.monotonic() - began < 60
            for key, events in self.selector.select(0.01):
                key.data(events)
            self.probes.wake(time.monotonic())
        assert not self.selector.get_map() and self.probes.wake(time.monotonic()) is None
        return self.told.pop(node)


@pytest.fixture
def asked() -> Iterator[Asked]:
    one = Asked()
    yield one
    one.probes.cancel()
    one.selector.close()


@pytest.fixture
def slurmd() -> Iterator[socket.socket]:
    """Something that listens and says nothing: a kernel answers for it."""
    with socket.create_server(("127.0.0.1", 0), backlog=1) as server:
        yield server


def test_a_host_that_refuses_is_there_and_so_is_slurmd_that_accepts(asked: Asked, slurmd: socket.socket):
    assert asked.ask("a", NodeAddress("127.0.0.1", slurmd.getsockname()[1])) == (True, True)


def test_a_dead_slurmd_on_a_living_host_is_seen(asked: Asked, slurmd: socket.socket):
    port = slurmd.getsockname()[1]
    slurmd.close()
    assert asked.ask("a", NodeAddress("127.0.0.1", port)) == (True, False)


def test_slurmd_is_left_in_peace_when_only_the_host_is_asked_after(asked: Asked, slurmd: socket.socket):
    assert asked.ask("a", NodeAddress("127.0.0.1", slurmd.getsockname()[1]), slurmd=False) == (True, None)
    slurmd.settimeout(0.05)
    with pytest.raises(TimeoutError):
        slurmd.accept()


def full(server: socket.socket) -> list[socket.socket]:
    """Callers that fill the queue of one that never accepts: the next one's packets are dropped."""
    callers = []
    for _ in range(3):
        sock = socket.socket()
        sock.setblocking(False)
        sock.connect_ex(server.getsockname())
        callers.append(sock)
    return callers


def test_who_never_answers_is_known_after_the_time_of_a_probe(asked: Asked, slurmd: socket.socket):
    callers = full(slurmd)
    asked.probes.start("a", NodeAddress("127.0.0.1", slurmd.getsockname()[1]), 0.0, slurmd=True)
    asked.probes.wake(PROBE_S - 0.01)
    assert asked.told == {}
    asked.probes.wake(PROBE_S)
    assert asked.told == {"a": (True, False)} and not asked.selector.get_map()
    for sock in callers:
        sock.close()


@pytest.mark.parametrize("address", ["no such host.", "", "999.1.1.1", "x" * 300])
def test_a_place_that_is_none_is_our_own_fault_and_no_verdict(asked: Asked, address: str):
    assert asked.ask("a", NodeAddress(address, 1)) == (None, None)


def test_probes_that_are_cancelled_tell_nothing(asked: Asked, slurmd: socket.socket):
    callers = full(slurmd)
    asked.probes.start("a", NodeAddress("127.0.0.1", slurmd.getsockname()[1]), time.monotonic(), slurmd=True)
    asked.probes.cancel()
    assert asked.probes.wake(time.monotonic() + 10) is None and asked.told == {} and not asked.selector.get_map()
    for sock in callers:
        sock.close()


def test_where_nodes_share_an_address_only_their_slurmd_is_a_witness(asked: Asked, slurmd: socket.socket):
    place = NodeAddress("127.0.0.1", slurmd.getsockname()[1], shared=True)
    assert asked.ask("a", place, slurmd=False) == (True, True)
    slurmd.close()
    assert asked.ask("a", place, slurmd=False) == (False, False)
    assert asked.ask("a", NodeAddress("127.0.0.1", 0, shared=True)) == (None, None)
