"""The pair test: two nodes exchange data with a secret for this once. The controller arranges it and hears both."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass

from dalsegno.health.result import Result, Verdict, unknown
from dalsegno.recovery.agent_orders import Answer
from dalsegno.recovery.agents import Agents

TIMEOUT_S = 40.0


@dataclass(frozen=True)
class Outcome:
    """What the two nodes found; each tells its own side."""

    node: Result
    partner: Result

    @property
    def passed(self) -> bool:
        return self.node.verdict is self.partner.verdict is Verdict.PASSED

    @property
    def text(self) -> str:
        worst = self.node if self.node.verdict is not Verdict.PASSED else self.partner
        return worst.text


def pair_test(
    agents: Agents,
    node: str,
    partner: str,
    done: Callable[[Outcome], None],
    *,
    address: str,
    least_mbytes_per_s: float = 0.0,
) -> None:
    """`node` listens at its `address`, the known good `partner` dials; `done` hears once, however it ends."""
    secret, least = secrets.token_hex(16), str(least_mbytes_per_s)
    found: dict[str, Result] = {}

    def hear(answer: Answer) -> None:
        found.setdefault(answer.node, _result(answer))
        if answer.error and answer.node == node:
            found.setdefault(partner, unknown("the other node was never there"))
        if len(found) == 2 and not told:
            told.append(True)
            done(Outcome(found[node], found[partner]))

    def dial(port: int) -> None:
        said = {"address": address, "port": str(port), "secret": secret, "least_mbytes_per_s": least}
        agents.order(partner, "pair-dial", hear, timeout_s=TIMEOUT_S, arguments=said)

    told: list[bool] = []
    said = {"secret": secret, "least_mbytes_per_s": least}
    agents.order(node, "pair-listen", hear, timeout_s=TIMEOUT_S, listens=dial, arguments=said)


def _result(answer: Answer) -> Result:
    findings = answer.report.findings if answer.report else ()
    return findings[0].result if findings and not answer.error else unknown(answer.error or "it found nothing")
