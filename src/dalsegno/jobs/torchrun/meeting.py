"""Where the agents of a torchrun meet, and which of them listens there."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass

from dalsegno.errors import UsageError
from dalsegno.jobs.frameworks import LAST_PORT
from dalsegno.jobs.torchrun.args import TorchrunArgs
from dalsegno.jobs.values import shown

LOOPBACK = "127.0.0.1"
C10D_PORT = 29_400
_ENDPOINT = re.compile(r"(?P<host>\[[0-9a-fA-F:.]+\]|[^\s:\[\]]+)?(?::(?P<port>\d+))?", re.ASCII)
_TRUE, _FALSE = ("1", "true", "t", "yes", "y"), ("0", "false", "f", "no", "n")


@dataclass(frozen=True)
class Meeting:
    """`ours`: this node may listen there. `alone`: no other node comes, so nobody else has to find it."""

    host: str
    port: int  # 0: any
    ours: bool
    alone: bool = False


ALONE = Meeting(LOOPBACK, 0, ours=True, alone=True)


def find_meeting(args: TorchrunArgs, is_ours: Callable[[str], bool]) -> Meeting:
    """As torchrun finds it: at the master for `static`, else at the endpoint. `is_ours` tells this node's names."""
    if args.standalone or args.nodes.max == 1:
        return ALONE
    if args.backend == "static":
        return _static(args)
    host, port = parse_endpoint(args.endpoint or "localhost", C10D_PORT)
    if port == 0:
        return ALONE  # a port that nobody knows
    said = _said_to_be_host(args.settings.get("is_host", ""))
    return Meeting(host, port, is_ours(host) if said is None else said)


def _static(args: TorchrunArgs) -> Meeting:
    host, port = parse_endpoint(args.endpoint, 0)
    if not port:
        what = f"{shown(args.endpoint)} names no port, and the static rendezvous has none of its own"
        raise UsageError(what, where="--rdzv-endpoint", hint="write `host:29500`, or `--rdzv-backend c10d`")
    return Meeting(host, port, ours=args.node_rank == 0)


def _said_to_be_host(text: str) -> bool | None:
    word = text.lower()
    if word and word not in (*_TRUE, *_FALSE):
        what, hint = f"{shown(text)} is neither true nor false", "write `is_host=1` or `is_host=0`"
        raise UsageError(what, where="--rdzv-conf is_host", hint=hint)
    return word in _TRUE if word else None


def parse_endpoint(text: str, default_port: int) -> tuple[str, int]:
    """`host`, `host:port`, `[::1]:port`, `:port`."""
    found = _ENDPOINT.fullmatch(text.strip())
    if found is None or int(found["port"] or 0) > LAST_PORT:
        raise UsageError(f"{shown(text)} is no `host:port`", where="--rdzv-endpoint", hint="write `node-1:29400`")
    host = (found["host"] or "localhost").strip("[]")
    return host, int(found["port"]) if found["port"] is not None else default_port


def is_own_address(host: str) -> bool:
    """Whether a name means this node: only on its own addresses can a node open a socket."""
    with contextlib.suppress(OSError):
        for family, _, _, _, address in socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sock:
                sock.bind((address[0], 0))
                return True
    return False


def is_loopback(address: str) -> bool:
    return address.startswith("127.") or address in ("localhost", "::1")
