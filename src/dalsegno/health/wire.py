"""The protocol between a node agent and the controller: mutual authentication, then sealed messages.

    controller  {"nonce": C}
    agent       {"node", "boot", "started", "nonce": A, "proof"}      the node's name and boot are in the proof
    controller  {"proof"}
    then both sides send sealed messages: encrypted and authenticated, see `wire/handshake.py`

Each node has its own secret, so that no node can pose as another. Every proof covers the nonces of both sides, and
every seal covers a sequence number. A recorded message therefore cannot be replayed, on this connection or another.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dalsegno.errors import DalsegnoError
from dalsegno.wire.frames import BadFrame, Message

BEAT_S = 0.4
UNAUTHENTICATED_BYTES = 2048  # longest message before authentication
MAX_MESSAGE_BYTES = 128 << 10  # longest message after authentication
MIN_SECRET = 32  # minimum number of characters of a node's secret
AGENT, CONTROLLER = "node-agent/2", "controller/2"  # names of both sides in the handshake, with the protocol version

_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_BOOT = re.compile(r"[A-Za-z0-9._:-]{1,64}")


@dataclass(frozen=True)
class NodeHello:
    """The identity of an agent. `started` is the number of seconds from the boot to the agent's start.

    If a node has two agents, the one that started later counts.
    """

    node: str
    boot: str
    started: float

    def __str__(self) -> str:
        return self.node

    def proven_values(self) -> tuple[str, ...]:
        """Return the values that the proofs of a connection cover in addition to the nonces."""
        return (self.node, self.boot, repr(self.started))

    def fields(self) -> Message:
        """Return the fields that the agent sends with its proof."""
        return {"node": self.node, "boot": self.boot, "started": self.started}


def read_secret(path: Path) -> bytes:
    """Return a node's secret."""
    hint = "`dalsegno up` writes it again"
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise DalsegnoError(f"the secret {path} cannot be read: {error.strerror}", hint=hint) from error
    if len(secret) < MIN_SECRET:
        raise DalsegnoError(f"the secret {path} is shorter than {MIN_SECRET} characters", hint=hint)
    return secret


def is_node_name(text: str) -> bool:
    return _NODE.fullmatch(text) is not None


def is_boot_id(text: str) -> bool:
    return _BOOT.fullmatch(text) is not None


def read_hello(message: Mapping[str, Any]) -> NodeHello:
    """Parse the identity that an agent claims; it is not proved yet."""
    if set(message) != {"node", "boot", "started", "nonce", "proof"}:
        raise BadFrame("not a hello of an agent")
    started = message["started"]
    if type(started) is not float or not math.isfinite(started):
        raise BadFrame("`started` is not a time")
    return NodeHello(_matching(message, "node", _NODE), _matching(message, "boot", _BOOT), started)


def _matching(message: Mapping[str, Any], key: str, pattern: re.Pattern[str]) -> str:
    value = message.get(key)
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise BadFrame(f"`{key}` is invalid")
    return value
