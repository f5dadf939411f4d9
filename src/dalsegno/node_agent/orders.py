"""Work that an agent does in separate processes: run its checks and carry out the controller's orders."""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from socket import socket
from typing import Protocol

from dalsegno.errors import DalsegnoError
from dalsegno.health.check import Context
from dalsegno.health.checks import CHECKS
from dalsegno.health.facts import GpuFacts
from dalsegno.health.local_machine import identify_gpu, machine_here, settings_here
from dalsegno.health.messages import Finding, GpuIdentity, GpuReading, NodeReport, Order, Reply, parts, reply_message
from dalsegno.health.readers.gpus import ask_gpus, has_gpus
from dalsegno.health.result import Result, Verdict
from dalsegno.health.runner import Checkup
from dalsegno.health.settings import LISTEN_S, VALIDATE_S, Settings
from dalsegno.node_agent import loads
from dalsegno.node_agent.collective import Collective
from dalsegno.node_agent.evidence import SharedMemorySweeper, gather
from dalsegno.node_agent.findings import clean
from dalsegno.node_agent.pair import PartnerUnreachable, answer, call, run_pair_tests
from dalsegno.spec.facts import CheckSetting, Health, facts_from_json
from dalsegno.system.files import read_text
from dalsegno.system.hanging_calls import Forked, NoAnswer, fork
from dalsegno.wire.frames import BadFrame, Message, Reader, pack

# Orders. Each runs in a separate process with a time limit, so that none delays the heartbeat.


MAX_ORDERS = 4  # maximum number of orders at a time
TIMEOUT_S = {"check": 40.0, "validate": VALIDATE_S, "evidence": 40.0, "pair-listen": LISTEN_S}

Send = Callable[[Reply], None]
Do = Callable[[Order, Send], None]  # sends the parts of the answer; the caller sends the last part (`done`)


@dataclass(eq=False)
class _RunningOrder:
    order: Order
    until: float
    forked: Forked
    reader: Reader = field(default_factory=Reader)
    listening: bool = True


class OrderProcesses:
    """The processes that carry out orders. `send` sends an answer to the controller; `can_send` returns whether there
    is room for one."""

    def __init__(
        self, do: Do, selector: selectors.BaseSelector, send: Callable[[Message], None], can_send: Callable[[], bool]
    ) -> None:
        self._do, self._selector, self._send, self._can_send = do, selector, send, can_send
        self._under_way: list[_RunningOrder] = []
        self._killed: list[Forked] = []

    def begin(self, order: Order, now: float) -> None:
        if order.do not in TIMEOUT_S:
            self._refuse(order, f"unknown order {order.do}")
        elif len(self._under_way) >= MAX_ORDERS:
            self._refuse(order, "this agent is overloaded")
        else:
            forked = fork(lambda sock: _carry_out(self._do, order, sock))
            running = _RunningOrder(order, now + TIMEOUT_S[order.do], forked)
            self._under_way.append(running)
            self._register(running)

    def wake(self, now: float) -> float | None:
        """Kill orders that take too long, continue orders that waited for room, and return when to call again."""
        self._killed = [forked for forked in self._killed if not forked.ended()]
        for running in [each for each in self._under_way if each.until <= now]:
            self._end(running, "it took too long and was stopped")
        if self._can_send():
            for running in self._under_way:
                if not running.listening:
                    self._register(running)
        waiting = any(not running.listening for running in self._under_way)
        return now + 0.05 if waiting else min((running.until for running in self._under_way), default=None)

    def drop_all(self) -> None:
        """Stop all orders: nobody waits for their answers any more."""
        for running in list(self._under_way):
            self._stop(running)

    def _register(self, running: _RunningOrder) -> None:
        running.listening = True
        self._selector.register(running.forked.sock, selectors.EVENT_READ, lambda events, now: self._listen(running))

    def _listen(self, running: _RunningOrder) -> None:
        if running not in self._under_way:
            return
        if not self._can_send():  # stop reading for now: the order's socket buffers its messages
            self._selector.unregister(running.forked.sock)
            running.listening = False
            return
        try:
            data = running.forked.sock.recv(16384)
            for message in running.reader.feed(data):
                self._send(message)
                if message.get("done"):
                    self._stop(running)
                    return
        except BlockingIOError:
            return
        except (OSError, BadFrame):
            data = b""
        if not data:
            self._end(running, "it exited without an answer")

    def _end(self, running: _RunningOrder, why: str) -> None:
        self._stop(running)
        self._refuse(running.order, why)

    def _stop(self, running: _RunningOrder) -> None:
        self._under_way.remove(running)
        if running.listening:
            self._selector.unregister(running.forked.sock)
        running.forked.kill()
        self._killed.append(running.forked)

    def _refuse(self, order: Order, why: str) -> None:
        self._send(reply_message(Reply(order.number, done=True, error=why)))


