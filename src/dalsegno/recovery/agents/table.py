"""The controller's table of node agents: their presence, their last reports, and the orders sent to them.

It is part of the controller's event loop: everything is registered with the loop's selector, nothing blocks, and
`wake` returns when to call it again.
"""

from __future__ import annotations

import logging
import selectors
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from dalsegno.health.messages import (
    MAX_FINDINGS,
    BadReport,
    GpuReading,
    GpuReadings,
    NewFindings,
    NodeReport,
    Order,
    Reply,
    order_message,
    parse_agent_message,
)
from dalsegno.health.result import Verdict
from dalsegno.health.wire import NodeHello
from dalsegno.recovery.agents.probes import NodeAddress, Probes, family_of
from dalsegno.recovery.agents.server import UNAUTHENTICATED_S, Call, NodeAgentServer
from dalsegno.recovery.agents.view import NODE_LIMITS, AgentView
from dalsegno.recovery.refusal_log import RefusalLog
from dalsegno.wire.frames import Message
from dalsegno.wire.liveness import Liveness, Presence

log = logging.getLogger("controller.agents")

# Orders and their answers, which arrive in parts


MAX_BYTES = 4 << 20  # maximum total size of the files in one answer
MAX_FILES = 32
MAX_ORDERS = 8  # maximum number of pending orders per agent


class OrderEnd(Enum):
    """The ways in which an order to an agent can end. The values are shown to people."""

    ANSWERED = ""
    FAILED = "its agent failed to carry it out"  # the agent gives the reason
    TRUNCATED = "its answer was too long and is cut off"
    LATE = "it took too long"
    NO_PORT = "it did not open a port in time"
    OVERLOADED = "its agent is overloaded"
    CONTROLLER_BUSY = "the controller is busy"
    NOT_CONNECTED = "its agent is not connected"
    DISCONNECTED = "its connection broke"
    AGENT_RESTARTED = "its agent was restarted"
    NODE_GONE = "the node is lost"
    NODE_REMOVED = "the node was removed from the cluster"

    @property
    def undecided(self) -> bool:
        """Return whether the order or its answer was lost, together with the agent or its connection.

        This says nothing about the result of the order, so the order may be repeated.
        """
        return self in _LOST


_LOST = (OrderEnd.NOT_CONNECTED, OrderEnd.DISCONNECTED, OrderEnd.AGENT_RESTARTED, OrderEnd.NODE_GONE)


@dataclass(frozen=True)
class OrderAnswer:
    """The outcome of an order. `detail` is the agent's own description of a failure."""

    node: str
    end: OrderEnd = OrderEnd.ANSWERED
    detail: str = ""
    report: NodeReport | None = None
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def error(self) -> str:
        """Return why the order failed or was carried out only in part; "" if it was carried out."""
        return self.detail or self.end.value


@dataclass
class PendingOrder:
    """An order that has been sent and not answered."""

    node: str
    until: float  # deadline for the answer, on the monotonic clock
    done: Callable[[OrderAnswer], None]
    listens: Callable[[int], None]  # called with the port on which the agent waits for its partner
    port_until: float | None = None  # deadline for the port; None: the port is known or not needed
    report: NodeReport | None = None
    files: dict[str, list[str]] = field(default_factory=dict)
    size: int = 0
    end: OrderEnd = OrderEnd.ANSWERED
    detail: str = ""

    @property
    def due(self) -> float:
        return self.until if self.port_until is None else min(self.port_until, self.until)

    @property
    def late(self) -> OrderEnd:
        """Return how the order ends if no answer has arrived by its deadline."""
        return OrderEnd.LATE if self.port_until is None else OrderEnd.NO_PORT

    def take(self, reply: Reply) -> None:
        """Add one part of the answer. Data beyond the limit is dropped, and the answer is marked as truncated."""
        self.report = reply.report or self.report
        if reply.error and self.end is OrderEnd.ANSWERED:
            self.end, self.detail = OrderEnd.FAILED, reply.error
        if reply.file:
            self._keep(reply.file, reply.part)
        if reply.port and not reply.done:
            self.port_until = None
            self.listens(reply.port)

    def _keep(self, file: str, part: str) -> None:
        self.size += len(part)
        if self.size > MAX_BYTES or (file not in self.files and len(self.files) >= MAX_FILES):
            self.end = OrderEnd.TRUNCATED if self.end is OrderEnd.ANSWERED else self.end
            return
        self.files.setdefault(file, []).append(part)

    def answer(self, end: OrderEnd = OrderEnd.ANSWERED) -> OrderAnswer:
        """Return the answer so far; `end` says why nothing more will arrive."""
        files = {name: "".join(parts) for name, parts in self.files.items()}
        if end is not OrderEnd.ANSWERED:
            return OrderAnswer(self.node, end, "", self.report, files)
        return OrderAnswer(self.node, self.end, self.detail, self.report, files)


