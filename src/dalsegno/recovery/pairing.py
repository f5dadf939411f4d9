"""A node proves itself, alone and then with a known good one: arranged here, with a secret for this once."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import replace

from dalsegno.health.checks.late import SLOW
from dalsegno.health.messages import Finding
from dalsegno.health.result import Verdict, unknown
from dalsegno.health.settings import ANSWER_S, PARTNER_S, PORT_S
from dalsegno.node_agent.collective import DIED
from dalsegno.recovery.agent_orders import Answer
from dalsegno.recovery.agents import Agents

PAIR = ("pair", "pair-collective")

Done = Callable[[Answer, tuple[Finding, ...]], None]  # how the order ended; what was found


def prove(agents: Agents, node: str, partner: str, done: Done, port_s: float = PORT_S) -> None:
    """`done` hears once what the node found, however it ends; without a partner it is tried alone, and so it is with
    one that has not said within `port_s` where it listens."""
    _Proof(agents, node, partner, done).begin(port_s)


class _Proof:
    """The partner listens first, so that both load what they need while the node is still tried alone."""

    def __init__(self, agents: Agents, node: str, partner: str, done: Done) -> None:
        self._agents, self._node, self._partner, self._done = agents, node, partner, done
        self._secret, self._ordered = secrets.token_hex(16), False
        self._answer: Answer | None = None
        self._partners: Answer | None = None

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

    def _partner_ended(self, answer: Answer) -> None:
        self._partners = answer
        self._validate({})  # it never listened
        self._settle()

    def _ended(self, answer: Answer) -> None:
        self._answer = answer
        self._settle()

    def _settle(self) -> None:
        """A node that fails with its partner waits for the partner's word: it may be the partner that was lost."""
        if self._answer is None or (self._partners is None and _failed_together(_findings(self._answer))):
            return
        answer, self._answer = self._answer, None
        self._done(answer, fair(_findings(answer), self._partner, self._partners))


def fair(findings: tuple[Finding, ...], partner: str, partners: Answer | None) -> tuple[Finding, ...]:
    """What fails with a partner that was lost, could not even begin, or is slow, says nothing of the node."""
    if partners is None or not (why := _lost(partners)):
        return findings
    of_partner = unknown(f"{partner}, with which it was to be tried: {why}")
    if not any(each.check in PAIR for each in findings):
        return (*findings, Finding("pair", of_partner, time.time()))
    return tuple(replace(each, result=of_partner) if each in _failed_together(findings) else each for each in findings)


def _lost(partners: Answer) -> str:
    died = [each.result.text for each in _findings(partners) if each.result.code in (DIED, SLOW)]
    return partners.error or "".join(died[:1])


def _failed_together(findings: tuple[Finding, ...]) -> list[Finding]:
    return [each for each in findings if each.check in PAIR and each.result.verdict is Verdict.FAILED]


def _findings(answer: Answer) -> tuple[Finding, ...]:
    return answer.report.findings if answer.report else ()
