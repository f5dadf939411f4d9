"""Liveness of agents: silence, a probe, then the verdict. Pure: times in, verdicts out.

A host that answers a connect is alive, however silent its agent is (stopped, starved, its packets lost). Only a host
that answers nothing for the whole time is lost. An agent that is silent for very long is stuck.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass

from dalsegno.runs.agent.link import MOST_BYTES, Heartbeat, is_signed, pack_beat, peek_beat
from dalsegno.slurm.facts import NodeInfo

LATE_S = 0.3  # a check that is so much too late means that the coordinator itself was stopped
DEFAULT_GONE_S = 3.0
LEAST_GONE_S, MOST_GONE_S = 1.0, 600.0
NODE_TIMEOUT = "DALSEGNO_NODE_TIMEOUT"  # set by the cluster


def read_gone_s(environ: Mapping[str, str]) -> float:
    """Return the value of the cluster's variable, or the default if it is missing or out of range."""
    try:
        seconds = float(environ.get(NODE_TIMEOUT) or DEFAULT_GONE_S)
    except ValueError:
        return DEFAULT_GONE_S
    return seconds if LEAST_GONE_S <= seconds <= MOST_GONE_S else DEFAULT_GONE_S


@dataclass(frozen=True)
class Timing:
    """Timeouts. All follow from `gone_s`: the longest time until a lost host is detected."""

    gone_s: float = DEFAULT_GONE_S
    stuck_s: float = 30.0
    look_s: float = 0.1  # interval of `look`

    @property
    def suspect_s(self) -> float:
        return 0.4 * self.gone_s

    @property
    def verdict_s(self) -> float:
        """Slightly less than `gone_s`, because checking and reporting take time too."""
        return 0.8 * self.gone_s


@dataclass
class _Sign:
    beat: float  # last message of the agent itself
    life: float  # last message of the agent or answer of its host


@dataclass(frozen=True)
class LivenessLook:
    """The result of a check: hosts to probe now, and lost agents, each with the reason."""

    probe: tuple[str, ...] = ()
    gone: tuple[tuple[str, str], ...] = ()


class Liveness:
    """The last signs of life of each agent."""

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
        """Record a message of the agent itself."""
        if agent in self._signs:
            self._signs[agent] = _Sign(now, now)

    def answered(self, agent: str, now: float) -> None:
        """Record that its host has answered a probe."""
        if agent in self._signs:
            self._signs[agent].life = now

    def look(self, now: float) -> LivenessLook:
        """Check all agents. After a pause of the coordinator itself, all timers start again."""
        late = self._looked is not None and now - self._looked > self.timing.look_s + LATE_S
        self._looked = now
        if late:
            for agent in self._signs:
                self.watch(agent, now)
        gone = tuple((agent, why) for agent, sign in self._signs.items() if (why := self._verdict(sign, now)))
        for agent, _ in gone:
            self.forget(agent)
        silent = (agent for agent, sign in self._signs.items() if now - sign.life >= self.timing.suspect_s)
        return LivenessLook(tuple(silent), gone)

    def _verdict(self, sign: _Sign, now: float) -> str:
        if now - sign.life >= self.timing.verdict_s:
            return f"the host has not answered for {now - sign.life:.1f} s"
        if now - sign.beat >= self.timing.stuck_s:
            return f"the agent has been silent for {now - sign.beat:.0f} s, though the host answers"
        return ""


# Heartbeats and probes


BEATS_AT_ONCE = 256  # in addition to two per agent
_NEVER = 1 << 64  # above any sequence number, so that beats of unknown agents count as old


