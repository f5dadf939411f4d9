"""What of the checks' findings is written down: that one fails, warns, or passes again. Not that it still does."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from dalsegno.health import Finding, Verdict

MOST, CALM_S = 4, 120.0  # words about a check in so long: some cannot make up their mind
_TOLD = (Verdict.PASSED, Verdict.WARNED, Verdict.FAILED)  # unknown is neither, and no news

State = tuple[Verdict, "str | None"]  # and the code of what failed; None: nobody remembers it


@dataclass(frozen=True)
class News:
    node: str
    check: str
    verdict: Verdict
    text: str


@dataclass
class CheckNews:
    """Remembers what was told last of each check of each node, and when."""

    _told: dict[tuple[str, str], tuple[State, tuple[float, ...]]] = field(default_factory=dict)

    @classmethod
    def after(cls, told: Iterable[tuple[str, str, Verdict]]) -> CheckNews:
        """Node, check and verdict, as they were last written down by the controller before this one."""
        return cls({(node, check): ((verdict, None), ()) for node, check, verdict in told})

    def hear(self, node: str, findings: Iterable[Finding], now: float) -> list[News]:
        return [news for each in findings if (news := self._one(node, each, now))]

    def _one(self, node: str, finding: Finding, now: float) -> News | None:
        result, key = finding.result, (node, finding.check)
        if result.verdict not in _TOLD:
            return None
        before, times = self._told.get(key, ((Verdict.PASSED, ""), ()))
        state = (result.verdict, result.code if result.verdict is Verdict.FAILED else "")
        lately = tuple(at for at in times if now - at < CALM_S)
        if before[1] is None and before[0] is state[0]:
            before = state  # as the controller before this one knew it, so far as it is remembered
            self._told[key] = (state, times)
        if state == before or len(lately) >= MOST:
            return None
        self._told[key] = (state, (*lately, now))
        return News(node, finding.check, result.verdict, result.text)
