"""The connection file, from which agents get the coordinator's addresses, its port and the run's secret."""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from dalsegno.runs.agent.link import fallback_ports
from dalsegno.runs.folder import RunFolder, repair_hint
from dalsegno.system.files import read_json, write_atomic


@dataclass(frozen=True)
class Connect:
    secret: bytes
    port: int = 0  # the coordinator's port; 0 means any free port


def read_connect(folder: RunFolder) -> Connect:
    """Return the previous coordinator's secret and port, so that its agents can reconnect.

    If there was none, create a secret.
    """
    known: Any = read_json(folder.connect, repair_hint(folder.connect))
    return Connect(bytes.fromhex(known["secret"]), known["port"]) if known else Connect(secrets.token_bytes(32))


def write_connect(folder: RunFolder, connect: Connect) -> None:
    data = {"run": folder.run, "secret": connect.secret.hex(), "addresses": own_addresses(), "port": connect.port}
    write_atomic(folder.connect, json.dumps(data), mode=0o600)


def own_addresses() -> list[str]:
    """Return the addresses that agents may connect to, loopback addresses last."""
    found: list[Any] = []
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET, socket.SOCK_STREAM)
    addresses = [str(each[4][0]) for each in found]
    outward = [address for address in addresses if not address.startswith("127.")]
    return list(dict.fromkeys([*outward, *addresses, "127.0.0.1"]))


async def listen_again(known: Connect, listen: Callable[[int], Awaitable[int]], note: Callable[[str], None]) -> int:
    """Listen on the previous coordinator's port, on a fallback port, or on any free port. Return the port."""
    if not known.port:
        return await listen(0)
    for port in (known.port, *fallback_ports(known.secret)):
        try:
            return await listen(port)
        except OSError as error:
            note(f"cannot listen on port {port}: {error.strerror or error}; trying another one")
    return await listen(0)  # new agents read this port from the connection file
