"""Where a run's agents find their coordinator, and the secret by which they know each other: a file of the run's."""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
from dataclasses import dataclass
from typing import Any

from dalsegno.launch.folder import RunFolder, mending
from dalsegno.system.files import read_json, write_atomic


@dataclass(frozen=True)
class Connect:
    secret: bytes
    port: int = 0  # any


def read_connect(folder: RunFolder) -> Connect:
    """That of our former self, so that its agents find us; a fresh one if there was none."""
    known: Any = read_json(folder.connect, mending(folder.connect))
    return Connect(bytes.fromhex(known["secret"]), known["port"]) if known else Connect(secrets.token_bytes(32))


def write_connect(folder: RunFolder, connect: Connect) -> None:
    told = {"run": folder.run, "secret": connect.secret.hex(), "addresses": own_addresses(), "port": connect.port}
    write_atomic(folder.connect, json.dumps(told), mode=0o600)


def own_addresses() -> list[str]:
    """Where agents may find us: the addresses of our name first."""
    found: list[Any] = []
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET, socket.SOCK_STREAM)
    addresses = [str(each[4][0]) for each in found]
    outward = [address for address in addresses if not address.startswith("127.")]
    return list(dict.fromkeys([*outward, *addresses, "127.0.0.1"]))
