"""Detect lost agents and nodes of a run with heartbeats and probes.

A host that answers a connection attempt is alive. Its agent may be silent because the agent is stopped or starved, or
because packets are lost. A host is lost only if it does not answer during the whole probe. If the host answers, its
agent is lost only after a much longer silence.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field

from dalsegno.runs.agent.link import INTERVAL_S, MAX_BEAT_BYTES, Heartbeat, is_signed, pack_beat, peek_beat
from dalsegno.runs.agent.step_reports import REPORT_EVERY_S
from dalsegno.slurm.facts import NodeInfo
from dalsegno.wire.liveness import Liveness, LivenessLimits, PeerSign, Presence

DEFAULT_GONE_S = 3.0
MIN_GONE_S, MAX_GONE_S = 0.5, 600.0
NODE_TIMEOUT = "DALSEGNO_NODE_TIMEOUT"  # environment variable for the node timeout, which the cluster sets
MIN_INTERVAL_S = 0.025  # the shortest interval between heartbeats
BEATS_IN_SILENCE = 8


def read_gone_s(environ: Mapping[str, str]) -> float:
    """Return the node timeout that the cluster sets, or the default if it is missing, invalid or out of range."""
    try:
        seconds = float(environ.get(NODE_TIMEOUT) or DEFAULT_GONE_S)
    except ValueError:
        return DEFAULT_GONE_S
    return seconds if MIN_GONE_S <= seconds <= MAX_GONE_S else DEFAULT_GONE_S


@dataclass(frozen=True)
class Timing:
    """Timeouts. `gone_s` is the maximum time until a lost host is detected."""

    gone_s: float = DEFAULT_GONE_S
    stuck_s: float = 30.0

    @property
    def look_s(self) -> float:
        """The interval between calls of `look`, and between the heartbeats of an agent in a small run.

        Eight heartbeats fit into the silence that triggers a probe, so that a network that loses a third of all packets
        rarely triggers one.
        """
        return min(max(self._half_s / BEATS_IN_SILENCE, MIN_INTERVAL_S), INTERVAL_S)

    @property
    def _half_s(self) -> float:
        return 0.8 * self.gone_s / 2

    @property
    def limits(self) -> LivenessLimits:
        """The limits of the detector.

        Silence and a probe together last slightly less than `gone_s`, because checking and reporting take time too. A
        silent agent whose host answers is not declared dead before `gone_s`.
        """
        half_s, stuck_s = self._half_s, max(self.stuck_s, self.gone_s)
        return LivenessLimits(
            look_s=self.look_s, silent_s=half_s, probe_s=half_s, again_s=half_s, stuck_s=stuck_s, rest_s=half_s
        )


# Heartbeats and probes


BEATS_PER_S = 10_000  # the rate that a coordinator can read with a quarter of a core
REPORTS_PER_S = 1_000  # limit on step reports, each of which takes as much time as four heartbeats
BEATS_AT_ONCE = 256  # heartbeats to read per call, in addition to two per agent
# Each `look` opens DIALS connections to a silent host. If more than MANY_SILENT hosts are silent, `look` opens only
# DIALS_OF_MANY to each of them, to limit the coordinator's work.
DIALS, DIALS_OF_MANY, MANY_SILENT = 3, 1, 16
_NEVER = 1 << 64  # above any sequence number, so that heartbeats from unknown agents count as old


def beat_interval_s(nodes: int, timing: Timing) -> float:
    """Return the interval of heartbeats.

    The interval is longer in large runs, but at most a third of the silence that triggers a probe.
    """
    return min(max(timing.look_s, nodes / BEATS_PER_S), max(timing.look_s, timing.limits.silent_s / 3))


def report_interval_s(nodes: int) -> float:
    """Return the minimum time between two step reports of a node. It is longer in large runs."""
    return max(REPORT_EVERY_S, nodes / REPORTS_PER_S)


@dataclass(eq=False)
class _HostProbe:
    """A series of connection attempts to one host, which is alive if it answers one of them."""

    until: float
    answered: float | None = None
    dials: set[asyncio.Task[None]] = field(default_factory=set)

    def cancel(self) -> None:
        for task in self.dials:
            task.cancel()


class AgentLiveness:
    """Watches the agents of a run. It reads heartbeats in batches, which is cheaper than a wake-up for each."""

    def __init__(
        self,
        timing: Timing,
        probes: Callable[[str], tuple[str, int] | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.timing, self._probes, self._clock = timing, probes, clock
        self._liveness = Liveness(timing.limits)
        self._keys: dict[str, bytes] = {}
        self._last: dict[str, int] = {}
        self._probing: dict[str, _HostProbe] = {}
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        self._socket.setblocking(False)

    def open(self, port: int, host: str = "0.0.0.0") -> None:
        self._socket.bind((host, port))

    def close(self) -> None:
        self._cancel_probes()
        self._socket.close()

    def expect(self, agent: str, key: bytes) -> None:
        """Watch a connected agent, whose heartbeats are signed with `key` from now on."""
        self._keys[agent], self._last[agent] = key, 0
        self._liveness.expect(agent, self._clock())
        self._liveness.beat(agent, self._clock())

    def forget(self, agent: str) -> None:
        for table in (self._keys, self._last):
            table.pop(agent, None)
        self._liveness.forget(agent)
        if probe := self._probing.pop(agent, None):
            probe.cancel()

    def record_message(self, agent: str) -> None:
        """Count a message on the agent's connection as a sign of life."""
        self._liveness.beat(agent, self._clock())

    async def watch(self, gone: Callable[[str, str], None]) -> None:
        """Call `gone` with each lost agent and the reason. This method never returns."""
        while True:
            # Read the socket several times per interval, because its buffer holds only a few hundred heartbeats.
            parts = 1 + len(self._last) // BEATS_AT_ONCE
            for _ in range(parts):
                await asyncio.sleep(self.timing.look_s / parts)
                self._take_beats()
            for agent, why in self.look():
                gone(agent, why)

    def _take_beats(self) -> None:
        """Read a limited number of datagrams, so that a flood of them cannot starve the coordinator.

        Datagrams that are not heartbeats from watched agents are dropped before the signature is computed. Heartbeats
        lost in a flood do no harm: a silent host is probed, and agents also send messages on their connections.
        """
        now = self._clock()
        with contextlib.suppress(BlockingIOError):
            for _ in range(BEATS_AT_ONCE + 2 * len(self._last)):
                data, address = self._socket.recvfrom(MAX_BEAT_BYTES + 1)
                beat = peek_beat(data)
                if beat is None or beat.number <= self._last.get(beat.sender, _NEVER):
                    continue
                if is_signed(self._keys[beat.sender], data):
                    self._last[beat.sender] = beat.number
                    self._liveness.beat(beat.sender, now)
                    self._answer(beat, address)

    def _answer(self, beat: Heartbeat, address: tuple[str, int]) -> None:
        with contextlib.suppress(OSError):  # there may be no route at the moment
            self._socket.sendto(pack_beat(self._keys[beat.sender], Heartbeat("", beat.number)), address)

    def look(self) -> list[tuple[str, str]]:
        """Start, continue and end probes; return each lost agent once, with the reason."""
        now = self._clock()
        look = self._liveness.look(now)
        if look.late:
            self._cancel_probes()
        for agent in look.probe:
            self._probing[agent] = _HostProbe(now + self._liveness.limits.probe_s)
        lost = [
            (agent, why) for agent, probe in list(self._probing.items()) if (why := self._advance(agent, probe, now))
        ]
        for agent, _ in lost:
            self._liveness.forget(agent)
        return lost

    def _advance(self, agent: str, probe: _HostProbe, now: float) -> str:
        """Connect once more, or end the probe. Return why the agent is lost; "" if it is not."""
        connected = self._liveness.signs[agent].presence is Presence.CONNECTED
        if not connected and probe.answered is None and now < probe.until:
            self._dial(agent, probe)
            return ""
        del self._probing[agent]
        probe.cancel()
        answered = probe.answered is not None
        self._liveness.probe_ended(agent, now if probe.answered is None else probe.answered, host=answered)
        return _reason_of_loss(self._liveness.signs[agent], now)

    def _cancel_probes(self) -> None:
        for probe in self._probing.values():
            probe.cancel()
        self._probing.clear()

    def _dial(self, agent: str, probe: _HostProbe) -> None:
        address = self._probes(agent)
        if address is None:
            return
        for _ in range(DIALS if len(self._probing) <= MANY_SILENT else DIALS_OF_MANY):
            task = asyncio.get_running_loop().create_task(self._connect(probe, address))
            probe.dials.add(task)
            task.add_done_callback(probe.dials.discard)

    async def _connect(self, probe: _HostProbe, address: tuple[str, int]) -> None:
        """Try to connect. Each attempt is a new connection, because TCP repeats a lost packet only after a second."""
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection(*address)
            writer.transport.abort()
            probe.answered = self._clock()


