"""The controller's server for node agents: which secret proves which node, and what is refused goes to the log."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from dalsegno.errors import DalsegnoError
from dalsegno.health.expected import slurmd_places
from dalsegno.health.messages import BadReport
from dalsegno.health.settings import FILE, read_settings
from dalsegno.health.wire import (
    AGENT,
    CONTROLLER,
    MOST_BYTES,
    STRANGER_BYTES,
    NodeHello,
    is_node_name,
    is_proved,
    read_hello,
    read_secret,
    words_of,
)
from dalsegno.recovery.complaints import Complaints
from dalsegno.recovery.probes import NodeAddress, family_of
from dalsegno.system.files import read_text
from dalsegno.wire.frames import BadFrame, Message
from dalsegno.wire.handshake import TAG_BYTES
from dalsegno.wire.server import BoundedServer, Connection, Proved, SelectorWatcher, ServerLimits

STRANGERS = 256  # at a time
STRANGER_S = 3.0  # for the proof: it is one packet each way

Call = Connection[NodeHello]


class AgentHandler(Protocol):
    """Who deals with agents once they are known."""

    def admit(self, call: Call, hello: NodeHello) -> str:
        """Why this agent may not come in; "" if it may."""

    def came(self, call: Call) -> None: ...
    def said(self, call: Call, message: Message) -> None: ...
    def gone(self, call: Call) -> None: ...


class AgentDoor:
    """`secret_of` gives a node's secret, None for one that there is not."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        secret_of: Callable[[str], bytes | None],
        inside: AgentHandler,
        complaints: Complaints,
        stranger_s: float = STRANGER_S,
    ) -> None:
        self._secret_of, self._inside, self._complaints = secret_of, inside, complaints
        limits = ServerLimits(
            strangers=STRANGERS,
            stranger_s=stranger_s,
            stranger_bytes=STRANGER_BYTES,
            message_bytes=MOST_BYTES + TAG_BYTES,
            unsent_bytes=256 << 10,
            burst=400.0,  # an agent says ten messages in its busiest second
            per_s=100.0,
        )
        self._server = BoundedServer(SelectorWatcher(selector), self, AGENT, CONTROLLER, limits)
        self.close, self.wake = self._server.close, self._server.wake
        self.send, self.drop = self._server.send, self._server.drop
        self.came, self.gone = inside.came, inside.gone

    def open(self, host: str, port: int) -> int:
        """Listen; returns the port, which is any free one for 0."""
        try:
            return self._server.listen(host, port)
        except OSError as error:
            hint = "`ss -ltnp` shows who listens there; `dalsegno down` ends what an earlier cluster has left"
            what = f"the controller cannot listen on {host}:{port}: {error.strerror or error}"
            raise DalsegnoError(what, hint=hint) from error

    # What the server asks

    def greeting(self) -> Message:
        return {}

    def identify(self, hello: Message, ours: str) -> Proved[NodeHello]:
        told = read_hello(hello)
        secret = self._secret_of(told.node)
        if secret is None or not is_proved(hello, told, secret, ours):
            raise BadFrame(f"no proof that it is {told.node}")
        return Proved(told, secret, words_of(told, ours))

    def admit(self, call: Call, hello: NodeHello) -> str:
        why = self._inside.admit(call, hello)
        return f"an agent of {hello.node}: {why}" if why else ""

    def said(self, call: Call, message: Message) -> None:
        try:
            self._inside.said(call, message)
        except BadReport as error:
            raise BadFrame(str(error)) from error

    def refused(self, cause: str, detail: str) -> None:
        self._complaints.about(cause, detail)


# ---- Which nodes may call, and where they are: those that have a secret, with what slurm.conf says of their place.


class Roster:
    """A folder with a file for each node: its secret. It, slurm.conf and health.json may change at any time."""

    def __init__(self, secrets: Path, slurm_conf: Path) -> None:
        self._secrets = secrets
        self._slurm_conf, self._checks = _Watched(slurm_conf), _Watched(slurm_conf.with_name(FILE))
        self._places, self._settings = dict[str, NodeAddress](), Message()

    def secret_of(self, node: str) -> bytes | None:
        """Read each time: a machine that was replaced has another."""
        if not is_node_name(node):
            return None
        try:
            return read_secret(self._secrets / node)
        except DalsegnoError:
            return None

    def places(self) -> dict[str, NodeAddress]:
        """Of a node that slurm.conf names without an address, it is asked where its agent calls from."""
        self._read_again()
        try:
            names = os.listdir(self._secrets)
        except OSError:
            return {}
        return {name: self._places.get(name, NodeAddress("")) for name in sorted(names) if is_node_name(name)}

    def settings(self) -> Message:
        """What the cluster file says of checks, for the agents. A damaged file changes nothing."""
        if self._checks.changed():
            with contextlib.suppress(DalsegnoError):
                read_settings(self._checks.path)
                health = json.loads(read_text(self._checks.path) or "{}")
                self._settings = {"checks": health.get("checks", {})}
        return self._settings

    def _read_again(self) -> None:
        if self._slurm_conf.changed():
            told = slurmd_places(read_text(self._slurm_conf.path) or "")
            several = {host for host, count in Counter(host for host, _ in told.values()).items() if count > 1}
            self._places = {
                name: NodeAddress(host if family_of(host) else "", port, host in several or host.startswith("127."))
                for name, (host, port) in told.items()
            }


class _Watched:
    """A file that may be written anew. While it is gone, what it said last holds."""

    def __init__(self, path: Path) -> None:
        self.path, self._seen = path, (0, 0)

    def changed(self) -> bool:
        try:
            found = self.path.stat()
        except OSError:
            return False
        before, self._seen = self._seen, (found.st_mtime_ns, found.st_size)
        return before != self._seen
