"""Which hosts answer: a living kernel completes a TCP connect even while its processes are stopped or starved."""

from __future__ import annotations

import errno
import selectors
import socket
import time
from collections.abc import Iterable

Address = tuple[str, int]
_UNDER_WAY = (errno.EINPROGRESS, errno.EWOULDBLOCK)


def reached(addresses: Iterable[Address], timeout_s: float) -> set[Address]:
    """Those that accept or refuse within the time: a refusal, too, comes from a living host."""
    answered: set[Address] = set()
    until = time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector:
        for address in set(addresses):
            _dial(selector, address, answered)
        while selector.get_map() and (left := until - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                _take_answer(selector, key, answered)
        for key in list(selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
    return answered


def _dial(selector: selectors.BaseSelector, address: Address, answered: set[Address]) -> None:
    sock = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_STREAM)
    sock.setblocking(False)
    code = sock.connect_ex(address)
    if code in _UNDER_WAY:
        selector.register(sock, selectors.EVENT_WRITE, address)
        return
    sock.close()
    if code in (0, errno.ECONNREFUSED):
        answered.add(address)


def _take_answer(selector: selectors.BaseSelector, key: selectors.SelectorKey, answered: set[Address]) -> None:
    sock = key.fileobj
    assert isinstance(sock, socket.socket)
    code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code in (0, errno.ECONNREFUSED):
        answered.add(key.data)
    selector.unregister(sock)
    sock.close()