def _reason_of_loss(sign: PeerSign, now: float) -> str:
    """Return why an agent is lost; "" if it is not."""
    if sign.presence is Presence.GONE:
        return f"the host has not answered for {now - sign.alive:.1f} s"
    if sign.presence is Presence.AGENT_DEAD:
        return f"the agent has been silent for {now - sign.last_seen:.0f} s, though the host answers"
    return ""


# Reachability of nodes before srun starts agents there


QUIET_PORT = 9  # nothing listens on this port: a live kernel refuses the connection, and slurmd logs nothing
QUIET_S = 0.3
RETRANSMIT_S = 2.0  # timeout that allows for the retransmission of a lost first packet
AT_ONCE = 200  # limit on simultaneous connections
_NOT_THERE = (errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH, errno.ETIMEDOUT)


async def unreachable(nodes: Iterable[NodeInfo], slurmd_port: Callable[[], Awaitable[int]]) -> list[str]:
    """Return the nodes whose host does not answer on any port tried. Nodes without a known address are omitted.

    A firewall may drop packets to closed ports, so slurmd's port is tried too: the node's own, or else the cluster's.
    """
    suspects = await _silent([(node, QUIET_PORT) for node in nodes if node.address], QUIET_S)
    if not suspects:
        return []
    usual = await slurmd_port()
    asked = [(node, node.port or usual) for node in suspects]
    return [node.name for node in await _silent([each for each in asked if each[1]], RETRANSMIT_S)]


async def _silent(asked: list[tuple[NodeInfo, int]], within_s: float) -> list[NodeInfo]:
    turn = asyncio.Semaphore(AT_ONCE)

    async def answers(node: NodeInfo, port: int) -> bool:
        async with turn:
            return await _answers(node.address, port, within_s)

    answered = await asyncio.gather(*(answers(*each) for each in asked))
    return [node for (node, _), there in zip(asked, answered, strict=True) if not there]


async def _answers(host: str, port: int, within_s: float) -> bool:
    """Return whether the host answers. A refusal counts as an answer.

    A local error counts as an answer too, because it does not show that the host is lost.
    """
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), within_s)
    except asyncio.TimeoutError:
        return False
    except OSError as error:
        return error.errno not in _NOT_THERE
    writer.close()
    return True
