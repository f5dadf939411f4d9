"""What an agent does in processes of its own: look at its checks, and carry out the controller's orders."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from dalsegno.errors import DalsegnoError
from dalsegno.health.agent import loads
from dalsegno.health.agent.collective import Collective
from dalsegno.health.agent.errands import Send
from dalsegno.health.agent.evidence import gather
from dalsegno.health.agent.findings import clean
from dalsegno.health.agent.meeting import NotMet, answer, call
from dalsegno.health.agent.memory_of_runs import MemoryOfRuns
from dalsegno.health.agent.pair import try_together
from dalsegno.health.check import Context
from dalsegno.health.checks import CHECKS
from dalsegno.health.here import machine_here, passport, settings_here
from dalsegno.health.readers.gpus import ask_gpus, has_gpus
from dalsegno.health.report import Finding, Gpu, Report
from dalsegno.health.result import Result, Verdict
from dalsegno.health.runner import Checkup
from dalsegno.health.settings import Settings
from dalsegno.health.words import Order, Reply, parts
from dalsegno.spec.facts import Health, facts_from_json
from dalsegno.system.apart import NoAnswer
from dalsegno.system.files import read_text
from dalsegno.train.frames import Message

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

    def gpus(self) -> Iterable[Gpu] | None:
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
        send(Reply(order.number, report=Report(self.node, self.boot, tuple(map(clean, found)))))


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
