"""A coordinator's view of the agents of its run: their connections, liveness and loss."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from dalsegno.runs.agent.link import AGENT, COORDINATOR, beat_key
from dalsegno.runs.coordinator.agents.liveness import AgentLiveness, Timing, beat_interval_s, report_interval_s
from dalsegno.runs.coordinator.agents.messages import (
    UNREADABLE,
    AgentHello,
    AgentMessage,
    LogPiece,
    read_hello,
    read_message,
)
from dalsegno.runs.coordinator.generations.events import Event, SaveGeneration, SaveOverdue, Start
from dalsegno.runs.coordinator.generations.generations import GenerationPhase, Run
from dalsegno.runs.coordinator.generations.group import Members
from dalsegno.runs.coordinator.generations.standbys import StandbyPlan
from dalsegno.runs.coordinator.site import GenerationLayout, NodeEnv, RunTerms
from dalsegno.train.contract import GENERATION, RUN, WANTED_NODES
from dalsegno.wire.frames import BadFrame, EncodedMessage, Message, to_json
from dalsegno.wire.handshake import ServerHandshake
from dalsegno.wire.server import BoundedServer, Connection, LoopWatcher, Proved, ServerLimits

# Connections of the agents


LIMITS = ServerLimits(unauthenticated_s=5.0, read_bytes=256 << 10)


@dataclass(eq=False)
class Peer:
    """The connection to one agent."""

    name: str
    hello: AgentHello
    address: str
    beat_key: bytes  # authenticates the agent's heartbeats during this connection
    send: Callable[[Message | EncodedMessage], None]
    close: Callable[[], None]  # closes the connection at once; `disconnected` is not called

    @property
    def host(self) -> str:
        """The address at which other nodes reach the agent: the one in its hello, otherwise that of its connection."""
        return self.hello.address or self.address

    @property
    def probe(self) -> tuple[str, int]:
        """The address to probe to find out whether the agent's host is alive."""
        return self.address, self.hello.probe


class AgentServer:
    """Listens for agents, and reports connections and messages through four callbacks."""

    def __init__(
        self,
        run: str,
        secret: bytes,
        connected: Callable[[Peer], None],
        received: Callable[[Peer, Message], None],
        disconnected: Callable[[Peer], None],
        too_long: Callable[[str, str], None],
        limits: ServerLimits = LIMITS,
    ) -> None:
        self.run, self.secret = run, secret
        self._connected, self._received, self._disconnected, self._too_long = (
            connected,
            received,
            disconnected,
            too_long,
        )
        self._limits = limits
        self._greeting: Callable[[], Message] = dict
        self._peers: dict[Connection[str], Peer] = {}
        self._server: BoundedServer[str]

    async def open(self, port: int, greeting: Callable[[], Message] | None = None, host: str = "0.0.0.0") -> int:
        """Listen and return the port. Port 0 selects a free port. Peers first receive the greeting."""
        self._greeting = greeting or dict
        watcher = LoopWatcher(asyncio.get_running_loop())
        self._server = BoundedServer(watcher, self, AGENT, COORDINATOR, self._limits)
        return self._server.listen(host, port)

    def close(self) -> None:
        """Stop listening."""
        self._server.close()

    # Callbacks from the server

    def greeting(self) -> Message:
        return self._greeting()

    def identify(self, hello: Message, handshake: ServerHandshake) -> Proved[str]:
        name = str(hello.get("agent"))
        if hello.get("run") != self.run:
            raise BadFrame("an agent of another run")
        return Proved(name, handshake.check(hello, self.secret, self.run, name))

    def admit(self, connection: Connection[str], name: str) -> str:
        return ""

    def on_connect(self, connection: Connection[str]) -> None:
        """Do nothing: the first message after the handshake contains the agent's details."""

    def on_message(self, connection: Connection[str], message: Message) -> None:
        peer = self._peers.get(connection)
        if peer is not None:
            self._received(peer, message)
            return
        assert connection.who is not None and connection.session is not None
        try:
            hello = read_hello({**message, "agent": connection.who})
        except UNREADABLE as error:
            raise BadFrame(f"not the hello of an agent: {error!r}") from error
        peer = self._peers[connection] = Peer(
            connection.who,
            hello,
            connection.address,
            beat_key(connection.session),
            lambda message: self._send(connection, message),
            lambda: self._drop(connection),
        )
        self._connected(peer)

    def on_disconnect(self, connection: Connection[str]) -> None:
        peer = self._peers.pop(connection, None)
        if peer is not None:
            self._disconnected(peer)

    def on_refused(self, cause: str, detail: str) -> None:
        """Do nothing, so that refused peers do not fill the run's log."""

    def _send(self, connection: Connection[str], message: Message | EncodedMessage) -> None:
        try:
            self._server.send(connection, message)
        except BadFrame as error:
            assert connection.who is not None
            key = message.first_key if isinstance(message, EncodedMessage) else next(iter(message))
            self._too_long(connection.who, f"`{key}`: {error}")

    def _drop(self, connection: Connection[str]) -> None:
        self._peers.pop(connection, None)
        self._server.drop(connection)


