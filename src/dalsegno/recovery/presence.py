"""Presence of nodes: silence, then a probe, then the verdict. Pure: monotonic times in, verdicts out.

A heartbeat is due every 0.4 s. After a second of silence, or at once when a connection breaks, the node's host and its
slurmd are probed. A node is gone only if neither answers during a whole probe. Any answer shows that the node is
alive, whatever the state of its agent.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

from dalsegno.recovery.agent_view import Presence
from dalsegno.recovery.facts import Facts
from dalsegno.targets.base import CanSeePower

LOOK_S = 0.05  # how often `look` is called
LATE_S = 0.3  # if `look` is later than this, the controller itself was blocked
SILENT_S = 1.0
PROBE_S = 0.35  # how long a probe waits for answers
AGAIN_S = 0.5  # between probes of a silent node
SLOWLY_S = 2.0  # between probes of a node whose state is settled
STUCK_S = 10.0  # an agent that is silent for this long while its host answers is taken for dead
NEW_S = 15.0  # how long a node may take until it is first heard
KNOWN_S = 5.0  # the same for a node that the last controller has heard, provided others are heard


@dataclass(frozen=True)
class NodeSign:
    """The signs of life of one node."""

    presence: Presence
    since: float
    heard: float  # last message of its agent, or when silence began to count
    probe: float  # when the next one is due
    probing: bool = False
    known: bool = False  # to the last controller
    broken: bool = False  # its connection is broken, so there is no reason to wait for it
    host: bool | None = None
    slurmd: bool | None = None


@dataclass(frozen=True)
class PresenceLook:
    """Nodes to probe now. Late: probes in progress are void."""

    probe: tuple[str, ...] = ()
    late: bool = False


class Attendance:
    """The signs of life of all nodes."""

    def __init__(self) -> None:
        self.signs: dict[str, NodeSign] = {}
        self._looked: float | None = None

    def expect(self, node: str, now: float) -> None:
        """Add a node; one that is known stays as it is."""
        if node not in self.signs:
            self.signs[node] = NodeSign(Presence.NEVER, now, now, now + NEW_S)

    def remember(self, nodes: Iterable[str], now: float) -> None:
        """Mark nodes that were in service under the last controller: a loss since then is detected sooner than for new
        nodes."""
        for node in nodes:
            sign = self.signs.get(node)
            if sign and sign.presence is Presence.NEVER and not sign.known:
                self.signs[node] = replace(sign, known=True, heard=now, probe=now + SILENT_S)

    def forget(self, node: str) -> None:
        self.signs.pop(node, None)

    def beat(self, node: str, now: float) -> None:
        """Record a message of its agent."""
        if sign := self.signs.get(node):
            since = sign.since if sign.presence is Presence.CONNECTED else now
            self.signs[node] = NodeSign(
                Presence.CONNECTED, since, now, now + SILENT_S, sign.probing, host=True, slurmd=sign.slurmd
            )

    def disconnected(self, node: str, now: float) -> None:
        """Record that its connection has ended."""
        sign = self.signs.get(node)
        if sign and sign.presence in (Presence.CONNECTED, Presence.SILENT):
            self.signs[node] = replace(_with_presence(sign, Presence.SILENT, now), broken=True, probe=now, slurmd=None)

    def probe_ended(self, node: str, now: float, *, host: bool | None, slurmd: bool | None) -> None:
        """Record the result of a probe. None: not asked, or could not be asked."""
        sign = self.signs.get(node)
        if sign is None:
            return
        sign = replace(sign, probing=False, slurmd=sign.slurmd if slurmd is None else slurmd)
        # A node that was heard meanwhile needs no verdict, and a probe that could not be sent proves nothing.
        if sign.presence is not Presence.CONNECTED and (host is not None or slurmd):
            alive = bool(host or slurmd)
            judged = _with_presence(replace(sign, host=host), _verdict(sign, alive, now, self._grace_s(sign)), now)
            sign = replace(judged, heard=now) if alive and judged.presence is Presence.NEVER else judged
        self.signs[node] = sign

    def _grace_s(self, sign: NodeSign) -> float:
        """Return how long a node may stay silent: longer if no node is heard, as the controller may be cut off."""
        hears = sign.known and any(each.presence is Presence.CONNECTED for each in self.signs.values())
        return KNOWN_S if hears else NEW_S

    def ask(self, node: str, now: float) -> None:
        """Probe a node at the next look, its slurmd included."""
        if sign := self.signs.get(node):
            self.signs[node] = replace(sign, probe=now, slurmd=None)

    def look(self, now: float) -> PresenceLook:
        """Return the nodes to probe; called every `LOOK_S`. If the controller was blocked, all periods start again."""
        late = self._looked is not None and now - self._looked > LOOK_S + LATE_S
        self._looked = now
        if late:
            self._restart_periods(now)
        due = [node for node, sign in self.signs.items() if sign.probe <= now and not sign.probing]
        for node in due:
            self.signs[node] = _start_probe(self.signs[node], now)
        return PresenceLook(tuple(due), late)

    def _restart_periods(self, now: float) -> None:
        for node, sign in self.signs.items():
            heard = sign.heard if sign.presence in (Presence.GONE, Presence.AGENT_DEAD) else now
            self.signs[node] = replace(sign, heard=heard, probe=now + SILENT_S, probing=False)


def _start_probe(sign: NodeSign, now: float) -> NodeSign:
    young = sign.known and sign.presence is Presence.NEVER and now - sign.since < NEW_S
    pause = SLOWLY_S if sign.presence in (Presence.NEVER, Presence.GONE) and not young else AGAIN_S
    if sign.presence is Presence.CONNECTED and now - sign.heard >= SILENT_S:
        sign = replace(_with_presence(sign, Presence.SILENT, now), slurmd=None)
    return replace(sign, probing=True, probe=now + pause)


def _verdict(sign: NodeSign, alive: bool, now: float, grace_s: float) -> Presence:
    if sign.presence is Presence.NEVER and (alive or now - (sign.heard if sign.known else sign.since) < grace_s):
        return Presence.NEVER
    if not alive:
        return Presence.GONE
    stuck = sign.broken or now - sign.heard >= STUCK_S or sign.presence is not Presence.SILENT
    return Presence.AGENT_DEAD if stuck else Presence.SILENT


def _with_presence(sign: NodeSign, presence: Presence, now: float) -> NodeSign:
    return sign if sign.presence is presence else replace(sign, presence=presence, since=now)


# Nodes that are certainly off need no grace period


JUST_S = 10.0  # only nodes that were heard this recently are asked about
MOST_S = 2.0  # for all questions of one look: while a lost rack is asked about, other nodes wait


def look_at_power(facts: Facts, target: object) -> Facts:
    """Ask the target about nodes that were just lost and set down; nothing changes if it does not know."""
    nodes = facts.nodes or {}
    lost = [name for name, node in nodes.items() if node.gone and node.slurm.down and node.agent.quiet_s < JUST_S]
    if not lost or not isinstance(target, CanSeePower):
        return facts
    until = time.monotonic() + MOST_S
    off = {name: replace(nodes[name], off=True) for name in lost if time.monotonic() < until and target.is_off(name)}
    return replace(facts, nodes={**nodes, **off})
