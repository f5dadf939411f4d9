"""Hearing heartbeats and probing the silent: the part of liveness that touches the network."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable

from dalsegno.launch.agent.beats import MOST_BYTES, Beat, is_signed, pack_beat, peek_beat
from dalsegno.launch.liveness import Liveness, Timing

BEATS_AT_ONCE = 256  # beside two of each agent
_NEVER = 1 << 64  # more than any number of a beat: those of agents that are not watched are old


class Pulse:
    """Looks ten times a second. Beats are taken from the socket at each look: cheaper than waking up for each."""

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

    def heard(self, agent: str) -> None:
        """Count what an agent says on its connection as a sign of life."""
        self._liveness.beat(agent, time.monotonic())

    async def watch(self, gone: Callable[[str, str], None]) -> None:
        """For ever: tell of agents that are gone, and why."""
        while True:
            await asyncio.sleep(self.timing.look_s)
            self._take_beats()
            look = self._liveness.look(time.monotonic())
            for agent in look.probe:
                self._probe(agent)
            for agent, why in look.gone:
                gone(agent, why)

    def _take_beats(self) -> None:
        """Take what has come, within bounds: anybody may send datagrams, and must not keep us from our work.

        What is no beat of a watched agent is dropped before its signature is computed. Beats that a flood drives out
        are not missed: a host that seems silent is probed, and agents speak on their connections too.
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

    def _answer(self, beat: Beat, address: tuple[str, int]) -> None:
        with contextlib.suppress(OSError):  # no way there just now
            self._socket.sendto(pack_beat(self._keys[beat.sender], Beat("", beat.number)), address)

    def _probe(self, agent: str) -> None:
        address = self._probes(agent)
        if address is not None:
            task = asyncio.get_running_loop().create_task(self._dial(agent, address))
            self._probing.add(task)
            task.add_done_callback(self._probing.discard)

    async def _dial(self, agent: str, address: tuple[str, int]) -> None:
        """A fresh connect each time: its first packet is not held back, as a lost one's second would be."""
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            _, writer = await asyncio.wait_for(asyncio.open_connection(*address), self.timing.gone_s)
            writer.transport.abort()
            self._liveness.answered(agent, time.monotonic())
