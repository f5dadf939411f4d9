"""Nodes of a run without processes: slots, copies and messages as values, with the real decisions about them.

The coordinator's table, the rule for slots and the keepers' plan are the real code. Only their execution is simulated:
a snapshot is a record, a message is a value in a queue, and a lost node is removed.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

from dalsegno.runs.coordinator.generations.group import Members, Shape, form_group
from dalsegno.runs.coordinator.generations.memory import MemoryTable
from dalsegno.runs.coordinator.generations.snapshots import HeldSnapshot
from dalsegno.train.keeper.holdings import StoredSnapshot as OnNode
from dalsegno.train.keeper.plan import (
    COPIES,
    OWN,
    SHARED,
    KeeperAddress,
    KeepOrder,
    choose_slot,
    choose_to_send,
    find_unneeded,
    key_of,
)
from dalsegno.train.memory.files import SlotName
from dalsegno.train.memory.record import ABSENT, Extent, SnapshotRecord, free_slots
from dalsegno.train.memory.safe_steps import NOWHERE, SafeSteps, parse_safe_steps
from dalsegno.wire.frames import Message

SLOTS = 3
PART = Extent(512, 64, 2, 0)
Key = tuple[int, int, bool]  # rank, slot, and whether it is a copy
_seq = itertools.count(1)
_ports = itertools.count(1)


@dataclass
class Node:
    name: str
    memory: dict[Key, SnapshotRecord] = field(default_factory=dict)
    safe: SafeSteps | None = None
    keep: KeepOrder = field(default_factory=lambda: KeepOrder("a", b"", "", 0))
    sent: dict[tuple[int, int], object] = field(default_factory=dict)
    inbox: list[Message] = field(default_factory=list)
    port: int = field(default_factory=lambda: next(_ports))

    @property
    def address(self) -> KeeperAddress:
        return KeeperAddress("10.0.0.1", self.port, self.name)

    def held(self) -> list[OnNode]:
        return [OnNode(SlotName("a", *key), record, summed=True) for key, record in sorted(self.memory.items())]

    def holdings(self) -> list[HeldSnapshot]:
        return [
            HeldSnapshot(each.rank, each.record.step, each.record.generation, each.record.world, each.own, each.shared)
            for each in self.held()
        ]

    def write(self, rank: int, step: int, world: int, resumed: int | None) -> bool:
        """Write a snapshot as a worker does."""
        slots = [self.memory.get((rank, slot, False)) for slot in range(SLOTS)]
        free = free_slots(slots, self.keep.generation, resumed, self.safe)
        if free:
            record = SnapshotRecord(next(_seq), step, self.keep.generation, rank, world, PART, PART)
            self.memory[rank, free[0], False] = record
        return bool(free)

    def has(self, record: SnapshotRecord) -> bool:
        return record in self.memory.values()

    def receive(self, one: OnNode) -> bool:
        """Receive a copy as a buddy's keeper does."""
        copy = replace(one.record, shared=ABSENT)
        copies = [self.memory.get((one.rank, slot, True)) for slot in range(COPIES)]
        if copy in copies:
            return True
        slot = choose_slot(copies, [each is not None for each in copies], self.keep, self.safe)
        if slot is not None:
            self.memory[one.rank, slot, True] = copy
        return slot is not None

    def fetch(self, own: SnapshotRecord | None, shared: SnapshotRecord | None, rank: int) -> None:
        if own is not None:
            self.memory[rank, OWN, True] = replace(own, shared=ABSENT)
        if shared is not None:
            self.memory[rank, SHARED, True] = replace(shared, own=ABSENT)

    def look(self) -> None:
        """Update the node as its keeper does after each change."""
        for one in find_unneeded(self.held(), self.safe):
            del self.memory[one.rank, one.name.slot, one.copy]


