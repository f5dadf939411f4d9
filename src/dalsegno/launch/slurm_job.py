"""One Slurm job of a run as its coordinator holds it: its nodes, the steps that bring agents, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from dalsegno.launch.run_comment import JobRole
from dalsegno.slurm.facts import JobInfo, JobState
from dalsegno.system.children import Child

ARRIVAL_S = 20.0  # a node whose agent has not come so long after its srun began, or the last look, is looked at
LONGEST_S = 1800.0  # an image of many gigabytes is imported, or a prolog tries everything, before an agent starts


@dataclass(eq=False)
class Step:
    """One srun. `left` are nodes whose agent came and went: this step will not bring another."""

    child: Child
    nodes: tuple[str, ...]
    began: float
    said_from: int = 0  # where in the agents' log its own words begin
    left: set[str] = field(default_factory=set)
    looked: dict[str, float] = field(default_factory=dict)  # when a node whose agent is slow was last found well
    adopted: bool = False  # a former self began it, some time ago

    def will_bring(self, node: str, now: float) -> bool:
        return self._may_bring(node) and now - self.looked.get(node, self.began) < ARRIVAL_S

    def is_slow(self, node: str, now: float) -> bool:
        """It may still bring that agent: nothing is known against it but that it takes its time."""
        return self._may_bring(node) and not self.adopted and now - self.began < LONGEST_S

    def _may_bring(self, node: str) -> bool:
        return node in self.nodes and node not in self.left and self.child.alive()


@dataclass(eq=False)
class Job:
    """One job of the run. Without an id it still waits to be heard of."""

    role: JobRole
    number: int
    id: int | None = None
    nodes: tuple[str, ...] = ()
    asking: Child | None = None
    steps: list[Step] = field(default_factory=list)
    given_back: bool = False
    adopted: bool = False  # a former self of ours was granted it
    ends_at: int | None = None
    left: frozenset[str] = frozenset()  # of its nodes, those that Slurm was told we do not need any more


def fate(info: JobInfo) -> JobState:
    """Its state; and of one that is being ended, whether its user wants it so, which Slurm says only when it is gone.

    One that was preempted or has reached its limit still has some seconds in which to save; one that is requeued has
    no end.
    """
    if info.state is not JobState.COMPLETING or info.preempted_at or info.ends_at is None or info.started_at is None:
        return info.state
    out_of_time = info.time_limit_s is not None and info.ends_at - info.started_at >= info.time_limit_s
    return info.state if out_of_time else JobState.CANCELLED
