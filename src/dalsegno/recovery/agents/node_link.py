"""The link from the recovery code to the node agents. It returns the agents' state and sends orders to them.

The connections belong to the controller's event loop. Calls from other threads are passed to the loop.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from dalsegno.errors import DalsegnoError
from dalsegno.health.checks.late import SLOW
from dalsegno.health.messages import Finding
from dalsegno.health.result import Result, Verdict, unknown
from dalsegno.health.settings import ANSWER_S, PARTNER_S, PORT_S
from dalsegno.node_agent.collective import DIED
from dalsegno.recovery.agents.server import KnownNodes
from dalsegno.recovery.agents.table import AgentTable, OrderAnswer, OrderEnd
from dalsegno.recovery.agents.view import AgentView
from dalsegno.recovery.decisions.facts import Validation
from dalsegno.recovery.journal.evidence import INCOMPLETE
from dalsegno.slurm.facts import NodeInfo

log = logging.getLogger("controller.agents")

# Validation of a node, alone and then with a healthy partner. Each validation has a new secret, so that no program
# other than the two agents can take part in the pair test.


PAIR = ("pair", "pair-collective")

Done = Callable[[OrderAnswer, tuple[Finding, ...]], None]  # called with the outcome of the order and the findings


def validate_node(agents: AgentTable, node: str, partner: str, done: Done, port_s: float = PORT_S) -> None:
    """Validate a node and call `done` once with its findings.

    Without a partner, or if the partner has opened no port within `port_s` seconds, the node is only tested alone.
    """
    _NodeValidation(agents, node, partner, done).begin(port_s)


class _NodeValidation:
    """One validation. The partner is ordered to listen first, so that it gets ready while the node is tested alone."""

    def __init__(self, agents: AgentTable, node: str, partner: str, done: Done) -> None:
        self._agents, self._node, self._partner, self._done = agents, node, partner, done
        self._secret, self._ordered = secrets.token_hex(16), False
        self._answer: OrderAnswer | None = None
        self._partners: OrderAnswer | None = None

    def begin(self, port_s: float) -> None:
        if not self._partner:
            self._validate({})
            return
        self._agents.order(
            self._partner, "pair-listen", self._partner_ended,
            timeout_s=PARTNER_S, listens=self._partner_listens, listens_s=port_s, arguments={"secret": self._secret},
        )  # fmt: skip

    def _partner_listens(self, port: int) -> None:
        self._validate({"address": self._agents.address(self._partner), "port": str(port), "secret": self._secret})

    def _validate(self, arguments: dict[str, str]) -> None:
        if not self._ordered:
            self._ordered = True
            self._agents.order(self._node, "validate", self._ended, timeout_s=ANSWER_S, arguments=arguments)

    def _partner_ended(self, answer: OrderAnswer) -> None:
        self._partners = answer
        self._validate({})  # tests the node alone if the partner never listened
        self._settle()

    def _ended(self, answer: OrderAnswer) -> None:
        self._answer = answer
        self._settle()

    def _settle(self) -> None:
        """Finish when the node has answered. After a failed pair test, first wait until the partner's order ends too:
        if the partner is at fault, the node has not failed."""
        if self._answer is None or (self._partners is None and _failed_together(_findings(self._answer))):
            return
        answer, self._answer = self._answer, None
        self._done(answer, excuse_partner(_findings(answer), self._partner, self._partners))


def excuse_partner(findings: tuple[Finding, ...], partner: str, partners: OrderAnswer | None) -> tuple[Finding, ...]:
    """Return the findings without blame for the node if the partner was lost, could not start, or is slow.

    Failed pair tests then count as unknown. If no pair test ran, an unknown result is added.
    """
    if partners is None or not (why := _partner_failure(partners)):
        return findings
    of_partner = unknown(f"the partner {partner} failed: {why}")
    if not any(each.check in PAIR for each in findings):
        return (*findings, Finding("pair", of_partner, time.time()))
    return tuple(replace(each, result=of_partner) if each in _failed_together(findings) else each for each in findings)


def _partner_failure(partners: OrderAnswer) -> str:
    died = [each.result.text for each in _findings(partners) if each.result.code in (DIED, SLOW)]
    return partners.error or "".join(died[:1])


def _failed_together(findings: tuple[Finding, ...]) -> list[Finding]:
    return [each for each in findings if each.check in PAIR and each.result.verdict is Verdict.FAILED]


def _findings(answer: OrderAnswer) -> tuple[Finding, ...]:
    return answer.report.findings if answer.report else ()


ROSTER_S = 2.0  # interval between two reads of the list of nodes
EVIDENCE_S, REST_S = 30.0, 5.0

_T = TypeVar("_T")


class NodeLink:
    """The link to all agents. `secrets` is the folder with a secret for each node."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        secrets: Path,
        slurm_conf: Path,
        warn: Callable[[str], None] = log.warning,
        changed: Callable[[str], None] = lambda node: None,
        roster_s: float = ROSTER_S,
    ) -> None:
        self._roster_s = roster_s
        self._roster = KnownNodes(secrets, slurm_conf)
        self._agents = AgentTable(selector, self._roster.secret_of, warn, changed)
        self._to_open: tuple[str, int] | None = None
        self._validations: dict[str, Validation] = {}
        self._validating: dict[str, str] = {}
        self._loop, self._roster_at = threading.get_ident(), 0.0
        self._selector = selector
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        selector.register(self._woken, selectors.EVENT_READ, lambda events: self._run_calls())

    # Methods that only the thread of the controller's event loop calls

    def open(self, host: str, port: int) -> int:
        """Listen for agents and return the port. Raises DalsegnoError."""
        self._expect()
        return self._agents.open(host, port)

    def open_when_possible(self, host: str, port: int) -> None:
        """Listen now, or retry later: if the port is in use, the controller must still do its other work."""
        try:
            self.open(host, port)
            self._to_open = None
        except DalsegnoError as error:
            if self._to_open is None:
                log.error("%s; retrying every %g s. %s", error.what, self._roster_s, error.hint)
            self._to_open = (host, port)

    def close(self) -> None:
        self._agents.close()
        self._selector.unregister(self._woken)
        self._woken.close()
        self._waker.close()

    def wake(self) -> float | None:
        """Handle expired deadlines and return when to call this again (monotonic)."""
        now = time.monotonic()
        if now >= self._roster_at:
            self._roster_at = now + self._roster_s
            self._expect()
            if self._to_open is not None:
                self.open_when_possible(*self._to_open)
        due = self._agents.wake()
        return self._roster_at if due is None else min(due, self._roster_at)

    def _expect(self) -> None:
        places = self._roster.places()
        settings = self._roster.settings()
        self._agents.expect(places, {node: settings for node in places})

    # Methods that any thread may call

    def views(self) -> Mapping[str, AgentView]:
        return self._in_loop(self._agents.views)

    def validations(self) -> Mapping[str, Validation]:
        return self._in_loop(lambda: dict(self._validations))

    def validating(self) -> Mapping[str, str]:
        return self._in_loop(lambda: dict(self._validating))

    def remember(self, nodes: Iterable[str]) -> None:
        self._in_loop(lambda: self._agents.remember(nodes))

    def see(self, nodes: Iterable[NodeInfo]) -> None:
        """Do nothing: the agents themselves report."""

    def ask_slurmd(self, node: str) -> None:
        self._in_loop(lambda: self._agents.ask_slurmd(node))

    def validate(self, node: str, ask: str, partner: str = "") -> None:
        """Order a node to validate itself, alone and with a partner.

        `ask` is the id of the validation; sending the same id again does not restart it.
        """
        self._in_loop(lambda: self._validate(node, ask, partner))

    def rest(self, node: str, seconds: float) -> None:
        """Make a node's agent release its GPUs so that they can be reset. Block until the agent answers."""
        self._ask(node, "rest", REST_S, seconds=str(seconds))

    def evidence(self, node: str) -> Mapping[str, str]:
        """Return the evidence that a node's agent sends, as files by name. If some is missing, one file says why.

        Blocks, so the thread of the event loop must not call it.
        """
        answer = self._ask(node, "evidence", EVIDENCE_S)
        why = answer.error or ("" if answer.files else "it sent nothing")
        return {**answer.files, INCOMPLETE: f"agent: {why}"} if why else answer.files

    def _ask(self, node: str, do: str, timeout_s: float, **arguments: str) -> OrderAnswer:
        if threading.get_ident() == self._loop:
            raise RuntimeError("the loop cannot wait for an answer that it has to receive itself")
        answers: queue.SimpleQueue[OrderAnswer] = queue.SimpleQueue()
        self._in_loop(lambda: self._agents.order(node, do, answers.put, timeout_s=timeout_s, arguments=arguments))
        try:
            return answers.get(timeout=timeout_s + 5)
        except queue.Empty:
            return OrderAnswer(node, OrderEnd.CONTROLLER_BUSY)

    def _validate(self, node: str, ask: str, partner: str) -> None:
        done = self._validations.get(node)
        if self._validating.get(node) == ask or (done and done.ask == ask):
            return
        self._validating[node] = ask
        validate_node(
            self._agents, node, partner, lambda answer, findings: self._validated(node, ask, answer, findings)
        )

    def _validated(self, node: str, ask: str, answer: OrderAnswer, findings: tuple[Finding, ...]) -> None:
        if answer.end.undecided:
            self._forget(node, ask)
            return
        self._settle(node, ask, (*findings, _now("validation", unknown(answer.error))) if answer.error else findings)

    def _settle(self, node: str, ask: str, findings: tuple[Finding, ...]) -> None:
        self._forget(node, ask)
        self._validations[node] = Validation(ask, findings)

    def _forget(self, node: str, ask: str) -> None:
        if self._validating.get(node) == ask:
            del self._validating[node]

    # Passing calls of other threads to the event loop

    def _in_loop(self, do: Callable[[], _T]) -> _T:
        if threading.get_ident() == self._loop:
            return do()
        done: queue.SimpleQueue[tuple[_T | None, Exception | None]] = queue.SimpleQueue()

        def call() -> None:
            try:
                done.put((do(), None))
            except Exception as error:  # the calling thread raises it again
                done.put((None, error))

        self._calls.put(call)
        with contextlib.suppress(BlockingIOError):  # the buffer is full, so the loop wakes anyway
            self._waker.send(b"!")
        value, error = done.get(timeout=60)
        if error is not None:
            raise error
        return value  # type: ignore[return-value]

    def _run_calls(self) -> None:
        self._woken.recv(4096)
        while not self._calls.empty():
            self._calls.get()()


def _now(check: str, result: Result) -> Finding:
    return Finding(check, result, time.time())
