"""Judge from CPU time, I/O and GPU use whether the ranks of a generation are at work, and describe idle ones. Pure.

A rank is at work if, since it was last seen at work,

- its GPUs have read or written their memory, or
- it has read or written more than BUSY_BYTES, and more than BUSY_BYTES_PER_S on average, or
- it has used more CPU time than threads that only wait, unless its GPUs spin.

A GPU spins if a kernel runs on it all the time without memory traffic. A collective of NCCL that waits for another rank
is such a kernel, and a thread that waits for it uses a whole core. While a GPU spins, CPU time is therefore no evidence
of work. Without GPU measurements, a rank that waits in NCCL seems busy. So do ranks that poll, as some MPI libraries
do.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from dalsegno.runs.coordinator.agents.messages import WorkerActivity

BUSY_SHARE = 0.02  # share of one core from which a rank counts as busy; threads that only wait use less
BUSY_BYTES, BUSY_BYTES_PER_S = 1 << 20, (1 << 20) / 30
SPINNING_PERCENT = 90  # utilization from which a GPU without memory traffic spins; slow launches of kernels leave gaps

ASK_S = 5.0  # minimum interval between two queries of an agent, unless the idle limit is short
ASKS_PER_S = 100  # limit on the queries of all agents, each of which costs the coordinator as much as a step report
ASKS_IN_TIME, MIN_ASKS_IN_TIME = 20, 4  # usual and minimum number of queries of an agent within the idle limit


class Activity:
    """The activity of the ranks, as reported by their nodes.

    `newest` is the last time at which any rank was at work; 0 if there was no report.
    """

    def __init__(self) -> None:
        self.newest = 0.0
        self._last: dict[int, tuple[WorkerActivity, float]] = {}  # rank -> its counters when it was last at work

    def record(self, rank: int, work: WorkerActivity, now: float) -> None:
        """Record a report. A rank counts as at work in its first report, because there is nothing to compare with."""
        before, at = self._last.get(rank, (None, now))
        if before is None or is_at_work(before, work, now - at):
            self._last[rank] = work, now
            self.newest = max(self.newest, now)
        elif spins(work):  # do not count this CPU time later, when the GPU no longer spins
            self._last[rank] = replace(before, cpu_s=work.cpu_s), at

    def idle_s(self, ranks: Collection[int], now: float) -> float:
        """Return how long all of these ranks have been idle; 0 if one of them has not been reported yet."""
        return min((now - self._last[rank][1] if rank in self._last else 0.0 for rank in ranks), default=0.0)

    def idle_ranks(self, ranks: Collection[int], since: float) -> list[int]:
        """Return, in order, the ranks that have not been at work since the time `since`."""
        return sorted(rank for rank in ranks if rank not in self._last or self._last[rank][1] < since)


def is_at_work(before: WorkerActivity, now: WorkerActivity, passed_s: float) -> bool:
    """Return whether a rank has worked between two reports."""
    if now.memory_percent:
        return True
    moved = now.moved - before.moved
    if moved > max(BUSY_BYTES, BUSY_BYTES_PER_S * passed_s):
        return True
    return not spins(now) and now.cpu_s - before.cpu_s > BUSY_SHARE * max(1.0, passed_s)


def spins(work: WorkerActivity) -> bool:
    """Return whether a kernel runs on the GPUs of a rank all the time without reading or writing their memory."""
    return work.memory_percent == 0 and work.sm_percent is not None and work.sm_percent >= SPINNING_PERCENT


# Queries


def ask_interval_s(idle_limit_s: float, agents: int) -> float:
    """Return the interval between two queries of an agent.

    The interval grows with the number of agents and the idle limit, but allows several queries within the limit.
    """
    usual_s = max(ASK_S, idle_limit_s / ASKS_IN_TIME, agents / ASKS_PER_S)
    return min(usual_s, idle_limit_s / MIN_ASKS_IN_TIME)


class AskTurns:
    """Selects the agents to query now. Queries of all agents are spread over the interval, and so are the answers."""

    def __init__(self, now: float) -> None:
        self._since, self._next = now, 0

    def due(self, agents: Sequence[str], interval_s: float, now: float) -> list[str]:
        each_s = interval_s / len(agents)
        count = min(int((now - self._since) / each_s), len(agents))
        self._since = now if count == len(agents) else self._since + count * each_s
        first, self._next = self._next, (self._next + count) % len(agents)
        return [agents[(first + index) % len(agents)] for index in range(count)]


# Reports


SILENCE, SILENCE_WITHOUT_OUTPUT = "no step and no output", "no step"  # the missing signs of progress, in reports


@dataclass(frozen=True)
class Idle:
    """The state in which all ranks that have not returned are idle."""

    generation: int
    returned: int
    ranks: Mapping[str, str]  # rank that has not returned -> its node
    idle_s: int
    stacks: str  # the file with the stacks of the first of these ranks

    def sentence(self) -> str:
        return f"{self.what()}; see {self.stacks}"

    def what(self, silence: str = SILENCE) -> str:
        """Return the sentence without the file. `silence` says which signs of progress are missing."""
        if not self.returned:
            ranks = f"all {len(self.ranks)} ranks have" if len(self.ranks) > 1 else "its rank has"
            return f"{silence}, and {ranks} been idle for {self.idle_s} s"
        names = ", ".join(f"{rank} on {node}" for rank, node in list(self.ranks.items())[:4])
        more = f" and {len(self.ranks) - 4} more" if len(self.ranks) > 4 else ""
        has, ranks = ("has", "rank") if len(self.ranks) == 1 else ("have", "ranks")
        returned = f"{self.returned} rank{'s' if self.returned > 1 else ''} {'have' if self.returned > 1 else 'has'}"
        return f"{returned} returned, but {ranks} {names}{more} {has} not, and {has} done nothing for {self.idle_s} s"


def describe_work(busy: int, idle: Mapping[int, str]) -> str:
    """Return a clause with the number of ranks at work, and the idle ranks with their nodes (`idle`)."""
    total = busy + len(idle)
    if not idle:
        return f"all {total} ranks are at work" if total > 1 else "its rank is at work"
    names = ", ".join(f"{rank} on {node}" for rank, node in list(idle.items())[:4])
    names = f"rank{'s' if len(idle) > 1 else ''} {names}"
    more = f" and {len(idle) - 4} more are" if len(idle) > 4 else " is" if len(idle) == 1 else " are"
    return f"{busy} of {total} ranks {'is' if busy == 1 else 'are'} at work; {names}{more} idle"