TRIES = 20


class AgentListener(Protocol):
    """The receiver of events from agents."""

    def agent_connected(self, peer: Peer) -> None: ...

    def agent_message(self, peer: Peer, message: AgentMessage) -> None: ...

    def agent_lost(self, agent: str, why: str, silent: bool) -> None:
        """Handle the loss of an agent.

        `silent` says whether the agent was lost because it or its host stopped answering, not because its connection
        ended.
        """
        ...

    def message_too_long(self, agent: str, detail: str) -> None:
        """Handle a message to this agent that exceeded the size limit and was not sent."""
        ...


class RunAgents:
    """The agents of a run by node name. Each node has one agent; a new agent of the same node replaces the old one."""

    def __init__(self, run: str, secret: bytes, timing: Timing, listener: AgentListener) -> None:
        self.peers: dict[str, Peer] = {}
        self._listener = listener
        self._liveness = AgentLiveness(timing, self._probe_address)
        self._server = AgentServer(
            run, secret, self._connected, self._received, self._disconnected, listener.message_too_long
        )

    async def open(self, port: int, greeting: Callable[[], Message] | None = None, host: str = "0.0.0.0") -> int:
        """Listen for connections and heartbeats on the same port and return it. Raise OSError if it is in use."""
        for attempt in range(TRIES if port == 0 else 1):
            found = await self._server.open(port, greeting, host)
            try:
                self._liveness.open(found, host)
                return found
            except OSError:  # the TCP port is free, but the UDP port with the same number is in use
                self._server.close()
                if port or attempt == TRIES - 1:
                    raise
        raise AssertionError("unreachable")

    def close(self) -> None:
        """Stop listening. Connections stay open until the agents close them."""
        self._server.close()
        self._liveness.close()

    async def watch(self) -> None:
        await self._liveness.watch(lambda agent, why: self.lose(agent, why, silent=True))

    def send(self, agent: str, message: Message | EncodedMessage) -> None:
        if agent in self.peers:
            self.peers[agent].send(message)

    def send_all(self, message: Message) -> None:
        for peer in self.peers.values():
            peer.send(message)

    def lose(self, agent: str, why: str, silent: bool) -> None:
        peer = self.peers.pop(agent, None)
        self._liveness.forget(agent)
        self._listener.agent_lost(agent, why, silent)
        if peer is not None:
            peer.close()

    def _connected(self, peer: Peer) -> None:
        before = self.peers.get(peer.name)
        if before is not None:
            if before.hello.pid != peer.hello.pid:
                # Without this message the old agent would reconnect, and the two agents would replace each other
                # endlessly.
                before.send({"replaced": True, "finish": 0})
            self.lose(peer.name, "another agent replaced it", silent=False)
        self.peers[peer.name] = peer
        self._liveness.expect(peer.name, peer.beat_key)
        self._listener.agent_connected(peer)

    def _received(self, peer: Peer, message: Message) -> None:
        if self.peers.get(peer.name) is not peer:
            return
        self._liveness.record_message(peer.name)
        try:
            parsed = read_message(message)
        except UNREADABLE as error:  # the agent may have another version
            raise BadFrame(f"unreadable message: {error!r}") from error
        if parsed is not None:
            self._listener.agent_message(peer, parsed)
        if isinstance(parsed, LogPiece):
            peer.send({"logged": [parsed.name, parsed.at + len(parsed.data)]})

    def _disconnected(self, peer: Peer) -> None:
        if self.peers.get(peer.name) is peer:
            self.lose(peer.name, "its agent is gone", silent=False)

    def _probe_address(self, agent: str) -> tuple[str, int] | None:
        return self.peers[agent].probe if agent in self.peers else None


# The order that starts a node's workers


MAX_PROBED = 32  # maximum number of other hosts that an agent probes to find out whether it is isolated


def setup_message(site: RunTerms) -> Message:
    """Return the first message to an agent. In large runs, it makes agents send fewer heartbeats and step reports."""
    nodes = site.shape.max_nodes
    pace = {"beat_s": beat_interval_s(nodes, site.timing), "report_s": report_interval_s(nodes)}
    return {"setup": {**site.setup(), **pace}}