class Orders:
    """The pending orders of all agents, by number. A number is never reused."""

    def __init__(self, first: int) -> None:
        self._next, self._pending = first, dict[int, PendingOrder]()

    def add(self, pending: PendingOrder) -> int:
        self._next += 1
        self._pending[self._next] = pending
        return self._next

    def under_way(self, node: str) -> int:
        return sum(one.node == node for one in self._pending.values())

    def take(self, node: str, reply: Reply) -> bool:
        """Process a reply from a node; return False if the reply is not to a pending order of this node."""
        pending = self._pending.get(reply.order)
        if pending is None or pending.node != node:
            return False
        pending.take(reply)
        if reply.done and reply.order in self._pending:
            del self._pending[reply.order]
            pending.done(pending.answer())
        return True

    def fail_all(self, node: str, why: OrderEnd) -> None:
        """Fail all orders of a node that can no longer answer."""
        for number in [number for number, one in self._pending.items() if one.node == node]:
            self._fail(number, why)

    def wake(self, now: float) -> float | None:
        """Fail the orders whose deadline has passed and return the next deadline."""
        for number, late in [(number, one.late) for number, one in self._pending.items() if one.due <= now]:
            self._fail(number, late)
        return min((one.due for one in self._pending.values()), default=None)

    def _fail(self, number: int, why: OrderEnd) -> None:
        if pending := self._pending.pop(number, None):
            pending.done(pending.answer(why))


RESTART_S = 4.0  # how long the services of a node may take to restart
OLD_BOOTS = 32  # number of earlier boots remembered per node


@dataclass
class _Known:
    """The known facts about one node, except its liveness. Times are seconds since 1970."""

    place: NodeAddress
    presence: Presence = Presence.NEVER
    since: float = field(default_factory=time.time)
    last_seen: float = 0.0
    answered: float = 0.0
    call: Call | None = None
    seen: str = ""  # the address from which the agent connected
    boot: str = ""
    old_boots: deque[str] = field(default_factory=lambda: deque(maxlen=OLD_BOOTS))
    report: NodeReport | None = None
    readings: tuple[GpuReading, ...] = ()
    settings: Message = field(default_factory=dict)


