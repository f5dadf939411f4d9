"""The port of a keeper. Whoever starts keepers opens it, and hands it from one to the next."""

from __future__ import annotations

import socket


def listen() -> socket.socket:
    """On all addresses: which one another node knows us by is not ours to know."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=256)
    return socket.create_server(("", 0), backlog=256)
