"""How a node's agent and the controller speak: who they are, proved both ways; then sealed messages.

    controller  {"nonce": C}
    agent       {"node", "boot", "started", "nonce": A, "proof"}      the node's name and boot are in the proof
    controller  {"proof"}
    then both   {"say": TEXT, "mac"}                                  TEXT is a message as JSON

Each node has a secret of its own, so that none can speak for another. Nonces of both sides are in every proof, and the
number of a message in its seal: what was said once is of no use in another connection, nor later in the same one.
"""

from __future__ import annotations

import hmac
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dalsegno.errors import DalsegnoError
from dalsegno.train.frames import BadFrame, Message, pack
from dalsegno.train.proof import holds, prove

BEAT_S = 0.4
STRANGER_BYTES = 2048  # the longest message of one who has not proved anything yet
MOST_BYTES = 128 << 10  # of any later one
LEAST_SECRET = 32  # characters
AGENT, CONTROLLER = "node-agent", "controller"

_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_BOOT = re.compile(r"[A-Za-z0-9._:-]{1,64}")
_NONCE = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Hello:
    """Who calls. `started` is when the agent did, by the boot's own clock: of two agents the later one is right."""

    node: str
    boot: str
    started: float
    nonce: str

    def words(self) -> tuple[str, ...]:
        return (self.nonce, self.node, self.boot, repr(self.started))


def read_secret(path: Path) -> bytes:
    """A node's secret; whoever made the file chose the characters."""
    hint = "`dalsegno up` writes it again"
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise DalsegnoError(f"the secret {path} cannot be read: {error.strerror}", hint=hint) from error
    if len(secret) < LEAST_SECRET:
        raise DalsegnoError(f"the secret {path} is shorter than {LEAST_SECRET} characters", hint=hint)
    return secret


def is_node_name(text: str) -> bool:
    return _NODE.fullmatch(text) is not None


def is_boot_id(text: str) -> bool:
    return _BOOT.fullmatch(text) is not None


# Who is there -------------------------------------------------------------------------------------------------


def hello_message(secret: bytes, hello: Hello, theirs: str) -> Message:
    said = {"node": hello.node, "boot": hello.boot, "started": hello.started, "nonce": hello.nonce}
    return {**said, "proof": prove(secret, AGENT, theirs, *hello.words())}


def read_nonce(greeting: Mapping[str, Any]) -> str:
    """The controller's nonce in its first message."""
    return _matching(greeting, "nonce", _NONCE)


def read_hello(message: Mapping[str, Any]) -> Hello:
    """Who it says that it is: nothing of it is proved yet."""
    if set(message) != {"node", "boot", "started", "nonce", "proof"}:
        raise BadFrame("no hello of an agent")
    started = message["started"]
    if type(started) is not float or not math.isfinite(started):
        raise BadFrame("`started` is no time")
    node, boot = _matching(message, "node", _NODE), _matching(message, "boot", _BOOT)
    return Hello(node, boot, started, _matching(message, "nonce", _NONCE))


def is_proved(message: Mapping[str, Any], hello: Hello, secret: bytes, ours: str) -> bool:
    """Whether the caller knows the secret of the node that it names."""
    return holds(message.get("proof"), secret, AGENT, ours, *hello.words())


def welcome_message(secret: bytes, hello: Hello, ours: str) -> Message:
    return {"proof": prove(secret, CONTROLLER, ours, *hello.words())}


def is_welcome(message: Mapping[str, Any], secret: bytes, hello: Hello, theirs: str) -> bool:
    return holds(message.get("proof"), secret, CONTROLLER, theirs, *hello.words())


def _matching(message: Mapping[str, Any], key: str, pattern: re.Pattern[str]) -> str:
    value = message.get(key)
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise BadFrame(f"`{key}` is not as it should be")
    return value


# What is said then --------------------------------------------------------------------------------------------


class Seal:
    """Seals the messages of one side of one connection, or opens those of the other: in order, each once."""

    def __init__(self, secret: bytes, hello: Hello, controller_nonce: str, side: str) -> None:
        self._key = prove(secret, "session", controller_nonce, *hello.words()).encode()
        self._side, self._count = side.encode(), 0

    def close(self, message: Message) -> bytes:
        text = json.dumps(message, separators=(",", ":"))
        return pack({"say": text, "mac": self._mac(text)})

    def open(self, frame: Message) -> Message:
        """BadFrame for what the other side has not said, or not now."""
        text, mac = frame.get("say"), frame.get("mac")
        if not isinstance(text, str) or not isinstance(mac, str) or len(frame) != 2 or not text.isascii():
            raise BadFrame("not a sealed message")
        if not hmac.compare_digest(mac.encode(errors="replace"), self._mac(text).encode()):
            raise BadFrame("a message with a wrong seal: forged, or said before")
        return _object(text)

    def _mac(self, text: str) -> str:
        self._count += 1
        return hmac.digest(self._key, b"%s %d %s" % (self._side, self._count, text.encode()), "sha256").hex()


def _object(text: str) -> Message:
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadFrame(f"not JSON: {error}") from None
    if not isinstance(message, dict):
        raise BadFrame("not a JSON object")
    return message