class AgentTable:
    """The agents of all nodes. `changed` is called for each node whose presence or check results have changed."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        secret_of: Callable[[str], bytes | None],
        warn: Callable[[str], None] = log.warning,
        changed: Callable[[str], None] = lambda node: None,
        unauthenticated_s: float = UNAUTHENTICATED_S,
    ) -> None:
        self._refusals, self._changed = RefusalLog(warn), changed
        self._liveness, self._known = Liveness(NODE_LIMITS), dict[str, _Known]()
        self._probes = Probes(selector, self._probed)
        self._server = NodeAgentServer(selector, secret_of, self, self._refusals, unauthenticated_s)
        self._orders = Orders(time.time_ns() // 1000)
        self._liveness_at = 0.0

    def open(self, host: str, port: int) -> int:
        """Listen for agents and return the port."""
        return self._server.open(host, port)

    def close(self) -> None:
        self._probes.cancel()
        for known in self._known.values():
            if known.call:
                self._server.drop(known.call)
        self._server.close()

    def expect(self, places: Mapping[str, NodeAddress], settings: Mapping[str, Message] | None = None) -> None:
        """Set the nodes of the cluster and the settings of their checks. Agents of other nodes are refused."""
        for node in [node for node in self._known if node not in places]:
            self._forget(node)
        for node, place in places.items():
            known = self._known.setdefault(node, _Known(place))
            known.place = place
            self._liveness.expect(node, time.monotonic())
            if settings is not None and settings.get(node, {}) != known.settings:
                known.settings = settings.get(node, {})
                self._send_settings(known)

    def view(self, node: str) -> AgentView:
        known, sign = self._known[node], self._liveness.signs[node]
        quiet_s = max(time.time() - known.last_seen, 0.0) if known.last_seen else 0.0
        return AgentView(
            node,
            known.presence,
            known.since,
            known.last_seen,
            known.report,
            known.boot,
            sign.host,
            sign.service,
            known.answered,
            known.readings,
            quiet_s,
        )

    def views(self) -> dict[str, AgentView]:
        return {node: self.view(node) for node in self._known}

    def address(self, node: str) -> str:
        """Return the address from which the node's agent connected."""
        return self._known[node].seen

    def remember(self, nodes: Iterable[str]) -> None:
        """Record the nodes that were in service under the last controller. Their loss is then detected sooner."""
        self._liveness.remember(nodes, time.monotonic())

    def ask_slurmd(self, node: str) -> None:
        """Probe the node's slurmd. The node's view shows the answer within half a second."""
        self._liveness.ask(node, time.monotonic())

    def order(
        self,
        node: str,
        do: str,
        done: Callable[[OrderAnswer], None],
        *,
        timeout_s: float,
        listens: Callable[[int], None] = lambda port: None,
        listens_s: float | None = None,
        arguments: Mapping[str, str] | None = None,
    ) -> None:
        """Send an order to an agent. `done` is called with the outcome, at once if the order cannot be sent.

        If the order makes the agent open a port, `listens` is called with the port. The agent must open it within
        `listens_s`.
        """
        known = self._known.get(node)
        if known is None or known.call is None:
            done(OrderAnswer(node, OrderEnd.NOT_CONNECTED))
        elif self._orders.under_way(node) >= MAX_ORDERS:
            done(OrderAnswer(node, OrderEnd.OVERLOADED))
        else:
            now = time.monotonic()
            port_until = None if listens_s is None else now + listens_s
            number = self._orders.add(PendingOrder(node, now + timeout_s, done, listens, port_until))
            self._server.send(known.call, order_message(Order(number, do, arguments or {})))

    def wake(self) -> float | None:
        """Handle expired deadlines and return when to call this again (monotonic)."""
        now = time.monotonic()
        times = [self._server.wake(now), self._orders.wake(now), self._check_liveness(now), self._probes.wake(now)]
        return min((at for at in times if at is not None), default=None)

    def _check_liveness(self, now: float) -> float | None:
        if now >= self._liveness_at:
            self._liveness_at = now + NODE_LIMITS.look_s
            look = self._liveness.look(now)
            if look.late:
                self._probes.cancel()
            for node in look.probe:
                self._probe(node, now)
        return self._liveness_at if self._known else None

    def _probe(self, node: str, now: float) -> None:
        self._publish(node)
        known = self._known[node]
        named = family_of(known.place.address) is None
        place = replace(known.place, address=known.seen) if named else known.place
        self._probes.start(node, place, now, slurmd=self._liveness.signs[node].service is None)

    def _probed(self, node: str, host: bool | None, slurmd: bool | None) -> None:
        now = time.monotonic()
        sign = self._liveness.signs.get(node)
        if sign and (host or slurmd):
            self._known[node].answered = time.time()
        if sign and self._known[node].place.shared and not host and now - sign.last_seen < RESTART_S:
            # unknown: at a shared address, only the agent and slurmd can answer, and both may be restarting
            host = slurmd = None
        self._liveness.probe_ended(node, now, host=host, service=slurmd)
        self._publish(node)

    def _publish(self, node: str) -> None:
        """If the presence of a node's agent has changed, record and report that.

        If the node is lost, disconnect its agent. The agent must reconnect if it is alive.
        """
        known, sign = self._known.get(node), self._liveness.signs.get(node)
        if known is None or sign is None or known.presence is sign.presence:
            return
        known.presence, known.since = sign.presence, time.time()
        if sign.presence is Presence.GONE and known.call:
            self._disconnect(node, known, OrderEnd.NODE_GONE)
        self._changed(node)

    def _disconnect(self, node: str, known: _Known, why: OrderEnd) -> None:
        if known.call:
            self._server.drop(known.call)
            known.call = None
        self._orders.fail_all(node, why)

    def _forget(self, node: str) -> None:
        self._liveness.forget(node)
        self._disconnect(node, self._known.pop(node), OrderEnd.NODE_REMOVED)

    def admit(self, call: Call, hello: NodeHello) -> str:
        known = self._known.get(hello.node)
        if known is None:
            return "unknown node"
        if hello.boot in known.old_boots:
            return "its host was replaced by another"
        here = known.call.who if known.call and known.presence is Presence.CONNECTED else None
        if here and here.boot == hello.boot and hello.started < here.started:
            return "a newer agent of the same boot is connected"
        return ""

    def on_connect(self, call: Call) -> None:
        hello = call.who
        assert hello is not None
        known = self._known[hello.node]
        self._disconnect(hello.node, known, OrderEnd.AGENT_RESTARTED)
        if known.boot not in ("", hello.boot):
            known.old_boots.append(known.boot)
        if known.boot != hello.boot:
            known.report, known.readings = None, ()
        known.call, known.boot, known.seen = call, hello.boot, call.address
        self._send_settings(known)
        self._beat(hello.node, known)

    def on_message(self, call: Call, message: Message) -> None:
        assert call.who is not None
        node = call.who.node
        known, word = self._known[node], parse_agent_message(message)
        self._beat(node, known)
        if isinstance(word, NewFindings):
            self._take_report(node, known, word)
        elif isinstance(word, GpuReadings):
            known.readings = word.gpus
        elif isinstance(word, Reply) and not self._orders.take(node, word):
            self._refusals.log(f"unexpected answer of {node}")

    def on_disconnect(self, call: Call) -> None:
        assert call.who is not None
        node = call.who.node
        known = self._known.get(node)
        if known is None or known.call is not call:
            return
        known.call = None
        self._liveness.disconnected(node, time.monotonic())
        self._publish(node)
        self._orders.fail_all(node, OrderEnd.DISCONNECTED)

    def _beat(self, node: str, known: _Known) -> None:
        known.last_seen = time.time()
        self._liveness.beat(node, time.monotonic())
        self._publish(node)

    def _take_report(self, node: str, known: _Known, news: NewFindings) -> None:
        if (news.report.node, news.report.boot) != (node, known.boot):
            raise BadReport(f"report of another node or boot: {news.report.node}, {news.report.boot}")
        before, known.report = known.report, merge(known.report, news)
        if before is None or relevant(known.report) != relevant(before):
            self._changed(node)

    def _send_settings(self, known: _Known) -> None:
        if known.call:
            self._server.send(known.call, {"settings": known.settings})


def relevant(report: NodeReport) -> object:
    """Return the part of a report that can lead to an action, without the text and time of passed checks.

    Text and time change all the time. If each change started a round, thousands of nodes would keep the controller
    busy.
    """
    results = {each.check: each.result for each in report.findings}
    return report.gpus, {
        check: result if result.verdict is not Verdict.PASSED else Verdict.PASSED for check, result in results.items()
    }


def merge(before: NodeReport | None, news: NewFindings) -> NodeReport:
    """Return the last report of a node, updated with new findings."""
    if before is None:
        before = NodeReport(news.report.node, news.report.boot)
    findings = {finding.check: finding for finding in (*before.findings, *news.report.findings)}
    if news.all is not None:
        findings = {check: finding for check, finding in findings.items() if check in news.all}
    if len(findings) > MAX_FINDINGS:
        raise BadReport(f"more than {MAX_FINDINGS} checks")
    gpus = news.report.gpus if news.report.gpus or news.all is not None else before.gpus
    return replace(before, findings=tuple(findings.values()), gpus=gpus)