class Pulse:
    """Checks ten times a second. Reading beats from the socket at each check is cheaper than waking up for each."""

    def __init__(self, timing: Timing, probes: Callable[[str], tuple[str, int] | None]) -> None:
        self.timing, self._probes = timing, probes
        self._liveness = Liveness(timing)
        self._keys: dict[str, bytes] = {}
        self._last: dict[str, int] = {}
        self._probing: set[asyncio.Task[None]] = set()
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        self._socket.setblocking(False)

    def open(self, port: int, host: str = "0.0.0.0") -> None:
        self._socket.bind((host, port))

    def close(self) -> None:
        self._socket.close()

    def expect(self, agent: str, key: bytes) -> None:
        """Watch an agent that has connected: its heartbeats are signed with this key from now on."""
        self._keys[agent], self._last[agent] = key, 0
        self._liveness.watch(agent, time.monotonic())

    def forget(self, agent: str) -> None:
        for table in (self._keys, self._last):
            table.pop(agent, None)
        self._liveness.forget(agent)

    def record_message(self, agent: str) -> None:
        """Count a message on the agent's connection as a sign of life."""
        self._liveness.beat(agent, time.monotonic())

    async def watch(self, gone: Callable[[str, str], None]) -> None:
        """Report lost agents with the reason, forever."""
        while True:
            await asyncio.sleep(self.timing.look_s)
            self._take_beats()
            look = self._liveness.look(time.monotonic())
            for agent in look.probe:
                self._probe(agent)
            for agent, why in look.gone:
                gone(agent, why)

    def _take_beats(self) -> None:
        """Read pending datagrams, within bounds: anyone may send them, and they must not starve the coordinator.

        Datagrams other than beats of watched agents are dropped before the signature is computed. Beats lost in a flood
        do no harm: a silent host is probed, and agents also send messages on their connections.
        """
        now = time.monotonic()
        with contextlib.suppress(BlockingIOError):
            for _ in range(BEATS_AT_ONCE + 2 * len(self._last)):
                data, address = self._socket.recvfrom(MOST_BYTES + 1)
                beat = peek_beat(data)
                if beat is None or beat.number <= self._last.get(beat.sender, _NEVER):
                    continue
                if is_signed(self._keys[beat.sender], data):
                    self._last[beat.sender] = beat.number
                    self._liveness.beat(beat.sender, now)
                    self._answer(beat, address)

    def _answer(self, beat: Heartbeat, address: tuple[str, int]) -> None:
        with contextlib.suppress(OSError):  # no route at the moment
            self._socket.sendto(pack_beat(self._keys[beat.sender], Heartbeat("", beat.number)), address)

    def _probe(self, agent: str) -> None:
        address = self._probes(agent)
        if address is not None:
            task = asyncio.get_running_loop().create_task(self._dial(agent, address))
            self._probing.add(task)
            task.add_done_callback(self._probing.discard)

    async def _dial(self, agent: str, address: tuple[str, int]) -> None:
        """Probe with a new connection each time: its first packet is sent at once, a retransmission later."""
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            _, writer = await asyncio.wait_for(asyncio.open_connection(*address), self.timing.gone_s)
            writer.transport.abort()
            self._liveness.answered(agent, time.monotonic())


# Reachability of nodes before srun starts agents there


QUIET_PORT = 9  # on a port where nothing listens, a live kernel refuses, and slurmd's log stays clean
QUIET_S = 0.3
PATIENT_S = 2.0  # long enough for the retransmission of a lost first packet
AT_ONCE = 200  # connections
_NOT_THERE = (errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH, errno.ETIMEDOUT)


async def unreachable(nodes: Iterable[NodeInfo], slurmd_port: Callable[[], Awaitable[int]]) -> list[str]:
    """Return the nodes whose host answers on no port. Nodes without a known address are left out.

    A firewall may drop packets to closed ports. So slurmd's port is tried too: the node's own, or the common one.
    """
    suspects = await _silent([(node, QUIET_PORT) for node in nodes if node.address], QUIET_S)
    if not suspects:
        return []
    usual = await slurmd_port()
    asked = [(node, node.port or usual) for node in suspects]
    return [node.name for node in await _silent([each for each in asked if each[1]], PATIENT_S)]


async def _silent(asked: list[tuple[NodeInfo, int]], within_s: float) -> list[NodeInfo]:
    turn = asyncio.Semaphore(AT_ONCE)

    async def answers(node: NodeInfo, port: int) -> bool:
        async with turn:
            return await _answers(node.address, port, within_s)

    answered = await asyncio.gather(*(answers(*each) for each in asked))
    return [node for (node, _), there in zip(asked, answered, strict=True) if not there]


async def _answers(host: str, port: int, within_s: float) -> bool:
    """Return whether the host answers. A refusal is an answer, and a local error tells nothing about the host."""
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), within_s)
    except asyncio.TimeoutError:
        return False
    except OSError as error:
        return error.errno not in _NOT_THERE
    writer.close()
    return True