class StartMessages:
    """Creates the start messages of a run. Values that nodes of a generation share are computed and encoded once."""

    def __init__(self, site: RunTerms) -> None:
        self._site = site
        self._group: Members | None = None
        self._peers: Mapping[str, Peer] = {}
        self._layout: GenerationLayout
        self._sample: PeerSample

    def message(
        self,
        order: Start,
        peers: Mapping[str, Peer],
        in_memory: Message | None = None,
        env: Mapping[str, str] = MappingProxyType({}),
    ) -> EncodedMessage | None:
        """Return a node's start message; None if a member was just lost, because the generation then stops.

        `env` contains variables for all workers.
        """
        if self._group is not order.group:
            if any(agent not in peers for agent in order.group.agents):
                return None
            self._group, self._layout = order.group, _layout(order, peers)
            self._peers = dict(peers)  # a copy, because a spare may leave while the messages are sent
            probes = {name: to_json(peer.probe) for name, peer in peers.items()}
            self._sample = PeerSample(probes, order.group.generation)
        return self._message(order.group, order.agent, in_memory, env)

    def _message(
        self, group: Members, agent: str, in_memory: Message | None, more: Mapping[str, str]
    ) -> EncodedMessage:
        place = group.place_of(agent)
        env = _node_env(self._site, self._layout, self._peers[agent], place.group_rank).with_common(more)
        workers = [{"rank": rank, "env": own} for rank, own in enumerate(env.own, start=place.first_rank)]
        own = to_json({"generation": group.generation, "env": env.common, "workers": workers, **(in_memory or {})})
        text = f'{{"start":{{"peers":[{",".join(self._sample.others(agent))}],{own[1:]}}}'
        return EncodedMessage("start", text.encode())


class PeerSample:
    """The addresses, as JSON, that each agent of a generation can probe: those of all others, or of a random sample.

    The sample limits the size of a message. The agents form a ring in random order, once per generation, and each gets
    the addresses that follow its own. A regular sample, such as every second agent, could contain only nodes on the
    agent's own switch. The agent would then not notice that it is cut off from the other switches.
    """

    def __init__(self, addresses: Mapping[str, str], generation: int) -> None:
        ring = list(addresses.items())
        if len(ring) - 1 > MAX_PROBED:
            random.Random(generation).shuffle(ring)
        self._places = {name: at for at, (name, _) in enumerate(ring)}
        self._ring = [address for _, address in ring]

    def others(self, agent: str) -> list[str]:
        at = self._places[agent]
        if len(self._ring) - 1 <= MAX_PROBED:
            return self._ring[:at] + self._ring[at + 1 :]
        following = self._ring[at + 1 : at + 1 + MAX_PROBED]
        return following + self._ring[: MAX_PROBED - len(following)]


def order_standbys(site: RunTerms, plan: StandbyPlan, run: Run, age_s: float, agents: RunAgents) -> None:
    """Send the order to prepare standby workers to all agents for which it is due.

    A standby gets its rank only when it replaces a worker.
    """
    for agent in plan.due(run, age_s):
        if run.group is not None and {agent, *run.group.agents} <= agents.peers.keys():
            layout = _layout(Start(agent, run.group, 0, 0), agents.peers)
            agents.send(agent, plan.message(_node_env(site, layout, agents.peers[agent], 0).whole()))


def current_order(run: Run, group: Members, agent: str) -> Message | None:
    """Return the order that an agent must carry out now, in case the agent missed it; None if there is none."""
    if run.phase is GenerationPhase.OPENING and group.store_agent == agent:
        return {"open_store": run.generation}
    if run.phase is GenerationPhase.STOPPING and agent in run.waiting_for:
        return {"stop": run.generation}
    return {"save": run.generation} if run.phase is GenerationPhase.RUNNING and run.taken else None


def order_save(order: SaveGeneration, agents: RunAgents, apply: Callable[[Event], None]) -> None:
    """Tell all workers of a generation to save and exit, and set a time limit."""
    for agent in order.agents:
        agents.send(agent, {"save": order.generation})
    asyncio.get_running_loop().call_later(order.within_s, apply, SaveOverdue(order.generation))


def _layout(order: Start, peers: Mapping[str, Peer]) -> GenerationLayout:
    group = order.group
    hosts = tuple(peers[each].host for each in group.agents)
    return GenerationLayout(group.generation, hosts, group.nproc_per_node, order.store_port, order.restarts)


def _node_env(site: RunTerms, layout: GenerationLayout, peer: Peer, group_rank: int) -> NodeEnv:
    run = {RUN: site.folder.run, GENERATION: str(layout.generation), WANTED_NODES: str(site.shape.max_nodes)}
    return site.node_env(layout, group_rank, peer.hello.found).with_common(run)
