"""Probe hosts and their slurmd with non-blocking connects, in the controller's loop.

A running kernel accepts or refuses at once, whatever its processes do. slurmd is probed only if its answer is needed or
the host does not answer, because slurmd logs an error for each connection without a message.
"""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
from collections.abc import Callable
from dataclasses import dataclass, field

from dalsegno.recovery.agents.view import NODE_LIMITS

PROBE_S = NODE_LIMITS.probe_s
QUIET_PORT = 9  # a port on which no service listens
TRIES = 6  # connection attempts per probe, so that a few lost packets do not make a host seem lost
_NOT_THERE = (errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ETIMEDOUT)
_UNDER_WAY = (errno.EINPROGRESS, errno.EWOULDBLOCK)

# Called with the node, whether its host answered, and whether its slurmd answered; None means unknown.
Done = Callable[[str, "bool | None", "bool | None"], None]


@dataclass(frozen=True)
class NodeAddress:
    """The IP address of a node; "" if it is unknown. If the port is 0, the node's slurmd cannot be probed.

    `shared`: several nodes have this address, as loopback nodes do. An answer from the host then says nothing about the
    node, so the node counts as up as long as its slurmd answers.
    """

    address: str
    slurmd_port: int = 0
    shared: bool = False


@dataclass(eq=False)
class _Probe:
    node: str
    place: NodeAddress
    began: float
    tries: int = 1
    host: bool | None = None
    slurmd: bool | None = None
    wants_slurmd: bool = False
    socks: dict[socket.socket, bool] = field(default_factory=dict)  # socket -> whether it connects to slurmd

    @property
    def settled(self) -> bool:
        return self.host is True and (self.slurmd is True or not self.wants_slurmd)


class Probes:
    def __init__(self, selector: selectors.BaseSelector, done: Done) -> None:
        self._selector, self._done = selector, done
        self._under_way: dict[str, _Probe] = {}

    def start(self, node: str, place: NodeAddress, now: float, *, slurmd: bool) -> None:
        if node in self._under_way:
            return
        probe = _Probe(node, place, now, wants_slurmd=(slurmd or place.shared) and place.slurmd_port > 0)
        self._under_way[node] = probe
        if not place.shared:
            self._dial(probe, QUIET_PORT)
        if probe.wants_slurmd:
            self._dial(probe, place.slurmd_port)
        self._settle(probe)

    def wake(self, now: float) -> float | None:
        """Retry or end the probes that are due, and return when the next one is due."""
        for probe in list(self._under_way.values()):
            if now >= probe.began + PROBE_S:
                self._collect_late_answers(probe)
                self._end(probe)
            elif now >= _next(probe):
                self._try_again(probe)
        return min(map(_next, self._under_way.values()), default=None)

    def cancel(self) -> None:
        """End all probes, and report no result for them."""
        for probe in list(self._under_way.values()):
            del self._under_way[probe.node]
            self._close_sockets(probe)

    def _try_again(self, probe: _Probe) -> None:
        probe.tries += 1
        if probe.host is not True and not probe.place.shared:
            self._dial(probe, QUIET_PORT)
        if probe.slurmd is not True and probe.place.slurmd_port and (probe.wants_slurmd or probe.host is not True):
            self._dial(probe, probe.place.slurmd_port)
        self._settle(probe)

    def _dial(self, probe: _Probe, port: int) -> None:
        slurmd, family = port != QUIET_PORT, family_of(probe.place.address)
        if family is None:
            return  # the address is a host name, and resolving it could block
        try:
            sock = socket.socket(family)
        except OSError:
            return  # no socket is available, which says nothing about the node
        sock.setblocking(False)
        code = sock.connect_ex((probe.place.address, port))
        if code in _UNDER_WAY:
            probe.socks[sock] = slurmd
            self._selector.register(sock, selectors.EVENT_WRITE, lambda events: self._on_answer(probe, sock))
            return
        sock.close()
        _take(probe, code, slurmd)

    def _on_answer(self, probe: _Probe, sock: socket.socket) -> None:
        self._take_answer(probe, sock)
        self._settle(probe)

    def _take_answer(self, probe: _Probe, sock: socket.socket) -> None:
        if sock not in probe.socks:
            return  # the socket was closed earlier in the same turn of the event loop
        slurmd = probe.socks.pop(sock)
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        self._selector.unregister(sock)
        sock.close()
        _take(probe, code, slurmd)

    def _collect_late_answers(self, probe: _Probe) -> None:
        """Collect answers that arrived while the loop was busy; a missing answer counts as a timeout."""
        with selectors.DefaultSelector() as ready:
            for sock in probe.socks:
                ready.register(sock, selectors.EVENT_WRITE)
            answered = [key.fileobj for key, _ in ready.select(0)]
        for sock in list(probe.socks):
            if sock in answered:
                self._take_answer(probe, sock)
            else:
                _take(probe, errno.ETIMEDOUT, probe.socks[sock])

    def _settle(self, probe: _Probe) -> None:
        if probe.settled and probe.node in self._under_way:
            self._end(probe)

    def _end(self, probe: _Probe) -> None:
        del self._under_way[probe.node]
        self._close_sockets(probe)
        self._done(probe.node, probe.host, probe.slurmd)

    def _close_sockets(self, probe: _Probe) -> None:
        for sock in probe.socks:
            self._selector.unregister(sock)
            sock.close()
        probe.socks.clear()


def family_of(address: str) -> socket.AddressFamily | None:
    """Return the family of an IP address; None for a host name."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError, ValueError):
            socket.inet_pton(family, address)
            return family
    return None


def _take(probe: _Probe, code: int, slurmd: bool) -> None:
    """Record one answer. A refused connection is an answer from the host; a local error says nothing about the host."""
    if code in (0, errno.ECONNREFUSED):
        probe.host = not probe.place.shared or code == 0
        if slurmd:
            probe.slurmd = code == 0
    elif code in _NOT_THERE:
        if slurmd:
            probe.slurmd = bool(probe.slurmd)
        else:
            probe.host = bool(probe.host)


def _next(probe: _Probe) -> float:
    return probe.began + (PROBE_S if probe.tries >= TRIES else probe.tries * PROBE_S / TRIES)
