"""What an agent does in processes of its own: look at its checks, and carry out the controller's orders."""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from socket import socket

from dalsegno.errors import DalsegnoError
from dalsegno.health.check import Context
from dalsegno.health.checks import CHECKS
from dalsegno.health.here import machine_here, passport, settings_here
from dalsegno.health.messages import Finding, GpuIdentity, NodeReport, Order, Reply, parts, reply_message
from dalsegno.health.readers.gpus import ask_gpus, has_gpus
from dalsegno.health.result import Result, Verdict
from dalsegno.health.runner import Checkup
from dalsegno.health.settings import LISTEN_S, VALIDATE_S, Settings
from dalsegno.node_agent import loads
from dalsegno.node_agent.collective import Collective
from dalsegno.node_agent.evidence import MemoryOfRuns, gather
from dalsegno.node_agent.findings import clean
from dalsegno.node_agent.pair import NotMet, answer, call, try_together
from dalsegno.spec.facts import Health, facts_from_json
from dalsegno.system.apart import Forked, NoAnswer, fork
from dalsegno.system.files import read_text
from dalsegno.wire.frames import BadFrame, Message, Reader, pack

# ---- What the controller orders, each in a process of its own, so that none holds up the heartbeat: done, or
# killed.


MOST = 4  # at a time
PATIENCE_S = {"check": 40.0, "validate": VALIDATE_S, "evidence": 40.0, "pair-listen": LISTEN_S}

Send = Callable[[Reply], None]
Do = Callable[[Order, Send], None]  # does what was ordered; sends parts of the answer, but not that it is done


@dataclass(eq=False)
class _Errand:
    order: Order
    until: float
    forked: Forked
    reader: Reader = field(default_factory=Reader)
    listening: bool = True


class OrderProcesses:
    """`say` sends an answer to the controller, `room` tells whether it can be sent now."""

    def __init__(
        self, do: Do, selector: selectors.BaseSelector, say: Callable[[Message], None], room: Callable[[], bool]
    ) -> None:
        self._do, self._selector, self._say, self._room = do, selector, say, room
        self._under_way: list[_Errand] = []
        self._killed: list[Forked] = []

    def begin(self, order: Order, now: float) -> None:
        if order.do not in PATIENCE_S:
            self._refuse(order, f"this agent does not know how to {order.do}")
        elif len(self._under_way) >= MOST:
            self._refuse(order, "this agent has too much to do already")
        else:
            forked = fork(lambda sock: _carry_out(self._do, order, sock))
            errand = _Errand(order, now + PATIENCE_S[order.do], forked)
            self._under_way.append(errand)
            self._register(errand)

    def wake(self, now: float) -> float | None:
        """Kill what takes too long, and go on with those that had to wait for room; returns when to look again."""
        self._killed = [forked for forked in self._killed if not forked.ended()]
        for errand in [each for each in self._under_way if each.until <= now]:
            self._end(errand, "it took too long, and was ended")
        if self._room():
            for errand in self._under_way:
                if not errand.listening:
                    self._register(errand)
        waiting = any(not errand.listening for errand in self._under_way)
        return now + 0.05 if waiting else min((errand.until for errand in self._under_way), default=None)

    def drop_all(self) -> None:
        """Nobody waits for the answers any more."""
        for errand in list(self._under_way):
            self._stop(errand)

    def _register(self, errand: _Errand) -> None:
        errand.listening = True
        self._selector.register(errand.forked.sock, selectors.EVENT_READ, lambda events, now: self._listen(errand))

    def _listen(self, errand: _Errand) -> None:
        if errand not in self._under_way:
            return
        if not self._room():  # let it wait: its own socket holds what it says meanwhile
            self._selector.unregister(errand.forked.sock)
            errand.listening = False
            return
        try:
            data = errand.forked.sock.recv(16384)
            for message in errand.reader.feed(data):
                self._say(message)
                if message.get("done"):
                    self._stop(errand)
                    return
        except BlockingIOError:
            return
        except (OSError, BadFrame):
            data = b""
        if not data:
            self._end(errand, "it ended without an answer")

    def _end(self, errand: _Errand, why: str) -> None:
        self._stop(errand)
        self._refuse(errand.order, why)

    def _stop(self, errand: _Errand) -> None:
        self._under_way.remove(errand)
        if errand.listening:
            self._selector.unregister(errand.forked.sock)
        errand.forked.kill()
        self._killed.append(errand.forked)

    def _refuse(self, order: Order, why: str) -> None:
        self._say(reply_message(Reply(order.number, done=True, error=why)))


def _carry_out(do: Do, order: Order, sock: socket) -> None:
    """In the process of its own."""
    sock.setblocking(True)

    def send(reply: Reply) -> None:
        sock.sendall(pack(reply_message(reply)))

    try:
        do(order, send)
        send(Reply(order.number, done=True))
    except Exception as error:  # the controller must hear why there is no answer
        send(Reply(order.number, done=True, error=f"{type(error).__name__}: {error}"))
        raise


# ---- What an agent does in processes of its own: look at its checks, and carry out the controller's orders.


GPUS_EVERY_S = 30.0
MEMORY = "memory-of-runs"


