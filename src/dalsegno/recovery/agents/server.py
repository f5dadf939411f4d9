"""The controller's server for node agents. It authenticates each agent by the secret of its node and logs refusals."""

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
    MAX_MESSAGE_BYTES,
    UNAUTHENTICATED_BYTES,
    NodeHello,
    is_node_name,
    read_hello,
    read_secret,
)
from dalsegno.recovery.agents.probes import NodeAddress, family_of
from dalsegno.recovery.refusal_log import RefusalLog
from dalsegno.system.files import read_text
from dalsegno.wire.frames import BadFrame, Message
from dalsegno.wire.handshake import TAG_BYTES, BadProof, ServerHandshake
from dalsegno.wire.server import BoundedServer, Connection, Proved, SelectorWatcher, ServerLimits

UNAUTHENTICATED = 256  # maximum number of unauthenticated connections at a time
UNAUTHENTICATED_S = 3.0  # time limit for the handshake, which is one packet each way

Call = Connection[NodeHello]


class AgentHandler(Protocol):
    """The object that handles authenticated agents."""

    def admit(self, call: Call, hello: NodeHello) -> str:
        """Return why this agent is refused; "" if it is admitted."""

    def on_connect(self, call: Call) -> None: ...
    def on_message(self, call: Call, message: Message) -> None: ...
    def on_disconnect(self, call: Call) -> None: ...


class NodeAgentServer:
    """The server that accepts connections from node agents. `secret_of` returns a node's secret, or None for an unknown
    node."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        secret_of: Callable[[str], bytes | None],
        inside: AgentHandler,
        refusals: RefusalLog,
        unauthenticated_s: float = UNAUTHENTICATED_S,
    ) -> None:
        self._secret_of, self._inside, self._refusals = secret_of, inside, refusals
        limits = ServerLimits(
            unauthenticated=UNAUTHENTICATED,
            unauthenticated_s=unauthenticated_s,
            unauthenticated_bytes=UNAUTHENTICATED_BYTES,
            message_bytes=MAX_MESSAGE_BYTES + TAG_BYTES,
            unsent_bytes=256 << 10,
            burst=400.0,  # far more than needed: an agent sends at most ten messages in a second
            per_s=100.0,
        )
        self._server = BoundedServer(SelectorWatcher(selector), self, AGENT, CONTROLLER, limits)
        self.close, self.wake = self._server.close, self._server.wake
        self.send, self.drop = self._server.send, self._server.drop
        self.on_connect, self.on_disconnect = inside.on_connect, inside.on_disconnect

    def open(self, host: str, port: int) -> int:
        """Listen and return the port. Port 0 selects a free one."""
        try:
            return self._server.listen(host, port)
        except OSError as error:
            hint = (
                "`ss -ltnp` shows which process listens there; `dalsegno down` stops the daemons of an earlier cluster"
            )
            what = f"the controller cannot listen on {host}:{port}: {error.strerror or error}"
            raise DalsegnoError(what, hint=hint) from error

    def greeting(self) -> Message:
        return {}

    def identify(self, hello: Message, handshake: ServerHandshake) -> Proved[NodeHello]:
        claimed = read_hello(hello)
        secret = self._secret_of(claimed.node)
        if secret is None:
            raise BadFrame(f"no proof that the peer is {claimed.node}")
        try:
            return Proved(claimed, handshake.check(hello, secret, *claimed.proven_values()))
        except BadProof as error:
            raise BadFrame(f"no proof that the peer is {claimed.node}") from error

    def admit(self, call: Call, hello: NodeHello) -> str:
        why = self._inside.admit(call, hello)
        return f"agent of {hello.node}: {why}" if why else ""

    def on_message(self, call: Call, message: Message) -> None:
        try:
            self._inside.on_message(call, message)
        except BadReport as error:
            raise BadFrame(str(error)) from error

    def on_refused(self, cause: str, detail: str) -> None:
        self._refusals.log(cause, detail)


# Known nodes and their addresses


class KnownNodes:
    """The nodes that have a secret, their addresses from slurm.conf, and the settings for their checks.

    All of them are read from files, which may change at any time.
    """

    def __init__(self, secrets: Path, slurm_conf: Path) -> None:
        self._secrets = secrets
        self._slurm_conf, self._checks = _Watched(slurm_conf), _Watched(slurm_conf.with_name(FILE))
        self._places, self._settings = dict[str, NodeAddress](), Message()

    def secret_of(self, node: str) -> bytes | None:
        """Return a node's secret; None for an unknown node.

        The secret is read on every call, because a replaced machine has a new one.
        """
        if not is_node_name(node):
            return None
        try:
            return read_secret(self._secrets / node)
        except DalsegnoError:
            return None

    def places(self) -> dict[str, NodeAddress]:
        """Return the address of each node.

        If slurm.conf has no IP address for a node, its address is "". The node is then probed at the address from which
        its agent connected.
        """
        self._read_again()
        try:
            names = os.listdir(self._secrets)
        except OSError:
            return {}
        return {name: self._places.get(name, NodeAddress("")) for name in sorted(names) if is_node_name(name)}

    def settings(self) -> Message:
        """Return the check settings for the agents. While the file is damaged, return the last valid settings."""
        if self._checks.changed():
            with contextlib.suppress(DalsegnoError):
                read_settings(self._checks.path)
                health = json.loads(read_text(self._checks.path) or "{}")
                self._settings = {"checks": health.get("checks", {})}
        return self._settings

    def _read_again(self) -> None:
        if self._slurm_conf.changed():
            addresses = slurmd_places(read_text(self._slurm_conf.path) or "")
            several = {host for host, count in Counter(host for host, _ in addresses.values()).items() if count > 1}
            self._places = {
                name: NodeAddress(host if family_of(host) else "", port, host in several or host.startswith("127."))
                for name, (host, port) in addresses.items()
            }


class _Watched:
    """A file that may be rewritten. While it is missing, its last contents apply."""

    def __init__(self, path: Path) -> None:
        self.path, self._seen = path, (0, 0)

    def changed(self) -> bool:
        try:
            found = self.path.stat()
        except OSError:
            return False
        before, self._seen = self._seen, (found.st_mtime_ns, found.st_size)
        return before != self._seen
