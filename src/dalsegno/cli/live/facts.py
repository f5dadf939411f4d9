"""The facts that the view shows: the last known state of the cluster, and how long each source has been silent."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum

from dalsegno.overview.facts import Overview, RecoveryView
from dalsegno.overview.verdict import ClusterVerdict, assess
from dalsegno.targets.base import ClusterStatus


class LiveSource(Enum):
    """A source of facts."""

    SLURM = "slurm"
    CONTROLLER = "controller"
    RUNS = "runs"


@dataclass(frozen=True)
class SourceHealth:
    """The times of a source's last answer and of the start of its silence, in Unix time.

    `answered_at` is None before the first answer, and `silent_since` is None while the source answers.
    """

    answered_at: float | None = None
    silent_since: float | None = None
    error: str = ""

    def answered(self, now: float) -> SourceHealth:
        return SourceHealth(answered_at=now)

    def failed(self, now: float, error: str) -> SourceHealth:
        return replace(self, silent_since=self.silent_since or now, error=error)


@dataclass(frozen=True)
class LiveFacts:
    """The last known state of the cluster. `verdict` describes the present, and names sources that do not answer."""

    overview: Overview
    verdict: ClusterVerdict
    slurm: SourceHealth = field(default_factory=SourceHealth)
    controller: SourceHealth = field(default_factory=SourceHealth)


def live_facts(
    present: Overview, known: ClusterStatus, view: RecoveryView | None, slurm: SourceHealth, controller: SourceHealth
) -> LiveFacts:
    """Return the facts to show. `known` is the last status with Slurm's answer, `view` the controller's last answer."""
    shown = replace(present, status=keep_known(known, present.status), controller=present.controller or view)
    return LiveFacts(shown, assess(present), slurm, controller)


def keep_known(known: ClusterStatus, present: ClusterStatus) -> ClusterStatus:
    """Return the present status. If Slurm does not answer now, fill in the last known nodes and jobs.

    A node whose host is off now is always shown as off, because the target knows this without Slurm.
    """
    if present.jobs is not None or known.jobs is None:
        return present
    now = {node.name: node for node in present.nodes}
    nodes = [now[node.name] if node.name in now and now[node.name].off else node for node in known.nodes]
    return replace(present, nodes=tuple(nodes) or present.nodes, jobs=known.jobs)
