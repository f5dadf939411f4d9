"""The node agent: `node-agent --node NAME --controller HOST:PORT --secret FILE --boot-id ID-OR-FILE`.

With `--metrics FOLDER`, it also writes the metrics of the node to a file in that folder, for node_exporter. With
`--cloud FILE`, it asks the cloud that the file names for notices.

One thread serves all sockets. Checks and orders run in separate processes, which the agent can kill. The agent also
runs without a controller, and reports its last findings when it has reconnected.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import random
import selectors
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from dalsegno.errors import DalsegnoError, UsageError
from dalsegno.health.messages import (
    BEAT,
    BadReport,
    GpuIdentity,
    GpuReading,
    Order,
    Reply,
    read_order,
    readings_message,
    reply_message,
)
from dalsegno.health.wire import (
    AGENT,
    BEAT_S,
    CONTROLLER,
    MAX_MESSAGE_BYTES,
    UNAUTHENTICATED_BYTES,
    NodeHello,
    is_boot_id,
    is_node_name,
    read_secret,
)
from dalsegno.log import start_logging
from dalsegno.node_agent.findings import Findings
from dalsegno.node_agent.orders import Do, OrderHandlers, OrderProcesses
from dalsegno.node_agent.textfile import STALE_S, Textfile
from dalsegno.node_agent.worker import CHECK_S, CheckWatch, Make
from dalsegno.system.files import read_text
from dalsegno.wire.frames import BadFrame, Message, Reader, pack, parse
from dalsegno.wire.handshake import TAG_BYTES, ClientHandshake, Session

log = logging.getLogger("node-agent")

# The connection to the controller, which never blocks


HANDSHAKE_S = 4.0
UNHEARD_MS = 10_000  # the connection is closed if sent data is not acknowledged for this long
FIRST_PAUSE_S, MAX_PAUSE_S = 0.2, 3.0
SETTLED_S = 5.0  # a connection that lasted this long was stable: the next attempt starts without a long pause
ROOM = 64 << 10  # maximum number of bytes that wait to be sent


class LinkState(Enum):
    DOWN = "down"
    DIALLING = "dialling"
    GREETED = "waiting for the greeting"
    PROVING = "waiting for the welcome"
    UP = "up"


@dataclass(frozen=True)
class AgentAddress:
    """The address of the controller, and the identity of the agent itself."""

    host: str
    port: int
    secret: bytes
    hello: NodeHello


class ControllerLink:
    """The connection to the controller. `on_state_change(up)` is called when it comes up and when it is lost."""

    def __init__(
        self,
        address: AgentAddress,
        selector: selectors.BaseSelector,
        on_message: Callable[[Message], None],
        on_state_change: Callable[[bool], None],
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.state, self._address = LinkState.DOWN, address
        self._selector, self._on_message, self._on_state_change, self._jitter = (
            selector,
            on_message,
            on_state_change,
            jitter,
        )
        self._sock: socket.socket | None = None
        self._reader, self._unsent = Reader(UNAUTHENTICATED_BYTES), bytearray()
        self._handshake = ClientHandshake(AGENT, CONTROLLER)
        self._session: Session | None = None  # set after the handshake
        self._due = 0.0  # when to connect, or to end an attempt to connect (monotonic)
        self._up_at, self._pause_s = 0.0, FIRST_PAUSE_S
        self._events = 0
        self._logged_why = ""
        self.address = ""  # this node's address, as the controller sees it

    @property
    def up(self) -> bool:
        return self.state is LinkState.UP

    def can_send(self) -> bool:
        """Return whether the connection is up and has room for more data."""
        return self.up and len(self._unsent) < ROOM

    def send(self, message: Message, now: float) -> None:
        """Send a message; drop it if there is no connection. Lost findings are sent again on the next connection."""
        if self._session is not None:
            self._unsent += self._session.closer.close(message)
            self._guard(now, self._flush)

    def wake(self, now: float) -> float | None:
        """Start a connection attempt, or abort one, if that is due. Return when to call again; None if the connection
        is up."""
        if self.state is LinkState.DOWN and now >= self._due:
            self._guard(now, lambda: self._dial(now))
        elif self.state not in (LinkState.DOWN, LinkState.UP) and now >= self._due:
            self._lose(now, f"no answer while {self.state.value}")
        return None if self.up else self._due

    def close(self) -> None:
        if self._sock is not None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(self._sock)
            self._sock.close()
            self._sock = None

    def _dial(self, now: float) -> None:
        self._due = now + HANDSHAKE_S
        family, kind, _, _, address = socket.getaddrinfo(
            self._address.host, self._address.port, type=socket.SOCK_STREAM
        )[0]
        self._sock = socket.socket(family, kind)
        self._sock.setblocking(False)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNHEARD_MS)
        self._reader, self._unsent = Reader(UNAUTHENTICATED_BYTES), bytearray()
        self._handshake, self._session = ClientHandshake(AGENT, CONTROLLER), None
        self.state, self._events = LinkState.DIALLING, selectors.EVENT_WRITE
        self._selector.register(self._sock, self._events, self._ready)
        code = self._sock.connect_ex(address)
        if code not in (0, errno.EINPROGRESS):
            raise OSError(code, "cannot connect")

    def _ready(self, events: int, now: float) -> None:
        self._guard(now, lambda: self._step(events, now))

    def _step(self, events: int, now: float) -> None:
        assert self._sock is not None
        if self.state is LinkState.DIALLING:
            self.address = str(self._sock.getsockname()[0])
            if code := self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(code, "cannot connect")
            self.state = LinkState.GREETED
        if events & selectors.EVENT_READ:
            self._listen(now)
        if self.state is not LinkState.DOWN:
            self._flush()

    def _listen(self, now: float) -> None:
        assert self._sock is not None
        try:
            data = self._sock.recv(65536)
        except BlockingIOError:
            return
        if not data:
            raise OSError(errno.ECONNRESET, "connection closed")
        for body in self._reader.bodies(data):
            self._take(body, now)
            if self.state is LinkState.DOWN:
                return

    def _take(self, body: bytes, now: float) -> None:
        if self.state is LinkState.GREETED:
            hello = self._address.hello
            proof = self._handshake.answer(parse(body), self._address.secret, *hello.proven_values())
            self._unsent += pack({**hello.fields(), **proof})
            self.state = LinkState.PROVING
        elif self.state is LinkState.PROVING:
            self._come_up(self._handshake.finish(parse(body)), now)
        elif self._session is not None:
            self._on_message(self._session.opener.open(body))

    def _come_up(self, session: Session, now: float) -> None:
        self._session = session
        self._reader.max_bytes = MAX_MESSAGE_BYTES + TAG_BYTES
        self.state, self._up_at, self._logged_why = LinkState.UP, now, ""
        log.info("connected to %s:%d", self._address.host, self._address.port)
        self._on_state_change(True)

    def _flush(self) -> None:
        assert self._sock is not None
        if self._unsent and self.state is not LinkState.DIALLING:
            with contextlib.suppress(BlockingIOError):
                del self._unsent[: self._sock.send(self._unsent)]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
        if events != self._events:
            self._events = events
            self._selector.modify(self._sock, events, self._ready)

    def _guard(self, now: float, step: Callable[[], None]) -> None:
        try:
            step()
        except (OSError, BadFrame) as error:
            self._lose(now, str(error))

    def _lose(self, now: float, why: str) -> None:
        was_up = self.up
        self.close()
        self.state, self._session = LinkState.DOWN, None
        if was_up and now - self._up_at >= SETTLED_S:
            self._pause_s = FIRST_PAUSE_S
        self._due = now + self._pause_s * (0.5 + self._jitter())  # many agents must not connect all at once
        self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
        if why != self._logged_why:
            log.warning("no connection to %s:%d: %s", self._address.host, self._address.port, why)
            self._logged_why = why
        if was_up:
            self._on_state_change(False)


MAX_REST_S = 600.0


def main(arguments: Sequence[str]) -> int:
    start_logging("node-agent")
    try:
        options = parse_options(arguments)
        secret = read_secret(options.secret)
    except DalsegnoError as error:
        log.error("cannot start: %s; %s", error.what, error.hint)
        return error.exit_code
    duties = OrderHandlers(options.node, options.boot, options.metrics, options.cloud)
    agent = NodeAgent(options, secret, duties.continuous_checks, duties.do)
    duties.findings, duties.address, duties.settings = agent.findings.all, agent.link_address, agent.watch.settings
    signal.signal(signal.SIGTERM, _stop)
    try:
        agent.serve()
    except AgentStopped:
        agent.close()
    return 0


class AgentStopped(Exception):
    """The agent received SIGTERM."""


def _stop(number: int, frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise AgentStopped


@dataclass(frozen=True)
class NodeAgentOptions:
    node: str
    host: str
    port: int
    secret: Path
    boot: str
    metrics: Path | None = None  # folder for the file with the node's metrics
    cloud: Path | None = None  # file that names the cloud of the node


def parse_options(arguments: Sequence[str]) -> NodeAgentOptions:
    """Parse the command line without argparse, which takes as much memory as the rest of the agent."""
    needed = "--node NAME --controller HOST:PORT --secret FILE --boot-id ID-OR-FILE"
    hint = f"node-agent {needed} [--metrics FOLDER] [--cloud FILE]"
    names = {"--node", "--controller", "--secret", "--boot-id"}
    given = dict(zip(arguments[::2], arguments[1::2], strict=False))
    if len(arguments) != 2 * len(given) or set(given) - {"--metrics", "--cloud"} != names:
        raise UsageError("the node agent needs four options, and takes `--metrics` and `--cloud`", hint=hint)
    host, _, port = given["--controller"].rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UsageError(f"`{given['--controller']}` is not HOST:PORT", hint=hint)
    if not is_node_name(given["--node"]):
        raise UsageError(f"invalid node name `{given['--node']}`", hint=hint)
    metrics, cloud = (Path(given[name]) if name in given else None for name in ("--metrics", "--cloud"))
    for path in (metrics, cloud):
        if path and not path.is_absolute():
            raise UsageError(f"`{path}` is not an absolute path", hint=hint)
    boot = _boot(given["--boot-id"], hint)
    secret = Path(given["--secret"])
    return NodeAgentOptions(given["--node"], host.strip("[]"), int(port), secret, boot, metrics, cloud)


def _boot(value: str, hint: str) -> str:
    """Return the boot id: the value of the option, or the content of the file that it names."""
    text = value
    if value.startswith("/"):
        text = (read_text(Path(value)) or "").strip()
    if not is_boot_id(text):
        raise UsageError(f"`{value}` is neither a boot id nor a file with one", hint=hint)
    return text


class NodeAgent:
    """The node agent. `make` creates the object that runs checks and `do` carries out orders, each in its own
    process."""

    def __init__(self, options: NodeAgentOptions, secret: bytes, make: Make, do: Do, check_s: float = CHECK_S) -> None:
        self.selector = selectors.DefaultSelector()
        self.findings = Findings(options.node, options.boot)
        started = time.clock_gettime(time.CLOCK_BOOTTIME)  # changes of the wall clock do not affect this clock
        address = AgentAddress(options.host, options.port, secret, NodeHello(options.node, options.boot, started))
        self.link = ControllerLink(address, self.selector, self._on_message, self._on_link_change)
        self.watch = CheckWatch(
            make, self.selector, self.findings.note, self._on_round, time.time, check_s, self._on_readings
        )
        self._readings: tuple[GpuReading, ...] = ()
        self.orders = OrderProcesses(do, self.selector, self._send, self.link.can_send)
        self._beat_at = 0.0
        self._has_settings, self._checked_with_settings = False, False
        self._textfile = Textfile(options.metrics) if options.metrics else None
        self._textfile_at = 0.0
        if self._textfile:
            self._textfile.remove()  # an agent that was killed may have left the file behind

    def serve(self) -> None:
        while True:
            self.turn()

    def turn(self, most_s: float = 60.0) -> None:
        """Wait for the next event and handle it."""
        now = time.monotonic()
        if self._textfile and now >= self._textfile_at:
            self._textfile_at = now + STALE_S / 3
            self._textfile.remove_stale(time.time())
        due = [self.link.wake(now), self.watch.wake(now), self.orders.wake(now), self._send_news(now)]
        wait = min((at - now for at in due if at is not None), default=most_s)
        for key, events in self.selector.select(min(max(wait, 0.0), most_s)):
            key.data(events, time.monotonic())

    def link_address(self) -> str:
        return self.link.address

    def close(self) -> None:
        self.orders.drop_all()
        self.watch.close()
        if self._textfile:
            self._textfile.remove()
        self.link.close()
        self.selector.close()

    def _send_news(self, now: float) -> float | None:
        """Send new findings, and a heartbeat if one is due. Return when to call again; None if the connection is
        down."""
        if not self.link.can_send():
            return now + BEAT_S if self.link.up else None
        # until the checks have run with the settings, findings may be those of disabled checks
        if self._has_settings and self._checked_with_settings:
            for message in self.findings.messages(now):
                self.link.send(message, now)
        if now >= self._beat_at:
            self._beat_at = now + BEAT_S
            self.link.send(BEAT, now)
        return self._beat_at

    def _on_message(self, message: Message) -> None:
        if set(message) == {"settings"} and isinstance(message["settings"], dict):
            self._has_settings = True
            if self.watch.set(message["settings"]):
                self._checked_with_settings = False
            return
        try:
            self._carry_out(read_order(message), time.monotonic())
        except BadReport as error:
            log.warning("invalid message of the controller: %s", error)

    def _carry_out(self, order: Order, now: float) -> None:
        log.debug("order %d: %s", order.number, order.do)
        if order.do == "rest":
            until = now + min(float(order.arguments.get("seconds", "60")), MAX_REST_S)
            self.watch.rest(until, lambda: self._send(reply_message(Reply(order.number, done=True))))
        else:
            self.orders.begin(order, now)

    def _on_link_change(self, up: bool) -> None:
        if up:
            self._has_settings = False
            self.findings.begin_again()
            if self._readings:
                self._send(readings_message(self._readings))
            self._beat_at = 0.0
        else:
            self.orders.drop_all()

    def _on_round(self, names: list[str], gpus: list[GpuIdentity] | None) -> None:
        self._checked_with_settings = True
        self.findings.keep(names)
        if gpus is not None:
            self.findings.set_gpus(gpus)

    def _on_readings(self, readings: tuple[GpuReading, ...]) -> None:
        self._readings = readings
        if self.link.can_send():
            self._send(readings_message(readings))

    def _send(self, message: Message) -> None:
        self.link.send(message, time.monotonic())
