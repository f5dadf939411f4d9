"""Who of the agents lives: silence, a probe, then the verdict. Pure: times come in, verdicts go out.

A host that answers a connect is alive, however silent its agent is (stopped, starved, its packets lost). Only a host
that answers nothing for the whole time is gone; and an agent that is silent for very long is stuck.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

LATE_S = 0.3  # a look that comes so much too late says more about us than about them
DEFAULT_GONE_S = 3.0
LEAST_GONE_S, MOST_GONE_S = 1.0, 600.0
NODE_TIMEOUT = "DALSEGNO_NODE_TIMEOUT"  # a cluster may know better


def told_gone_s(environ: Mapping[str, str]) -> float:
    """What the cluster's variable says, if it says something sensible."""
    try:
        told = float(environ.get(NODE_TIMEOUT) or DEFAULT_GONE_S)
    except ValueError:
        return DEFAULT_GONE_S
    return told if LEAST_GONE_S <= told <= MOST_GONE_S else DEFAULT_GONE_S


@dataclass(frozen=True)
class Timing:
    """`gone_s` is the one knob: the longest time until a lost host is known to be lost."""

    gone_s: float = DEFAULT_GONE_S
    stuck_s: float = 30.0
    look_s: float = 0.1  # how often `look` is called

    @property
    def suspect_s(self) -> float:
        return 0.4 * self.gone_s

    @property
    def verdict_s(self) -> float:
        """A little before: looking, and telling, take their time too."""
        return 0.8 * self.gone_s


@dataclass
class _Sign:
    beat: float  # last word of the agent's own
    life: float  # last word of it or of its host


@dataclass(frozen=True)
class Look:
    """What a look came to: hosts to probe now, and agents that are gone, each with why."""

    probe: tuple[str, ...] = ()
    gone: tuple[tuple[str, str], ...] = ()


class Liveness:
    """Signs of life, by agent."""

    def __init__(self, timing: Timing) -> None:
        self.timing = timing
        self._signs: dict[str, _Sign] = {}
        self._looked: float | None = None

    def watch(self, agent: str, now: float) -> None:
        self._signs[agent] = _Sign(now, now)

    def watches(self, agent: str) -> bool:
        return agent in self._signs

    def forget(self, agent: str) -> None:
        self._signs.pop(agent, None)

    def beat(self, agent: str, now: float) -> None:
        """The agent itself has said something."""
        if agent in self._signs:
            self._signs[agent] = _Sign(now, now)

    def answered(self, agent: str, now: float) -> None:
        """Its host has answered a probe."""
        if agent in self._signs:
            self._signs[agent].life = now

    def look(self, now: float) -> Look:
        """Called again and again. After a pause of our own everyone is forgiven one period."""
        late = self._looked is not None and now - self._looked > self.timing.look_s + LATE_S
        self._looked = now
        if late:
            for agent in self._signs:
                self.watch(agent, now)
        gone = tuple((agent, why) for agent, sign in self._signs.items() if (why := self._verdict(sign, now)))
        for agent, _ in gone:
            self.forget(agent)
        silent = (agent for agent, sign in self._signs.items() if now - sign.life >= self.timing.suspect_s)
        return Look(tuple(silent), gone)

    def _verdict(self, sign: _Sign, now: float) -> str:
        if now - sign.life >= self.timing.verdict_s:
            return f"its host has not answered for {now - sign.life:.1f} s"
        if now - sign.beat >= self.timing.stuck_s:
            return f"its agent has said nothing for {now - sign.beat:.0f} s, though its host answers"
        return ""
