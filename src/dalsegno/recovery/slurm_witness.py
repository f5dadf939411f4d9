"""Detect lost nodes on a cluster without node agents, from Slurm's answers and probes of slurmd.

A node counts as lost if Slurm does not hear it and its slurmd does not accept a connection either. Nothing else can be
known about it: there are no health checks, and no node can be validated.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from dalsegno.errors import DalsegnoError
from dalsegno.recovery.agents.view import AgentView
from dalsegno.recovery.decisions.facts import Validation
from dalsegno.slurm.facts import NodeFlag, NodeInfo
from dalsegno.slurm.parse.messages import is_absence
from dalsegno.wire.liveness import Presence

CONFIRM_S = 5.0  # a node is lost if its slurmd has not answered for this long
PROBE_S = 1.0
MAX_PROBES = 16  # maximum number per round: if many nodes fall silent at once, the network is most likely at fault
_NOT_EXPECTED = {
    NodeFlag.POWER_DOWN,
    NodeFlag.POWERED_DOWN,
    NodeFlag.POWERING_DOWN,
    NodeFlag.POWERING_UP,
    NodeFlag.POWER_UP,
    NodeFlag.REBOOT_ISSUED,
    NodeFlag.REBOOT_REQUESTED,
}

ProbeSlurmd = Callable[[NodeInfo], bool]


def slurmd_answers(node: NodeInfo) -> bool:
    """Return whether a node's slurmd accepts a connection."""
    try:
        with socket.create_connection((node.address or node.name, node.port or 6818), PROBE_S):
            return True
    except OSError:
        return False


@dataclass
class SlurmWitness:
    """Replaces the link to the node agents. `see` takes Slurm's latest answer; `views` returns the resulting states."""

    probe: ProbeSlurmd = slurmd_answers
    clock: Callable[[], float] = time.time
    _views: dict[str, AgentView] = field(default_factory=dict)
    _missed_since: dict[str, float] = field(default_factory=dict)

    def see(self, nodes: Iterable[NodeInfo]) -> None:
        now, views, probes = self.clock(), dict[str, AgentView](), 0
        for node in nodes:
            unheard = is_unheard(node)
            probes += unheard
            views[node.name] = self._view(node, now, unheard, may_probe=probes <= MAX_PROBES)
        self._missed_since = {name: at for name, at in self._missed_since.items() if name in views}
        self._views = views

    def _view(self, node: NodeInfo, now: float, unheard: bool, *, may_probe: bool) -> AgentView:
        earlier = self._views.get(node.name, AgentView(node.name))
        if node.flags & _NOT_EXPECTED:
            self._missed_since.pop(node.name, None)
            return AgentView(node.name)
        if unheard and not may_probe:
            return earlier
        if not unheard or self.probe(node):
            self._missed_since.pop(node.name, None)
            since = earlier.since if earlier.presence is Presence.CONNECTED else now
            boot = f"slurm-{node.booted_at or 0}"
            return AgentView(node.name, Presence.CONNECTED, since, last_seen=now, boot=boot, slurmd_answers=True)
        missed = self._missed_since.setdefault(node.name, now)
        if now - missed < CONFIRM_S:
            return earlier
        since = earlier.since if earlier.presence is Presence.GONE else now
        return AgentView(node.name, Presence.GONE, since, earlier.last_seen, host_answers=False, slurmd_answers=False)

    # The other methods of the link: no agent can carry out an order.

    def remember(self, nodes: Iterable[str]) -> None:
        """Do nothing: Slurm reports every node at once."""

    def views(self) -> Mapping[str, AgentView]:
        return self._views

    def validations(self) -> Mapping[str, Validation]:
        return {}

    def validating(self) -> Mapping[str, str]:
        return {}

    def validate(self, node: str, ask: str, partner: str) -> None:
        raise DalsegnoError(f"{node} has no node agent", hint="an administrator must validate it")

    def rest(self, node: str, seconds: float) -> None:
        """Do nothing: there is no agent that uses the GPUs."""

    def evidence(self, node: str) -> Mapping[str, str]:
        return {"no-evidence": "this cluster has no node agents"}


def is_unheard(node: NodeInfo) -> bool:
    """Return whether Slurm does not hear a node, or has set it down for that reason."""
    return not node.responding or (node.down and is_absence(node.reason))
