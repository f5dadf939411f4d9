"""The node agent: `node-agent --node NAME --controller HOST:PORT --secret FILE --boot-id ID-OR-FILE`.

One thread that only ever waits for all of its sockets together. Checks and orders are carried out by processes of their
own, which it may kill. It needs no controller to live: what it found last is told when there is one again.
"""

from __future__ import annotations

import selectors
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dalsegno.errors import DalsegnoError, UsageError
from dalsegno.health.agent.duties import Duties
from dalsegno.health.agent.errands import Do, Errands
from dalsegno.health.agent.findings import Findings
from dalsegno.health.agent.link import Link, Whom
from dalsegno.health.agent.worker import CHECK_S, Make, Watch
from dalsegno.health.report import BadReport, Gpu
from dalsegno.health.wire import BEAT_S, Hello, is_boot_id, is_node_name, read_secret
from dalsegno.health.words import BEAT, Order, Reply, read_order, reply_message
from dalsegno.printable import logged
from dalsegno.system.files import read_text
from dalsegno.train.frames import Message

MOST_REST_S = 600.0


def main(arguments: Sequence[str]) -> int:
    try:
        options = parse_options(arguments)
        secret = read_secret(options.secret)
    except DalsegnoError as error:
        say(f"cannot begin: {error.what}; {error.hint}")
        return error.exit_code
    duties = Duties(options.node, options.boot)
    agent = Agent(options, secret, duties.looks, duties.do)
    duties.findings, duties.address, duties.settings = agent.findings.all, agent.link_address, agent.watch.settings
    agent.serve()
    return 0


def say(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {logged(text)}\n")
    sys.stderr.flush()


@dataclass(frozen=True)
class Options:
    node: str
    host: str
    port: int
    secret: Path
    boot: str


def parse_options(arguments: Sequence[str]) -> Options:
    """By hand: argparse costs as much memory as all else here."""
    hint = "node-agent --node NAME --controller HOST:PORT --secret FILE --boot-id ID-OR-FILE"
    names = {"--node", "--controller", "--secret", "--boot-id"}
    said = dict(zip(arguments[::2], arguments[1::2], strict=False))
    if len(arguments) != 8 or set(said) != names:
        raise UsageError("the node agent is started with its four options", hint=hint)
    host, _, port = said["--controller"].rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UsageError(f"`{said['--controller']}` is no host and port", hint=hint)
    if not is_node_name(said["--node"]):
        raise UsageError(f"`{said['--node']}` is no name of a node", hint=hint)
    return Options(said["--node"], host.strip("[]"), int(port), Path(said["--secret"]), _boot(said["--boot-id"], hint))


def _boot(told: str, hint: str) -> str:
    """An id, or the file that holds it: it is another after every boot, the command line is not."""
    text = told
    if told.startswith("/"):
        text = (read_text(Path(told)) or "").strip()
    if not is_boot_id(text):
        raise UsageError(f"`{told}` is no id of a boot, and no file with one", hint=hint)
    return text


class Agent:
    """`make` makes what looks at the checks, `do` carries out orders; both in processes of their own."""

    def __init__(self, options: Options, secret: bytes, make: Make, do: Do, check_s: float = CHECK_S) -> None:
        self.selector = selectors.DefaultSelector()
        self.findings = Findings(options.node, options.boot)
        started = time.clock_gettime(time.CLOCK_BOOTTIME)  # no matter what the clock on the wall is set to
        whom = Whom(options.host, options.port, secret, Hello(options.node, options.boot, started, ""))
        self.link = Link(whom, self.selector, self._hear, self._turned, say)
        self.watch = Watch(make, self.selector, self.findings.note, self._looked, time.time, check_s)
        self.errands = Errands(do, self.selector, self._tell, self.link.room)
        self._beat_at = 0.0
        self._told_settings, self._looked_with_them = False, False

    def serve(self) -> None:
        while True:
            self.turn()

    def turn(self, most_s: float = 60.0) -> None:
        """Wait for the next thing to happen, and see to it."""
        now = time.monotonic()
        due = [self.link.wake(now), self.watch.wake(now), self.errands.wake(now), self._speak(now)]
        wait = min((at - now for at in due if at is not None), default=most_s)
        for key, events in self.selector.select(min(max(wait, 0.0), most_s)):
            key.data(events, time.monotonic())

    def link_address(self) -> str:
        return self.link.address

    def close(self) -> None:
        self.errands.drop_all()
        self.watch.close()
        self.link.close()
        self.selector.close()

    def _speak(self, now: float) -> float | None:
        """A beat when it is time, and what was found since; when the next beat is due."""
        if not self.link.room():
            return now + BEAT_S if self.link.up else None
        if self._told_settings and self._looked_with_them:  # a check that is off here must not be told of
            for message in self.findings.messages(now):
                self.link.send(message, now)
        if now >= self._beat_at:
            self._beat_at = now + BEAT_S
            self.link.send(BEAT, now)
        return self._beat_at

    def _hear(self, message: Message) -> None:
        if set(message) == {"settings"} and isinstance(message["settings"], dict):
            self._told_settings = True
            if self.watch.set(message["settings"]):
                self._looked_with_them = False
            return
        try:
            self._obey(read_order(message), time.monotonic())
        except BadReport as error:
            say(f"the controller says what this agent does not understand: {error}")

    def _obey(self, order: Order, now: float) -> None:
        if order.do == "rest":
            until = now + min(float(order.arguments.get("seconds", "60")), MOST_REST_S)
            self.watch.rest(until, lambda: self._tell(reply_message(Reply(order.number, done=True))))
        else:
            self.errands.begin(order, now)

    def _turned(self, up: bool) -> None:
        if up:
            self._told_settings = False
            self.findings.begin_again()
            self._beat_at = 0.0
        else:
            self.errands.drop_all()

    def _looked(self, names: list[str], gpus: list[Gpu] | None) -> None:
        self._looked_with_them = True
        self.findings.keep(names)
        if gpus is not None:
            self.findings.know(gpus)

    def _tell(self, message: Message) -> None:
        self.link.send(message, time.monotonic())
