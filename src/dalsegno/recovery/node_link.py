"""The node agents for those who decide and act: what they say now, and what they are asked to do.

The connections belong to the controller's loop. Whoever works in a thread beside it hands over what is to be done.
"""

from __future__ import annotations

import contextlib
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
from dalsegno.recovery.agent_server import Roster
from dalsegno.recovery.agent_view import AgentView
from dalsegno.recovery.agents import AgentTable, OrderAnswer, OrderEnd, Say
from dalsegno.recovery.evidence import INCOMPLETE
from dalsegno.recovery.facts import Validation

# ---- A node proves itself, alone and then with a known good one: arranged here, with a secret for this once.


PAIR = ("pair", "pair-collective")

Done = Callable[[OrderAnswer, tuple[Finding, ...]], None]  # how the order ended; what was found


def prove(agents: AgentTable, node: str, partner: str, done: Done, port_s: float = PORT_S) -> None:
    """`done` hears once what the node found, however it ends; without a partner it is tried alone, and so it is with
    one that has not said within `port_s` where it listens."""
    _Proof(agents, node, partner, done).begin(port_s)


class _Proof:
    """The partner listens first, so that both load what they need while the node is still tried alone."""

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
        self._validate({})  # it never listened
        self._settle()

    def _ended(self, answer: OrderAnswer) -> None:
        self._answer = answer
        self._settle()

    def _settle(self) -> None:
        """A node that fails with its partner waits for the partner's word: it may be the partner that was lost."""
        if self._answer is None or (self._partners is None and _failed_together(_findings(self._answer))):
            return
        answer, self._answer = self._answer, None
        self._done(answer, fair(_findings(answer), self._partner, self._partners))


def fair(findings: tuple[Finding, ...], partner: str, partners: OrderAnswer | None) -> tuple[Finding, ...]:
    """What fails with a partner that was lost, could not even begin, or is slow, says nothing of the node."""
    if partners is None or not (why := _lost(partners)):
        return findings
    of_partner = unknown(f"{partner}, with which it was to be tried: {why}")
    if not any(each.check in PAIR for each in findings):
        return (*findings, Finding("pair", of_partner, time.time()))
    return tuple(replace(each, result=of_partner) if each in _failed_together(findings) else each for each in findings)


def _lost(partners: OrderAnswer) -> str:
    died = [each.result.text for each in _findings(partners) if each.result.code in (DIED, SLOW)]
    return partners.error or "".join(died[:1])


def _failed_together(findings: tuple[Finding, ...]) -> list[Finding]:
    return [each for each in findings if each.check in PAIR and each.result.verdict is Verdict.FAILED]


def _findings(answer: OrderAnswer) -> tuple[Finding, ...]:
    return answer.report.findings if answer.report else ()


# ---- The node agents for those who decide and act: what they say now, and what they are asked to do.


ROSTER_S = 2.0  # how often the roster is looked at
EVIDENCE_S, REST_S = 30.0, 5.0

_T = TypeVar("_T")


