"""The agents of a run as its coordinator holds them: connected, watched, spoken to, lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from dalsegno.launch.liveness import Timing
from dalsegno.launch.peers import Door, Peer
from dalsegno.launch.pulse import Pulse
from dalsegno.launch.words import UNREADABLE, Word, read_word
from dalsegno.train.frames import BadFrame, Message

TRIES = 20


class Listener(Protocol):
    """Whom they are told of."""

    def agent_came(self, peer: Peer) -> None: ...

    def agent_said(self, peer: Peer, word: Word) -> None: ...

    def agent_lost(self, agent: str, why: str, silent: bool) -> None:
        """`silent`: its host does not answer either."""
        ...

    def message_too_long(self, agent: str, detail: str) -> None:
        """What was to be sent to this agent is longer than a message may be, and was not sent."""
        ...


class Agents:
    """By node name. One node has one agent; another one of the same name takes the place of the first."""

    def __init__(self, run: str, secret: bytes, timing: Timing, listener: Listener) -> None:
        self.peers: dict[str, Peer] = {}
        self._listener = listener
        self._pulse = Pulse(timing, self._probe_address)
        self._door = Door(run, secret, self._came, self._said, self._gone, listener.message_too_long)

    async def open(self, port: int, greeting: Callable[[], Message] | None = None, host: str = "0.0.0.0") -> int:
        """Listen for connections and for heartbeats, on the same port; returns it. OSError if it is taken."""
        for attempt in range(TRIES if port == 0 else 1):
            found = await self._door.open(port, greeting, host)
            try:
                self._pulse.open(found, host)
                return found
            except OSError:  # its twin for datagrams is taken
                self._door.close()
                if port or attempt == TRIES - 1:
                    raise
        raise AssertionError("unreachable")

    def close(self) -> None:
        """Stop listening; connections stay until the agents end them."""
        self._door.close()
        self._pulse.close()

    async def watch(self) -> None:
        await self._pulse.watch(lambda agent, why: self.lose(agent, why, silent=True))

    def send(self, agent: str, message: Message) -> None:
        if agent in self.peers:
            self.peers[agent].send(message)

    def send_all(self, message: Message) -> None:
        for peer in self.peers.values():
            peer.send(message)

    def lose(self, agent: str, why: str, silent: bool) -> None:
        peer = self.peers.pop(agent, None)
        self._pulse.forget(agent)
        self._listener.agent_lost(agent, why, silent)
        if peer is not None:
            peer.close()

    def _came(self, peer: Peer) -> None:
        before = self.peers.get(peer.name)
        if before is not None:
            if before.hello.pid != peer.hello.pid:
                # Or it would come back, and they would take the place from each other.
                before.send({"replaced": True, "finish": 0})
            self.lose(peer.name, "another agent took its place", silent=False)
        self.peers[peer.name] = peer
        self._pulse.expect(peer.name, peer.beat_key)
        self._listener.agent_came(peer)

    def _said(self, peer: Peer, message: Message) -> None:
        if self.peers.get(peer.name) is not peer:
            return
        self._pulse.heard(peer.name)
        try:
            word = read_word(message)
        except UNREADABLE as error:  # of another version perhaps
            raise BadFrame(f"a message that makes no sense: {error!r}") from error
        if word is not None:
            self._listener.agent_said(peer, word)

    def _gone(self, peer: Peer) -> None:
        if self.peers.get(peer.name) is peer:
            self.lose(peer.name, "its agent is gone", silent=False)

    def _probe_address(self, agent: str) -> tuple[str, int] | None:
        return self.peers[agent].probe if agent in self.peers else None
