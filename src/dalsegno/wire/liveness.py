"""The liveness detector. It probes a silent peer, then decides whether the peer is gone. It does no I/O.

The watcher sends the probes and reports their results. The controller watches the node agents; a coordinator watches
the agents of its run. A peer is one host and its agent. The peer is probed when the agent is silent or when the watcher
reports a broken connection. Only the controller reports broken connections: a coordinator declares an agent lost as
soon as its connection breaks, because the workers end with their agent. A peer is gone only if neither the agent nor
the host nor a service on it answers during a whole probe. Any answer shows that the host is alive, even if the agent is
not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum

LATE_S = 0.3  # if `look` is called this much later than planned, the watcher itself was blocked


class Presence(Enum):
    """Whether a peer is reachable. GONE describes the host; the other values describe the agent."""

    NEVER = "never seen"  # no message from the agent since this watcher started, and the peer is not GONE
    CONNECTED = "connected"
    SILENT = "silent"  # the agent has been silent for too long, or its connection broke; the host is being probed
    AGENT_DEAD = "agent dead"  # the host or a service on it answers, but the agent does not
    GONE = "gone"  # neither the agent nor the host nor a service on it answers


_SETTLED = (Presence.AGENT_DEAD, Presence.GONE)


@dataclass(frozen=True)
class LivenessLimits:
    """The time limits of a watcher. A lost host is detected about `silent_s + probe_s` after its last sign of life."""

    look_s: float  # interval between calls of `look`
    silent_s: float  # silence after which a peer is probed
    probe_s: float  # how long a probe waits for answers
    again_s: float  # interval between the starts of two probes of a silent peer
    stuck_s: float  # an agent that is silent for this long while its host answers is declared dead
    rest_s: float = 0.0  # minimum time between an answer and the next probe
    # Interval between probes of a peer that is NEVER or GONE. At first, a known peer is probed every `again_s`.
    settled_s: float = 0.0
    new_s: float = 0.0  # time limit for the first message from a new peer
    # Time limit for the first message from a peer known to the previous watcher, if other peers are connected.
    known_s: float = 0.0


@dataclass
class PeerSign:
    """The signs of life of one peer. Heartbeats change it in place, because a watcher gets thousands per second."""

    presence: Presence
    since: float  # when `presence` last changed
    last_seen: float  # when the agent last sent a message, or when its silence began to count
    alive: float  # when the agent or the host last answered, or when their silence began to count
    probe: float  # when the next probe is due
    probing: bool = False
    known: bool = False  # whether the previous watcher had this peer in service
    broken: bool = False  # whether the connection broke, so that no more messages can arrive on it
    host: bool | None = None  # whether the host answered the last probe; None if there was none
    # Whether a service on the host, such as slurmd, answered the last probe; None if there was none
    service: bool | None = None


@dataclass(frozen=True)
class LivenessLook:
    """The peers to probe now. If `late`, discard the probes in progress, because the watcher was blocked."""

    probe: tuple[str, ...] = ()
    late: bool = False


class Liveness:
    """The signs of life of all peers."""

    def __init__(self, limits: LivenessLimits) -> None:
        self.limits = limits
        self.signs: dict[str, PeerSign] = {}
        self._looked: float | None = None

    def expect(self, peer: str, now: float) -> None:
        """Add a peer, unless it is already watched."""
        if peer not in self.signs:
            self.signs[peer] = PeerSign(Presence.NEVER, now, now, now, now + self.limits.new_s)

    def remember(self, peers: Iterable[str], now: float) -> None:
        """Mark peers that the previous watcher had in service, so that their loss is detected sooner."""
        for peer in peers:
            sign = self.signs.get(peer)
            if sign and sign.presence is Presence.NEVER and not sign.known:
                self.signs[peer] = replace(sign, known=True, last_seen=now, probe=now + self.limits.silent_s)

    def forget(self, peer: str) -> None:
        self.signs.pop(peer, None)

    def beat(self, peer: str, now: float) -> None:
        """Record a message from the peer's agent."""
        if sign := self.signs.get(peer):
            if sign.presence is not Presence.CONNECTED:
                sign.presence, sign.since, sign.known, sign.broken = Presence.CONNECTED, now, False, False
            sign.last_seen = sign.alive = now
            sign.probe, sign.host = now + self.limits.silent_s, True

    def disconnected(self, peer: str, now: float) -> None:
        """Record that the peer's connection broke."""
        sign = self.signs.get(peer)
        if sign and sign.presence in (Presence.CONNECTED, Presence.SILENT):
            self.signs[peer] = replace(_with_presence(sign, Presence.SILENT, now), broken=True, probe=now, service=None)

    def ask(self, peer: str, now: float) -> None:
        """Make a probe of the peer and its service due now."""
        if sign := self.signs.get(peer):
            self.signs[peer] = replace(sign, probe=now, service=None)

    def look(self, now: float) -> LivenessLook:
        """Return the peers to probe. Call this every `look_s`; a late call restarts all timers."""
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
        """Record whether the host and the service answered their probes.

        None means that the probe of the host or of the service was not sent.
        """
        sign = self.signs.get(peer)
        if sign is None or not sign.probing:
            return
        sign = replace(sign, probing=False, service=sign.service if service is None else service)
        # Ignore the result if the agent has reconnected. If the probe could not be sent, there is no result.
        if sign.presence is not Presence.CONNECTED and (host is not None or service):
            sign = self._judge(replace(sign, host=host), bool(host or service), now)
        self.signs[peer] = sign

    def _judge(self, sign: PeerSign, alive: bool, now: float) -> PeerSign:
        sign = _with_presence(sign, self._verdict(sign, alive, now), now)
        if not alive:
            return sign
        due = max(sign.probe, now + self.limits.rest_s)
        if sign.presence is Presence.SILENT:
            # Probe again at `stuck_s` at the latest, to declare an agent dead whose host still answers.
            due = min(due, sign.last_seen + self.limits.stuck_s)
        return replace(sign, alive=now, probe=due, last_seen=now if sign.presence is Presence.NEVER else sign.last_seen)

    def _verdict(self, sign: PeerSign, alive: bool, now: float) -> Presence:
        """Return the presence of a peer after a probe. `alive` says whether its host or service has answered."""
        if sign.presence is Presence.NEVER:
            waits = now < (sign.last_seen if sign.known else sign.since) + self._grace_s(sign)
            return Presence.NEVER if alive or waits else Presence.GONE
        if not alive:
            return Presence.GONE
        stuck = sign.broken or now >= sign.last_seen + self.limits.stuck_s or sign.presence is not Presence.SILENT
        return Presence.AGENT_DEAD if stuck else Presence.SILENT

    def _grace_s(self, sign: PeerSign) -> float:
        """Return how many seconds a new peer may stay silent.

        The shorter limit `known_s` applies to a known peer, but only while another peer is connected. If no peer is
        connected, the watcher itself may be cut off.
        """
        others_connected = sign.known and any(each.presence is Presence.CONNECTED for each in self.signs.values())
        return self.limits.known_s if others_connected else self.limits.new_s


def _with_presence(sign: PeerSign, presence: Presence, now: float) -> PeerSign:
    return sign if sign.presence is presence else replace(sign, presence=presence, since=now)