class NodeLink:
    """`secrets` is the folder with a secret for each node."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        secrets: Path,
        slurm_conf: Path,
        say: Say,
        changed: Callable[[str], None] = lambda node: None,
        roster_s: float = ROSTER_S,
    ) -> None:
        self._roster_s = roster_s
        self._roster = Roster(secrets, slurm_conf)
        self._agents = AgentTable(selector, self._roster.secret_of, say, changed)
        self._say = say
        self._to_open: tuple[str, int] | None = None
        self._validations: dict[str, Validation] = {}
        self._validating: dict[str, str] = {}
        self._loop, self._look_at = threading.get_ident(), 0.0
        self._selector = selector
        self._errands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        selector.register(self._woken, selectors.EVENT_READ, lambda events: self._run_errands())

    # For the loop

    def open(self, host: str, port: int) -> int:
        """Listen for agents; the port. DalsegnoError if that cannot be."""
        self._expect()
        return self._agents.open(host, port)

    def open_when_possible(self, host: str, port: int) -> None:
        """Listen now or later: whatever is in the way must not keep the controller from its other work."""
        try:
            self.open(host, port)
            self._to_open = None
        except DalsegnoError as error:
            if self._to_open is None:
                self._say(f"{error.what}; tried again every {self._roster_s:g} s. {error.hint}")
            self._to_open = (host, port)

    def close(self) -> None:
        self._agents.close()
        self._selector.unregister(self._woken)
        self._woken.close()
        self._waker.close()

    def wake(self) -> float | None:
        """See to what is due; returns when the next thing is (monotonic)."""
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + self._roster_s
            self._expect()
            if self._to_open is not None:
                self.open_when_possible(*self._to_open)
        due = self._agents.wake()
        return self._look_at if due is None else min(due, self._look_at)

    def _expect(self) -> None:
        places = self._roster.places()
        settings = self._roster.settings()
        self._agents.expect(places, {node: settings for node in places})

    # For those who decide and act, from any thread

    def views(self) -> Mapping[str, AgentView]:
        return self._in_loop(self._agents.views)

    def validations(self) -> Mapping[str, Validation]:
        return self._in_loop(lambda: dict(self._validations))

    def validating(self) -> Mapping[str, str]:
        return self._in_loop(lambda: dict(self._validating))

    def remember(self, nodes: Iterable[str]) -> None:
        self._in_loop(lambda: self._agents.remember(nodes))

    def ask_slurmd(self, node: str) -> None:
        self._in_loop(lambda: self._agents.ask_slurmd(node))

    def validate(self, node: str, ask: str, partner: str = "") -> None:
        """Tell a node to prove itself, and then together with a partner. The same order again does not start anew."""
        self._in_loop(lambda: self._validate(node, ask, partner))

    def rest(self, node: str, seconds: float) -> None:
        """Have a node's agent let go of its GPUs for a while, so that they can be reset. Waits until it has."""
        self._ask(node, "rest", REST_S, seconds=str(seconds))

    def evidence(self, node: str) -> Mapping[str, str]:
        """What a node can still tell, as files; one of them says why it is not all. Waits for it: not for the loop."""
        answer = self._ask(node, "evidence", EVIDENCE_S)
        why = answer.error or ("" if answer.files else "it told nothing")
        return {**answer.files, INCOMPLETE: f"its agent: {why}"} if why else answer.files

    def _ask(self, node: str, do: str, timeout_s: float, **arguments: str) -> OrderAnswer:
        if threading.get_ident() == self._loop:
            raise RuntimeError("the loop cannot wait for an answer that only it can hear")
        answers: queue.SimpleQueue[OrderAnswer] = queue.SimpleQueue()
        self._in_loop(lambda: self._agents.order(node, do, answers.put, timeout_s=timeout_s, arguments=arguments))
        try:
            return answers.get(timeout=timeout_s + 5)
        except queue.Empty:
            return OrderAnswer(node, OrderEnd.CONTROLLER_BUSY)

    # Validation

    def _validate(self, node: str, ask: str, partner: str) -> None:
        done = self._validations.get(node)
        if self._validating.get(node) == ask or (done and done.ask == ask):
            return
        self._validating[node] = ask
        prove(self._agents, node, partner, lambda answer, findings: self._validated(node, ask, answer, findings))

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

    # Threads

    def _in_loop(self, do: Callable[[], _T]) -> _T:
        if threading.get_ident() == self._loop:
            return do()
        done: queue.SimpleQueue[tuple[_T | None, Exception | None]] = queue.SimpleQueue()

        def errand() -> None:
            try:
                done.put((do(), None))
            except Exception as error:  # belongs to whoever asked, not to the loop
                done.put((None, error))

        self._errands.put(errand)
        with contextlib.suppress(BlockingIOError):  # it has been woken often enough
            self._waker.send(b"!")
        value, error = done.get(timeout=60)
        if error is not None:
            raise error
        return value  # type: ignore[return-value]

    def _run_errands(self) -> None:
        self._woken.recv(4096)
        while not self._errands.empty():
            self._errands.get()()


def _now(check: str, result: Result) -> Finding:
    return Finding(check, result, time.time())
