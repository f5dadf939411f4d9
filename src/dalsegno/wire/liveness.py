"""The liveness detector: silence, then a probe, then the verdict. Pure: monotonic times in, verdicts out.

The controller watches the agents of nodes with it, and a coordinator the agents of its run. A peer is probed when its
agent is silent, or when the watcher reports that its connection broke. (The controller does. A coordinator loses an
agent whose connection breaks at once: the workers of the run end with the agent.) A peer is gone only if nothing
answers during a whole probe. Any answer shows that its host is alive, whatever the state of its agent. The watcher
sends the probes and reports how they ended.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum

LATE_S = 0.3  # if `look` is later than this, the watcher itself was blocked


class Presence(Enum):
    """Whether a peer is reachable. Only GONE is a verdict on its host; the others describe its agent."""

    NEVER = "never seen"  # since this watcher started; its host answers, or was not probed yet
    CONNECTED = "connected"
    SILENT = "silent"  # for too long, or its connection broke; its host is being probed
    AGENT_DEAD = "agent dead"  # its host or a service on it answers, so the host is alive
    GONE = "gone"  # neither the agent nor the host answers


_SETTLED = (Presence.AGENT_DEAD, Presence.GONE)


@dataclass(frozen=True)
class LivenessLimits:
    """The periods of one watcher. A lost host is detected `silent_s + probe_s` after its last sign of life."""

    look_s: float  # interval of `look`
    silent_s: float  # silence until a peer is probed
    probe_s: float  # how long a probe waits for answers
    again_s: float  # from the start of one probe of a silent peer to the next
    stuck_s: float  # an agent that is silent for this long while its host answers is taken for dead
    rest_s: float = 0.0  # from an answer to the next probe, at least
    settled_s: float = 0.0  # from one probe to the next of a peer that was never heard or is gone
    new_s: float = 0.0  # how long a peer may take until it is first heard
    known_s: float = 0.0  # the same for a peer that the last watcher has heard, provided others are heard


@dataclass(frozen=True)
class PeerSign:
    """The signs of life of one peer."""

    presence: Presence
    since: float
    last_seen: float  # last message of its agent, or when silence began to count
    alive: float  # last message of its agent or answer of its host, or when silence began to count
    probe: float  # when the next one is due
    probing: bool = False
    known: bool = False  # to the last watcher
    broken: bool = False  # its connection is broken, so there is no reason to wait for it
    host: bool | None = None  # whether it answered; None: not asked
    service: bool | None = None  # the same of a service on it, such as slurmd


@dataclass(frozen=True)
class LivenessLook:
    """Peers to probe now. Late: probes in progress are void."""

    probe: tuple[str, ...] = ()
    late: bool = False


class Liveness:
    """The signs of life of all peers."""

    def __init__(self, limits: LivenessLimits) -> None:
        self.limits = limits
        self.signs: dict[str, PeerSign] = {}
        self._looked: float | None = None

    def expect(self, peer: str, now: float) -> None:
        """Add a peer; one that is known stays as it is."""
        if peer not in self.signs:
            self.signs[peer] = PeerSign(Presence.NEVER, now, now, now, now + self.limits.new_s)

    def remember(self, peers: Iterable[str], now: float) -> None:
        """Mark peers that were in service under the last watcher: a loss since then is detected sooner than for new
        peers."""
        for peer in peers:
            sign = self.signs.get(peer)
            if sign and sign.presence is Presence.NEVER and not sign.known:
                self.signs[peer] = replace(sign, known=True, last_seen=now, probe=now + self.limits.silent_s)

    def forget(self, peer: str) -> None:
        self.signs.pop(peer, None)

    def beat(self, peer: str, now: float) -> None:
        """Record a message of its agent."""
        if sign := self.signs.get(peer):
            since = sign.since if sign.presence is Presence.CONNECTED else now
            due = now + self.limits.silent_s
            self.signs[peer] = PeerSign(
                Presence.CONNECTED, since, now, now, due, sign.probing, host=True, service=sign.service
            )

    def disconnected(self, peer: str, now: float) -> None:
        """Record that its connection has ended."""
        sign = self.signs.get(peer)
        if sign and sign.presence in (Presence.CONNECTED, Presence.SILENT):
            self.signs[peer] = replace(_with_presence(sign, Presence.SILENT, now), broken=True, probe=now, service=None)

    def ask(self, peer: str, now: float) -> None:
        """Probe a peer at the next look, its service included."""
        if sign := self.signs.get(peer):
            self.signs[peer] = replace(sign, probe=now, service=None)

    def look(self, now: float) -> LivenessLook:
        """Return the peers to probe; called every `look_s`. If the watcher was blocked, all periods start again."""
        late = self._looked is not None and now - self._looked > self.limits.look_s + LATE_S
        self._looked = now
        if late:
            self._restart_periods(now)
        due = [peer for peer, sign in self.signs.items() if sign.probe <= now and not sign.probing]
        for peer in due:
            self.signs[peer] = self._start_probe(self.signs[peer], now)
        return LivenessLook(tuple(due), late)

    def _restart_periods(self, now: float) -> None:
        for peer, sign in self.signs.items():
            again = replace(sign, probe=now + self.limits.silent_s, probing=False)
            if sign.presence not in _SETTLED:
                again = replace(again, last_seen=now, alive=now)
            self.signs[peer] = replace(again, since=now) if sign.presence is Presence.NEVER else again

    def _start_probe(self, sign: PeerSign, now: float) -> PeerSign:
        young = sign.known and sign.presence is Presence.NEVER and now < sign.since + self.limits.new_s
        slowly = sign.presence in (Presence.NEVER, Presence.GONE) and not young
        if sign.presence is Presence.CONNECTED and now >= sign.last_seen + self.limits.silent_s:
            sign = replace(_with_presence(sign, Presence.SILENT, now), service=None)
        return replace(sign, probing=True, probe=now + (self.limits.settled_s if slowly else self.limits.again_s))

    def probe_ended(self, peer: str, now: float, *, host: bool | None, service: bool | None = None) -> None:
        """Record the result of a probe. None: not asked, or could not be asked."""
        sign = self.signs.get(peer)
        if sign is None or not sign.probing:
            return
        sign = replace(sign, probing=False, service=sign.service if service is None else service)
        # A peer that was heard meanwhile needs no verdict, and a probe that could not be sent proves nothing.
        if sign.presence is not Presence.CONNECTED and (host is not None or service):
            sign = self._judge(replace(sign, host=host), bool(host or service), now)
        self.signs[peer] = sign

    def _judge(self, sign: PeerSign, alive: bool, now: float) -> PeerSign:
        sign = _with_presence(sign, self._verdict(sign, alive, now), now)
        if not alive:
            return sign
        due = max(sign.probe, now + self.limits.rest_s)
        if sign.presence is Presence.SILENT:
            due = min(due, sign.last_seen + self.limits.stuck_s)  # the answer then shows that the agent is stuck
        return replace(sign, alive=now, probe=due, last_seen=now if sign.presence is Presence.NEVER else sign.last_seen)

    def _verdict(self, sign: PeerSign, alive: bool, now: float) -> Presence:
        if sign.presence is Presence.NEVER:
            waits = now < (sign.last_seen if sign.known else sign.since) + self._grace_s(sign)
            return Presence.NEVER if alive or waits else Presence.GONE
        if not alive:
            return Presence.GONE
        stuck = sign.broken or now >= sign.last_seen + self.limits.stuck_s or sign.presence is not Presence.SILENT
        return Presence.AGENT_DEAD if stuck else Presence.SILENT

    def _grace_s(self, sign: PeerSign) -> float:
        """Return how long a peer may stay silent: longer if no peer is heard, as the watcher may be cut off."""
        others_connected = sign.known and any(each.presence is Presence.CONNECTED for each in self.signs.values())
        return self.limits.known_s if others_connected else self.limits.new_s


def _with_presence(sign: PeerSign, presence: Presence, now: float) -> PeerSign:
    return sign if sign.presence is presence else replace(sign, presence=presence, since=now)