class ContinuousLooks:
    """The checks of this node, looked at again and again."""

    def __init__(self, checkup: Checkup) -> None:
        self._checkup, self._gpus_at, self._memory = checkup, float("-inf"), MemoryOfRuns()

    def names(self) -> Iterable[str]:
        return self._checkup.names(Context.CONTINUOUS)

    def look(self, without: frozenset[str]) -> Iterator[str | Finding]:
        yield from self._checkup.look(Context.CONTINUOUS, without)
        if MEMORY not in without:
            yield MEMORY  # should it hang, it is known to be at fault, and not the check before
            self._memory.tidy(time.monotonic())

    def gpus(self) -> Iterable[GpuIdentity] | None:
        """Now and then: they do not come and go. Of one that was lost nothing is forgotten."""
        if time.monotonic() - self._gpus_at < GPUS_EVERY_S:
            return None
        self._gpus_at = time.monotonic()
        try:
            found = ask_gpus(self._checkup.world) if has_gpus(self._checkup.world) else ()
        except NoAnswer:
            return None
        return [passport(gpu) for gpu in found if gpu.uuid and not gpu.lost]


@dataclass
class Duties:
    """Of the agent of one node. `findings` gives what it found last, `address` where it can be reached."""

    node: str
    boot: str
    findings: Callable[[], tuple[Finding, ...]] = field(default=tuple)
    address: Callable[[], str] = field(default=str)
    settings: Callable[[], Message] = field(default=dict)

    def looks(self, settings: Message) -> ContinuousLooks:
        return ContinuousLooks(self.checkup(settings))

    def checkup(self, settings: Message) -> Checkup:
        return Checkup(CHECKS, machine_here(os.environ, self.node), check_settings(settings))

    def do(self, order: Order, send: Send) -> None:
        """One order; parts of its answer are sent as they come."""
        how = {
            "check": self._check,
            "validate": self._validate,
            "evidence": self._evidence,
            "pair-listen": self._pair_listen,
        }
        how[order.do](order, send)

    def _check(self, order: Order, send: Send) -> None:
        found = self.checkup(self.settings()).all(Context(order.arguments["context"]))
        self._tell(order, send, found)

    def _validate(self, order: Order, send: Send) -> None:
        """Alone first: only a node that bears its loads is let at a good one.

        Loading torch keeps a processor busy for seconds. For two ranks on the loopback alone it is not worth it."""
        with_torch = Collective() if "secret" in order.arguments or loads.may_have_gpus() else nullcontext()
        with with_torch as collective, _partner(order.arguments) as partner:
            found = [*self.checkup(self.settings()).all(Context.VALIDATION), *self._loads(collective)]
            if collective and not any(each.result.verdict is Verdict.FAILED for each in found):
                found += [self._finding(*each) for each in partner(collective)]
        self._tell(order, send, found)

    def _loads(self, collective: Collective | None) -> Iterator[Finding]:
        available = loads.available_bytes(read_text(Path("/proc/meminfo")) or "")
        yield self._finding("load-product", loads.judged(loads.matrix_product))
        for index, result in loads.gpu_products():
            yield self._finding(f"load-gpu-{index}", result)
        yield self._finding("load-memory", loads.judged(lambda: loads.memory_load(available)))
        yield self._finding("load-loopback", loads.judged(loads.loopback_exchange))
        if collective:
            yield self._finding("load-collective", collective.alone())

    def _evidence(self, order: Order, send: Send) -> None:
        for name, text in gather(self.node, self.boot, self.findings(), os.environ):
            for part in parts(text):
                send(Reply(order.number, file=name, part=part))

    def _pair_listen(self, order: Order, send: Send) -> None:
        secret = order.arguments["secret"].encode()
        with Collective() as collective:
            try:
                with answer(self.address(), secret, lambda port: send(Reply(order.number, port=port))) as sock:
                    found = [self._finding(*each) for each in try_together(sock, secret, 1, collective)]
            except NotMet as error:
                found = [self._finding("pair", error.result)]
        self._tell(order, send, found)

    def _finding(self, name: str, result: Result) -> Finding:
        return Finding(name, result, time.time())

    def _tell(self, order: Order, send: Send, found: Iterable[Finding]) -> None:
        send(Reply(order.number, report=NodeReport(self.node, self.boot, tuple(map(clean, found)))))


@contextmanager
def _partner(told: Mapping[str, str]) -> Iterator[Callable[[Collective], Iterable[tuple[str, Result]]]]:
    """The good node that the controller told of, called at once: it loads torch while this node bears its loads, and
    knows when this one has ended. What is given tries what is to be tried together."""
    if "secret" not in told:
        yield lambda collective: ()
        return
    secret = told["secret"].encode()
    try:
        sock = call(told["address"], int(told["port"]), secret)
    except NotMet as error:
        found = [("pair", error.result)]
        yield lambda collective: found
        return
    with sock:
        yield lambda collective: try_together(sock, secret, 0, collective)


def check_settings(told: Message) -> Settings:
    """As the controller says, if it says anything; else as the file beside slurm.conf does."""
    if "checks" in told:
        return facts_from_json(Health, {"checks": told["checks"]}).checks
    try:
        return settings_here()
    except DalsegnoError:
        return {}  # a damaged file must not end the watch: every check has thresholds of its own
