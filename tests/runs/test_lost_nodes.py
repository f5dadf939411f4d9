"""A safe step stays in memory after the next fault, whatever happened before."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dalsegno.train.memory.safe_steps import NOWHERE
from tests.conftest import LONG
from tests.runs.small_nodes import Cluster

SIZE, SPARES = 3, 1
ranks = st.integers(0, SIZE - 1)
members = st.integers(0, SIZE + SPARES - 1)


class Faults(RuleBasedStateMachine):
    """A run in which messages are late, and workers, agents and nodes are lost one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.cluster = Cluster(SIZE, SPARES)
        self.safe: tuple[int, int] | None = None  # the newest safe place
        self.losses = 0  # losses of nodes that held parts of the safe place, since it became safe

    def node(self, number: int) -> str:
        names = sorted(self.cluster.nodes)
        return names[number % len(names)]

    @rule(rank=ranks)
    def train(self, rank: int) -> None:
        self.cluster.train(rank)

    @rule(number=members)
    def send(self, number: int) -> None:
        self.cluster.send(self.node(number))

    @rule(number=members)
    def tell(self, number: int) -> None:
        self.cluster.tell(self.node(number))

    @rule(number=members)
    def hear(self, number: int) -> None:
        self.cluster.hear(self.cluster.nodes[self.node(number)])

    @rule()
    def all_goes_well(self) -> None:
        for rank in range(SIZE):
            self.train(rank)
        for _ in range(2):
            for number in range(len(self.cluster.nodes)):
                self.tell(number)
                self.hear(number)
                self.hear(number)
                self.send(number)
                self.tell(number)

    @rule()
    def a_worker_is_killed(self) -> None:
        there = self.least_holders() >= 1
        self.cluster.restart()
        self.went_on(there)

    @rule(number=members)
    def a_node_is_lost(self, number: int) -> None:
        name = self.node(number)
        trained, there = name in self.trainers(), self.least_holders() >= 2
        self.losses += self.holds_of_it(name)
        self.cluster.lose(name)
        if trained:
            self.went_on(there)
        self.cluster.join(next(self.cluster.names))  # a new node with empty memory

    @rule(order=st.permutations(range(SIZE + SPARES)), late=st.integers(0, 1))
    def all_agents_are_lost(self, order: list[int], late: int) -> None:
        """Lose all agents.

        They may reconnect in another order, and the last may reconnect after the others have resumed.
        """
        names = sorted(self.cluster.nodes)
        there = self.least_holders() >= 1 + late
        self.cluster.lose_agents([names[number] for number in order], late)
        self.went_on(there)

    # Invariants

    def went_on(self, there: bool) -> None:
        """Check that the run resumed from memory, at the safe step or later, if enough nodes still held it."""
        if self.safe is not None and there:
            resumed = self.cluster.resumed[-1]
            assert resumed is not None, f"{self.safe} was safe but is lost"
            assert resumed[1] >= self.safe[1], f"{self.safe} was safe but only {resumed} is left"

    @invariant()
    def what_is_safe_is_twice_there(self) -> None:
        """Check that two nodes hold the safe step, or a newer step that is not yet known to all nodes."""
        if self.cluster.safe > (self.safe or NOWHERE):
            self.safe, self.losses = self.cluster.safe, 0
        if self.safe is not None and not self.losses and self.least_holders() < 2:
            assert self.cluster.newest_safe() > self.safe, f"{self.safe} was safe: {self.cluster.holders(self.safe)}"

    def least_holders(self) -> int:
        return min(map(len, self.cluster.holders(self.safe).values())) if self.safe else 0

    def holds_of_it(self, name: str) -> bool:
        return self.safe is not None and any(one.place == self.safe for one in self.cluster.nodes[name].held())

    def trainers(self) -> tuple[str, ...]:
        return self.cluster.group.agents if self.cluster.group else ()


TestFaults = Faults.TestCase
TestFaults.settings = settings(max_examples=50 if LONG else 25, stateful_step_count=40, deadline=None)