class Cluster:
    """A run on nodes that come and go, one rank on each. `resumed` has the place from which each generation resumed."""

    def __init__(self, size: int, spares: int) -> None:
        self.shape = Shape(size, size, 1)
        self.coordinator = MemoryTable()
        self.nodes: dict[str, Node] = {}
        self.ready: list[str] = []
        self.names = (f"n{number}" for number in itertools.count())
        self.group: Members | None = None
        self.steps: dict[int, int] = {}
        self.resumed: list[tuple[int, int] | None] = []
        self.safe = NOWHERE  # the last announcement of the coordinator
        self.now = 0.0
        for _ in range(size + spares):
            self.join(next(self.names))
        self.begin()

    # Life cycle

    def join(self, name: str) -> None:
        self.nodes.setdefault(name, Node(name))
        self.say_hello(self.nodes[name])
        self.ready.append(name)

    def begin(self) -> None:
        """Start the next generation if there are enough nodes."""
        before = self.group.agents if self.group else ()
        number = self.group.generation + 1 if self.group else 1
        group = form_group(number, self.shape, self.ready, before)
        if group is None:
            return
        self.group = group
        self.start(group)

    def end(self) -> None:
        """Stop all workers. Agents then process all pending messages and report the snapshots they hold."""
        for name in self.ready:
            self.hear(self.nodes[name], len(self.nodes[name].inbox))
            self.coordinator.update(name, self.nodes[name].holdings())

    def restart(self) -> None:
        self.end()
        self.begin()

    def lose(self, name: str) -> None:
        """Lose a node with its memory and all messages to it."""
        del self.nodes[name]
        self.ready.remove(name)
        self.coordinator.lost(name)
        if self.group and name in self.group.agents:
            self.restart()

    def lose_agents(self, back: list[str], late: int) -> None:
        """Lose all agents at once, but not the memory of their nodes.

        They reconnect in the order of `back`; the last `late` of them send their hello after the start.
        """
        for name, old in self.nodes.items():
            self.coordinator.lost(name)
            self.nodes[name] = Node(name, old.memory, old.safe)
        for name in back[: len(back) - late]:
            self.say_hello(self.nodes[name])
        self.ready = back[: self.shape.max_nodes]
        self.begin()
        for name in back[self.shape.max_nodes :]:
            self.join(name)

    # Single steps

    def train(self, rank: int) -> None:
        """Train one step of one rank. No rank is ahead of another by more than one."""
        if self.group is None or self.steps[rank] > min(self.steps.values()):
            return
        self.steps[rank] += 1
        node = self.nodes[self.group.agents[rank]]
        resumed = self.resumed[-1]
        node.write(rank, self.steps[rank], self.group.world_size, resumed[1] if resumed else None)

    def send(self, name: str) -> None:
        """Send one snapshot to the buddy, if there is one to send."""
        node = self.nodes[name]
        buddy = next((each for each in self.nodes.values() if each.address == node.keep.buddy), None)
        sent = {key for key, address in node.sent.items() if address == node.keep.buddy}
        one = choose_to_send(node.held(), node.keep, sent, node.safe)
        if buddy is not None and one is not None and buddy.receive(one):
            node.sent[key_of(one)] = node.keep.buddy
            buddy.look()

    def hear(self, node: Node, count: int = 1) -> None:
        for message in node.inbox[:count]:
            self.obey(node, message)
        del node.inbox[:count]

    # Messages

    def say_hello(self, node: Node) -> None:
        self.coordinator.update(node.name, node.holdings(), node.address[:2], node.safe)

    def start(self, group: Members) -> None:
        for rank, name in enumerate(group.agents):
            node, order = self.nodes[name], self.coordinator.start(group, name, self.now)
            resume = order["resume"]
            step = resume["step"] if resume else None
            node.keep = KeepOrder("a", b"", name, group.generation, KeeperAddress(*order["buddy"]), step)
            node.safe = parse_safe_steps(order["safe"])
            self.safe = node.safe.place
            self.steps[rank] = step or 0
            if resume:
                self.fetch(node, rank, resume)
        self.resumed.append((resume["generation"], resume["step"]) if resume else None)

    def fetch(self, node: Node, rank: int, order: Message) -> None:
        """Fetch the parts that the node lacks from the addresses in the order."""
        place = (order["generation"], order["step"])
        here = [each for each in node.held() if each.place == place]
        has_own = any(each.own and each.rank == rank for each in here)
        own = None if has_own else self.at(order["own"][str(rank)], place, rank)
        shared = None if any(each.shared for each in here) else self.at(order["shared"], place)
        node.fetch(own, shared, rank)

    def at(self, addresses: list[list[object]], place: tuple[int, int], rank: int | None = None) -> SnapshotRecord:
        holders = [each for each in self.nodes.values() if [*each.address] in addresses]
        found = [
            one.record
            for each in holders
            for one in each.held()
            if one.place == place and (one.shared if rank is None else one.own and one.rank == rank)
        ]
        assert found, f"{place} of rank {rank} is not at the announced address"
        return found[0]

    def tell(self, name: str) -> None:
        """Let the keeper update its node, then let the agent report the snapshots that are held."""
        node = self.nodes[name]
        node.look()
        self.coordinator.update(name, node.holdings())
        self.look()

    def look(self, seconds: float = 0.0) -> None:
        """Let the coordinator check, this many seconds later."""
        self.now += seconds
        for to, message in self.coordinator.updates(self.group, self.now) if self.group else ():
            if to in self.nodes:
                self.nodes[to].inbox.append(message)
            if "safe" in message:
                self.safe = parse_safe_steps(message["safe"]).place

    def obey(self, node: Node, message: Message) -> None:
        if "buddy" in message:
            node.keep = replace(node.keep, buddy=KeeperAddress(*message["buddy"]["address"]))
        if "safe" in message:
            node.safe = parse_safe_steps(message["safe"])

    # Ground truth

    def holders(self, place: tuple[int, int]) -> dict[int, set[str]]:
        """Return the nodes that hold each rank's own part of a step."""
        world = self.shape.max_nodes
        return {
            rank: {
                node.name
                for node in self.nodes.values()
                for one in node.held()
                if one.place == place and one.own and one.rank == rank
            }
            for rank in range(world)
        }

    def newest_safe(self) -> tuple[int, int]:
        """Return the newest place that survives the loss of any single node."""
        places = {one.place for node in self.nodes.values() for one in node.held()}
        return max((p for p in places if min(map(len, self.holders(p).values())) > 1), default=(-1, -1))