def _carry_out(do: Do, order: Order, sock: socket) -> None:
    """Carry out an order, in its own process."""
    sock.setblocking(True)

    def send(reply: Reply) -> None:
        sock.sendall(pack(reply_message(reply)))

    try:
        do(order, send)
        send(Reply(order.number, done=True))
    except Exception as error:  # reported, so that the controller can show why there is no answer
        send(Reply(order.number, done=True, error=f"{type(error).__name__}: {error}"))
        raise


# The agent's periodic work: checks, readings and metrics


GPUS_EVERY_S = 30.0
READINGS_EVERY_S = 2.0
MEMORY, METRICS = "memory-of-runs", "node-metrics"


class MetricsWriter(Protocol):
    """Writes the node's metrics when they are due (`NodeMetrics`)."""

    def write_due(self) -> None: ...


class ContinuousChecks:
    """The continuous work on this node: checks, metrics, and freeing the shared memory of ended runs."""

    def __init__(self, checkup: Checkup, metrics: MetricsWriter | None = None) -> None:
        self._checkup, self._gpus_at, self._memory = checkup, float("-inf"), SharedMemorySweeper()
        self._metrics = metrics
        self._readings_at, self._readings = float("-inf"), tuple[GpuReading, ...]()

    def names(self) -> Iterable[str]:
        return self._checkup.names(Context.CONTINUOUS)

    def run_due(self, without: frozenset[str]) -> Iterator[str | Finding]:
        yield from self._checkup.run_due(Context.CONTINUOUS, without)
        if MEMORY not in without:
            yield MEMORY  # announces the sweep, so that a hang is not blamed on the last check
            self._memory.tidy(time.monotonic())
        if self._metrics and METRICS not in without:
            yield METRICS
            self._metrics.write_due()

    def gpus(self) -> Iterable[GpuIdentity] | None:
        """Return the GPUs, except lost ones.

        GPUs rarely change, so they are queried only every GPUS_EVERY_S. Return None in between, and if the driver does
        not answer.
        """
        if time.monotonic() - self._gpus_at < GPUS_EVERY_S:
            return None
        self._gpus_at = time.monotonic()
        try:
            found = ask_gpus(self._checkup.node) if has_gpus(self._checkup.node) else ()
        except NoAnswer:
            return None
        return [identify_gpu(gpu) for gpu in found if gpu.uuid and not gpu.lost]

    def readings(self) -> Iterable[GpuReading] | None:
        """Return the GPU readings if they have changed; otherwise return None.

        Also return None if READINGS_EVERY_S has not passed since the last query, or if the driver does not answer.
        """
        if time.monotonic() - self._readings_at < READINGS_EVERY_S:
            return None
        self._readings_at = time.monotonic()
        try:
            found = ask_gpus(self._checkup.node) if has_gpus(self._checkup.node) else ()
        except NoAnswer:
            return None
        before, self._readings = self._readings, tuple(read_gpu(gpu) for gpu in found if not gpu.lost)
        return self._readings if self._readings != before else None


