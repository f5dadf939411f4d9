"""When to ask Slurm for a node again that it has refused. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from dalsegno.slurm.parse.messages import SlurmRefusal, parse_refusal

AGAIN_S, LONGEST_S = 5.0, 60.0
# No node there is could be given: every further question would only be one more failed job in Slurm's books.
AGAIN_IN_VAIN_S, LONGEST_IN_VAIN_S = 60.0, 900.0


@dataclass
class Refusals:
    """In a row, and of what: one that is allowed a node more than the last is another question."""

    count: int = 0
    why: str = ""  # "" while there is none
    _without: frozenset[str] = frozenset()
    _not_before: float = 0.0

    def refused(self, why: str, without: Collection[str], now: float) -> bool:
        """Whether that is news."""
        news = why != self.why
        self.count, self.why, self._without = self.count + 1, why, frozenset(without)
        in_vain = parse_refusal(why) is SlurmRefusal.NO_SUCH_NODES
        first_s, longest_s = (AGAIN_IN_VAIN_S, LONGEST_IN_VAIN_S) if in_vain else (AGAIN_S, LONGEST_S)
        self._not_before = now + min(first_s * 2 ** min(self.count - 1, 20), longest_s)
        return news

    def may_ask(self, without: Collection[str], now: float) -> bool:
        return not self.why or now >= self._not_before or not self._without <= set(without)

    def over(self) -> None:
        self.count, self.why = 0, ""
