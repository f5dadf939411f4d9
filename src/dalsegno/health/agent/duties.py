"""What an agent does in processes of its own: look at its checks, and carry out the controller's orders."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from dalsegno.errors import DalsegnoError
from dalsegno.health.agent import loads, pair
from dalsegno.health.agent.errands import Send
from dalsegno.health.agent.evidence import gather
from dalsegno.health.agent.findings import clean
from dalsegno.health.agent.memory_of_runs import MemoryOfRuns
from dalsegno.health.check import Context
from dalsegno.health.checks import CHECKS
from dalsegno.health.here import machine_here, passport, settings_here
from dalsegno.health.readers.gpus import ask_gpus, has_gpus
from dalsegno.health.report import Finding, Gpu, Report
from dalsegno.health.result import Result
from dalsegno.health.runner import Checkup
from dalsegno.health.settings import Settings
from dalsegno.health.words import MOST_PART, Order, Reply
from dalsegno.spec.facts import Health
from dalsegno.spec.facts_json import facts_from_json
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
            "pair-dial": self._pair_dial,
        }
        how[order.do](order, send)

    def _check(self, order: Order, send: Send) -> None:
        found = self.checkup(self.settings()).all(Context(order.arguments["context"]))
        self._tell(order, send, found)

    def _validate(self, order: Order, send: Send) -> None:
        """Checks first: a node that fails them is not put under load."""
        found = self.checkup(self.settings()).all(Context.VALIDATION)
        self._tell(order, send, [*found, *self._loads()])

    def _loads(self) -> Iterator[Finding]:
        available = loads.available_bytes(read_text(Path("/proc/meminfo")) or "")
        yield self._finding("load-product", loads.judged(loads.matrix_product))
        for index, result in loads.gpu_products():
            yield self._finding(f"load-gpu-{index}", result)
        yield self._finding("load-memory", loads.judged(lambda: loads.memory_load(available)))
        yield self._finding("load-loopback", loads.judged(loads.loopback_exchange))

    def _evidence(self, order: Order, send: Send) -> None:
        for name, text in gather(self.node, self.boot, self.findings(), os.environ):
            for start in range(0, max(len(text), 1), MOST_PART):
                send(Reply(order.number, file=name, part=text[start : start + MOST_PART]))

    def _pair_listen(self, order: Order, send: Send) -> None:
        secret, least = order.arguments["secret"].encode(), float(order.arguments.get("least_mbytes_per_s", "0"))
        result = pair.listen(self.address(), secret, lambda port: send(Reply(order.number, port=port)), least)
        self._tell(order, send, [self._finding("pair", result)])

    def _pair_dial(self, order: Order, send: Send) -> None:
        said = order.arguments
        least = float(said.get("least_mbytes_per_s", "0"))
        result = pair.dial(said["address"], int(said["port"]), said["secret"].encode(), least)
        self._tell(order, send, [self._finding("pair", result)])

    def _finding(self, name: str, result: Result) -> Finding:
        return Finding(name, result, time.time())

    def _tell(self, order: Order, send: Send, found: Iterable[Finding]) -> None:
        send(Reply(order.number, report=Report(self.node, self.boot, tuple(map(clean, found)))))


def check_settings(told: Message) -> Settings:
    """As the controller says, if it says anything; else as the file beside slurm.conf does."""
    if "checks" in told:
        return facts_from_json(Health, {"checks": told["checks"]}).checks
    try:
        return settings_here()
    except DalsegnoError:
        return {}  # a damaged file must not end the watch: every check has thresholds of its own