def read_gpu(gpu: GpuFacts) -> GpuReading:
    """Return the values of a GPU to show to users, rounded so that small changes cause no messages."""
    used, total = gpu.memory_used_mib, gpu.memory_total_mib
    step = max(total // 200, 1) if total else 1
    return GpuReading(
        gpu.index,
        None if gpu.temperature_c is None else round(gpu.temperature_c),
        None if used is None else used // step * step,
        total,
        None if gpu.utilization_percent is None else 5 * round(gpu.utilization_percent / 5),
        None if gpu.clock_mhz is None else 100 * round(gpu.clock_mhz / 100),
        gpu.pcie_width,
    )


@dataclass
class OrderHandlers:
    """Carries out the orders of one agent. `findings` returns the agent's last findings, `address` the node's address.

    If `metrics` is set, the metrics of the node are written to a file in that folder.
    """

    node: str
    boot: str
    metrics: Path | None = None
    cloud: Path | None = None  # file that names the cloud of the node
    findings: Callable[[], tuple[Finding, ...]] = field(default=tuple)
    address: Callable[[], str] = field(default=str)
    settings: Callable[[], Message] = field(default=dict)

    def continuous_checks(self, settings: Message) -> ContinuousChecks:
        if self.metrics is None:
            return ContinuousChecks(self.checkup(settings))
        from dalsegno.node_agent.metrics_writer import NodeMetrics  # imported here to save memory without metrics
        from dalsegno.node_agent.textfile import Textfile

        checkup = self.checkup(settings)
        return ContinuousChecks(checkup, NodeMetrics(checkup.node, self.node, Textfile(self.metrics)))

    def checkup(self, settings: Message) -> Checkup:
        node = machine_here(os.environ, self.node, cloud_file=str(self.cloud or ""))
        return Checkup(CHECKS, node, check_settings(settings))

    def do(self, order: Order, send: Send) -> None:
        """Carry out one order and send the parts of the answer as they are ready."""
        how = {
            "check": self._check,
            "validate": self._validate,
            "evidence": self._evidence,
            "pair-listen": self._pair_listen,
        }
        how[order.do](order, send)

    def _check(self, order: Order, send: Send) -> None:
        found = self.checkup(self.settings()).all(Context(order.arguments["context"]))
        self._send_report(order, send, found)

    def _validate(self, order: Order, send: Send) -> None:
        """Validate the node, first alone. Only if no check and no load test fails, test it with its partner.

        torch is used only for a pair test or for GPUs. Loading it keeps a processor busy for seconds, and a test over
        the loopback interface alone is not worth that.
        """
        with_torch = self._collective() if "secret" in order.arguments or loads.may_have_gpus() else nullcontext()
        with with_torch as collective, _partner(order.arguments) as partner:
            found = [*self.checkup(self.settings()).all(Context.VALIDATION), *self._loads(collective)]
            if collective and not any(each.result.verdict is Verdict.FAILED for each in found):
                found += [self._finding(*each) for each in partner(collective)]
        self._send_report(order, send, found)

    def _loads(self, collective: Collective | None) -> Iterator[Finding]:
        available = loads.available_bytes(read_text(Path("/proc/meminfo")) or "")
        if self._is_on("load-product"):
            yield self._finding("load-product", loads.run_load(loads.matrix_product))
            for index, result in loads.gpu_products():
                yield self._finding(f"load-gpu-{index}", result)
        if self._is_on("load-memory"):
            yield self._finding("load-memory", loads.run_load(lambda: loads.memory_load(available)))
        if self._is_on("load-loopback"):
            yield self._finding("load-loopback", loads.run_load(loads.loopback_exchange))
        if collective and not collective.off:
            yield self._finding("load-collective", collective.alone())

    def _collective(self) -> Collective:
        return Collective(off=not self._is_on("pair-collective"))

    def _is_on(self, load_test: str) -> bool:
        return check_settings(self.settings()).get(load_test, CheckSetting()).enabled

    def _evidence(self, order: Order, send: Send) -> None:
        for name, text in gather(self.node, self.boot, self.findings(), os.environ):
            for part in parts(text):
                send(Reply(order.number, file=name, part=part))

    def _pair_listen(self, order: Order, send: Send) -> None:
        secret = order.arguments["secret"].encode()
        with self._collective() as collective:
            try:
                with answer(self.address(), secret, lambda port: send(Reply(order.number, port=port))) as sock:
                    found = [self._finding(*each) for each in run_pair_tests(sock, secret, 1, collective)]
            except PartnerUnreachable as error:
                found = [self._finding("pair", error.result)]
        self._send_report(order, send, found)

    def _finding(self, name: str, result: Result) -> Finding:
        return Finding(name, result, time.time())

    def _send_report(self, order: Order, send: Send, found: Iterable[Finding]) -> None:
        send(Reply(order.number, report=NodeReport(self.node, self.boot, tuple(map(clean, found)))))


@contextmanager
def _partner(arguments: Mapping[str, str]) -> Iterator[Callable[[Collective], Iterable[tuple[str, Result]]]]:
    """Connect to the partner, if the order names one, and yield the function that runs the tests with it.

    The connection is opened before this node is tested alone. In the meantime, the partner loads torch, and it notices
    if this node dies.
    """
    if "secret" not in arguments:
        yield lambda collective: ()
        return
    secret = arguments["secret"].encode()
    try:
        sock = call(arguments["address"], int(arguments["port"]), secret)
    except PartnerUnreachable as error:
        found = [("pair", error.result)]
        yield lambda collective: found
        return
    with sock:
        yield lambda collective: run_pair_tests(sock, secret, 0, collective)


def check_settings(settings: Message) -> Settings:
    """Return the settings from the controller, or else from the file beside slurm.conf."""
    if "checks" in settings:
        return facts_from_json(Health, {"checks": settings["checks"]}).checks
    try:
        return settings_here()
    except DalsegnoError:
        return {}  # a damaged file must not stop the checks, which have default thresholds
