"""Who is there: silence, then a probe, then the verdict. Pure: times (monotonic) come in, verdicts go out.

A beat is due every 0.4 s. After a second of silence, or at once when a connection breaks, the node's host and
its slurmd are asked. A node is gone only when both left a whole probe without an answer; whoever answers shows that the
node lives, whatever has become of its agent.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

from dalsegno.recovery.agent_view import Presence
from dalsegno.recovery.facts import Facts
from dalsegno.targets.base import CanSeePower

LOOK_S = 0.05  # how often `look` is called
LATE_S = 0.3  # a look that comes so much too late says more about us than about them
SILENT_S = 1.0
PROBE_S = 0.35  # how long a probe waits for answers
AGAIN_S = 0.5  # from one probe of a silent node to the next
SLOWLY_S = 2.0  # the same for nodes about which all is said
STUCK_S = 10.0  # an agent that says nothing for so long, though its host answers, is as good as dead
NEW_S = 15.0  # how long a node may take to be heard of for the first time
KNOWN_S = 5.0  # the same where a former controller has heard of it, as long as we hear others: no word of any kind


@dataclass(frozen=True)
class NodeSign:
    """What is known of one node."""

    presence: Presence
    since: float
    heard: float  # its agent's last word, or when silence began to count
    probe: float  # when the next one is due
    probing: bool = False
    known: bool = False  # to a controller before us
    broken: bool = False  # its connection is: it need not be waited for
    host: bool | None = None
    slurmd: bool | None = None


@dataclass(frozen=True)
class PresenceLook:
    """Nodes to probe now. Late: what was being asked before counts for nothing."""

    probe: tuple[str, ...] = ()
    late: bool = False


class Attendance:
    """The signs of life of all nodes."""

    def __init__(self) -> None:
        self.signs: dict[str, NodeSign] = {}
        self._looked: float | None = None

    def expect(self, node: str, now: float) -> None:
        """A node that ought to be there; one that is known stays as it is."""
        if node not in self.signs:
            self.signs[node] = NodeSign(Presence.NEVER, now, now, now + NEW_S)

    def remember(self, nodes: Iterable[str], now: float) -> None:
        """A former controller has had these in service: what was lost while nobody looked need not be waited for as
        long as what is new."""
        for node in nodes:
            sign = self.signs.get(node)
            if sign and sign.presence is Presence.NEVER and not sign.known:
                self.signs[node] = replace(sign, known=True, heard=now, probe=now + SILENT_S)

    def forget(self, node: str) -> None:
        self.signs.pop(node, None)

    def beat(self, node: str, now: float) -> None:
        """Its agent has said something."""
        if sign := self.signs.get(node):
            since = sign.since if sign.presence is Presence.CONNECTED else now
            self.signs[node] = NodeSign(
                Presence.CONNECTED, since, now, now + SILENT_S, sign.probing, host=True, slurmd=sign.slurmd
            )

    def broke(self, node: str, now: float) -> None:
        """Its connection has ended."""
        sign = self.signs.get(node)
        if sign and sign.presence in (Presence.CONNECTED, Presence.SILENT):
            self.signs[node] = replace(_turned(sign, Presence.SILENT, now), broken=True, probe=now, slurmd=None)

    def answered(self, node: str, now: float, *, host: bool | None, slurmd: bool | None) -> None:
        """A probe is over: who has answered it. None: it could not be asked, or needed not."""
        sign = self.signs.get(node)
        if sign is None:
            return
        sign = replace(sign, probing=False, slurmd=sign.slurmd if slurmd is None else slurmd)
        # One that was heard of meanwhile needs no witness, and a probe that we could not make is none.
        if sign.presence is not Presence.CONNECTED and (host is not None or slurmd):
            alive = bool(host or slurmd)
            turned = _turned(replace(sign, host=host), _verdict(sign, alive, now, self._grace_s(sign)), now)
            sign = replace(turned, heard=now) if alive and turned.presence is Presence.NEVER else turned
        self.signs[node] = sign

    def _grace_s(self, sign: NodeSign) -> float:
        """Whoever hears nobody may be cut off, or have booted with all the others."""
        hears = sign.known and any(each.presence is Presence.CONNECTED for each in self.signs.values())
        return KNOWN_S if hears else NEW_S

    def ask(self, node: str, now: float) -> None:
        """Have a node probed at the next look, its slurmd with it."""
        if sign := self.signs.get(node):
            self.signs[node] = replace(sign, probe=now, slurmd=None)

    def look(self, now: float) -> PresenceLook:
        """Called again and again. After a pause of our own all are forgiven one period."""
        late = self._looked is not None and now - self._looked > LOOK_S + LATE_S
        self._looked = now
        if late:
            self._forgive(now)
        due = [node for node, sign in self.signs.items() if sign.probe <= now and not sign.probing]
        for node in due:
            self.signs[node] = _probed(self.signs[node], now)
        return PresenceLook(tuple(due), late)

    def _forgive(self, now: float) -> None:
        for node, sign in self.signs.items():
            heard = sign.heard if sign.presence in (Presence.GONE, Presence.AGENT_DEAD) else now
            self.signs[node] = replace(sign, heard=heard, probe=now + SILENT_S, probing=False)


def _probed(sign: NodeSign, now: float) -> NodeSign:
    young = sign.known and sign.presence is Presence.NEVER and now - sign.since < NEW_S
    pause = SLOWLY_S if sign.presence in (Presence.NEVER, Presence.GONE) and not young else AGAIN_S
    if sign.presence is Presence.CONNECTED and now - sign.heard >= SILENT_S:
        sign = replace(_turned(sign, Presence.SILENT, now), slurmd=None)
    return replace(sign, probing=True, probe=now + pause)


def _verdict(sign: NodeSign, alive: bool, now: float, grace_s: float) -> Presence:
    if sign.presence is Presence.NEVER and (alive or now - (sign.heard if sign.known else sign.since) < grace_s):
        return Presence.NEVER
    if not alive:
        return Presence.GONE
    stuck = sign.broken or now - sign.heard >= STUCK_S or sign.presence is not Presence.SILENT
    return Presence.AGENT_DEAD if stuck else Presence.SILENT


def _turned(sign: NodeSign, presence: Presence, now: float) -> NodeSign:
    return sign if sign.presence is presence else replace(sign, presence=presence, since=now)


# ---- Which lost nodes are off for certain, by the word of whoever keeps their machines: those need not be waited
# for.


JUST_S = 10.0  # a node that was heard so lately is looked at closely: of others it does not matter any more
MOST_S = 2.0  # for all questions of one look: when a rack is lost, other nodes wait meanwhile


def look_at_power(facts: Facts, target: object) -> Facts:
    """Asked for nodes that were lost just now and are set down; where nobody knows, nothing is said."""
    nodes = facts.nodes or {}
    lost = [name for name, node in nodes.items() if node.gone and node.slurm.down and node.agent.quiet_s < JUST_S]
    if not lost or not isinstance(target, CanSeePower):
        return facts
    until = time.monotonic() + MOST_S
    off = {name: replace(nodes[name], off=True) for name in lost if time.monotonic() < until and target.is_off(name)}
    return replace(facts, nodes={**nodes, **off})
