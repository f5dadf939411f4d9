"""A run's life, example by example, and then in every order that hypothesis can think of."""

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule

from dalsegno.launch.events import (
    Cancelled,
    Event,
    Finish,
    GaveUpWaiting,
    Joined,
    Left,
    OpenStore,
    Order,
    Start,
    Stop,
    Stopped,
    StoreOpened,
    WorkerEnded,
)
from dalsegno.launch.generations import Phase, Run, advance
from dalsegno.launch.group import Shape, form_group

TWO = Shape(2, 2, 1)


def play(run: Run, *events: Event) -> tuple[Run, list[Order]]:
    orders: list[Order] = []
    for event in events:
        run, more = advance(run, event)
        orders += more
    return run, orders


def running(shape: Shape = TWO, *agents: str, **more: object) -> Run:
    names = agents or ("a", "b")
    run, _ = play(Run(shape, **more), *(Joined(agent) for agent in names), StoreOpened(names[0], 1, 5000))  # type: ignore[arg-type]
    assert run.phase is Phase.RUNNING
    return run


def test_a_generation_forms_when_all_are_there_and_starts_when_its_store_is_open():
    run, orders = play(Run(TWO), Joined("a"))
    assert orders == []
    run, orders = play(run, Joined("b"))
    assert orders == [OpenStore("a", 1)]
    _, orders = play(run, StoreOpened("a", 1, 4321))
    assert [(order.agent, order.store_port) for order in orders if isinstance(order, Start)] == [
        ("a", 4321),
        ("b", 4321),
    ]


def test_all_workers_done_ends_the_run_well():
    run, orders = play(
        running(), WorkerEnded("a", 1, 0, 0), WorkerEnded("b", 1, 1, 0), Stopped("a", 1), Stopped("b", 1)
    )
    assert (run.phase, orders[-1]) == (Phase.ENDED, Finish(0))


def test_a_worker_that_dies_ends_the_generation_everywhere_and_the_next_one_forms():
    run, orders = play(running(), WorkerEnded("b", 1, 1, -9))
    assert orders == [Stop("a", 1), Stop("b", 1)]
    run, orders = play(run, Stopped("a", 1))
    assert orders == []
    run, orders = play(run, Stopped("b", 1))
    assert orders == [OpenStore("a", 2)] and run.restarts == 1


def test_after_too_many_failures_the_run_ends_with_the_workers_code():
    _, orders = play(running(max_restarts=0), WorkerEnded("b", 1, 1, 3), Stopped("a", 1), Stopped("b", 1))
    assert orders[-1] == Finish(3)
    _, orders = play(running(max_restarts=0), WorkerEnded("b", 1, 1, -9), Stopped("a", 1), Stopped("b", 1))
    assert orders[-1] == Finish(137)


def test_a_lost_node_is_replaced_by_a_spare_at_its_rank_and_costs_no_restart():
    run = running(TWO, "a", "b", "spare")
    run, orders = play(run, Left("a"), Stopped("b", 1))
    assert orders == [Stop("b", 1), OpenStore("spare", 2)]
    assert run.group is not None and run.group.agents == ("spare", "b") and run.restarts == 0


def test_a_lost_node_without_a_spare_waits_for_one_that_joins():
    run, orders = play(running(), Left("b"), Stopped("a", 1))
    assert (run.phase, orders) == (Phase.GATHERING, [Stop("a", 1)])
    run, orders = play(run, Joined("c"))
    assert orders == [OpenStore("a", 2)]


def test_an_elastic_run_goes_on_smaller_and_grows_back():
    run = running(Shape(1, 2, 1))
    run, _ = play(run, Left("b"), Stopped("a", 1), StoreOpened("a", 2, 1))
    assert run.group is not None and run.group.world_size == 1
    run, orders = play(run, Joined("c"))
    assert orders == [Stop("a", 2)]
    run, _ = play(run, Stopped("a", 2), StoreOpened("a", 3, 1))
    assert run.group is not None and run.group.agents == ("a", "c")


def test_an_elastic_run_starts_small_only_when_the_waiting_is_over():
    run, orders = play(Run(Shape(1, 2, 1)), Joined("a"))
    assert orders == []
    _, orders = play(run, GaveUpWaiting())
    assert orders == [OpenStore("a", 1)]


def test_words_about_an_old_generation_are_ignored():
    run, _ = play(running(), WorkerEnded("b", 1, 1, 1), Stopped("a", 1), Stopped("b", 1), StoreOpened("a", 2, 1))
    assert play(run, WorkerEnded("a", 1, 0, 1), Stopped("a", 1), StoreOpened("a", 1, 7)) == (run, [])


def test_a_cancelled_run_stops_everything_and_ends():
    _, orders = play(running(), Cancelled(), Stopped("a", 1), Stopped("b", 1))
    assert orders == [Stop("a", 1), Stop("b", 1), Finish(143)]


def test_a_node_lost_while_the_store_opens():
    _, orders = play(Run(TWO), Joined("a"), Joined("b"), Joined("c"), Left("a"), Stopped("b", 1))
    assert orders[-1] == OpenStore("c", 2)


def test_survivors_keep_their_ranks_and_a_smaller_group_closes_up():
    group = form_group(2, Shape(1, 3, 2), ["c", "a", "x"], before=["a", "b", "c"])
    assert group is not None and [(p.agent, p.first_rank) for p in group.places] == [("a", 0), ("x", 2), ("c", 4)]
    smaller = form_group(2, Shape(1, 3, 2), ["c", "a"], before=["a", "b", "c"])
    assert smaller is not None and smaller.agents == ("a", "c") and smaller.world_size == 4


class AnyOrder(RuleBasedStateMachine):
    """Agents that obey late, die at any moment, and new ones that join; the machine must keep its promises."""

    agents = Bundle("agents")

    @initialize(least=st.integers(1, 3), more=st.integers(0, 2), nproc=st.integers(1, 2))
    def begin(self, least: int, more: int, nproc: int) -> None:
        self.run = Run(Shape(least, least + more, nproc), max_restarts=5)
        self.count = 0
        self.alive: set[str] = set()
        self.workers: dict[str, int] = {}  # agent -> generation it runs workers of
        self.inbox: list[Order] = []
        self.generations: list[int] = []

    def tell(self, event: Event) -> None:
        self.run, orders = advance(self.run, event)
        self.inbox += orders

    @rule(target=agents)
    def join(self) -> str:
        self.count += 1
        agent = f"n{self.count}"
        self.alive.add(agent)
        self.tell(Joined(agent))
        return agent

    @rule(agent=agents)
    def die(self, agent: str) -> None:
        self.alive.discard(agent)
        self.workers.pop(agent, None)
        self.tell(Left(agent))

    @rule(agent=agents)
    def join_again(self, agent: str) -> None:
        if agent in self.alive:
            self.tell(Joined(agent))

    @precondition(lambda self: bool(self.inbox))
    @rule(data=st.data())
    def obey(self, data: st.DataObject) -> None:
        """Orders to one agent come in order; between agents any order is possible."""
        order = self.inbox[data.draw(st.integers(0, len(self.inbox) - 1))]
        if isinstance(order, Finish):
            return
        first = next(one for one in self.inbox if not isinstance(one, Finish) and one.agent == order.agent)
        self.inbox.remove(first)
        if first.agent not in self.alive:
            return
        if isinstance(first, OpenStore):
            self.tell(StoreOpened(first.agent, first.generation, 1000 + first.generation))
        elif isinstance(first, Start):
            assert first.agent not in self.workers, "started before the old workers were stopped"
            self.workers[first.agent] = first.group.generation
        elif isinstance(first, Stop):
            self.workers.pop(first.agent, None)
            self.tell(Stopped(first.agent, first.generation))

    @precondition(lambda self: bool(self.workers))
    @rule(data=st.data(), code=st.sampled_from([0, 0, 0, 1, -9]))
    def worker_ends(self, data: st.DataObject, code: int) -> None:
        agent = data.draw(st.sampled_from(sorted(self.workers)))
        group = self.run.group
        if group is None or agent not in group.agents or self.workers[agent] != group.generation:
            return
        first = next(place.first_rank for place in group.places if place.agent == agent)
        local = data.draw(st.integers(0, group.nproc_per_node - 1))
        self.tell(WorkerEnded(agent, group.generation, first + local, code))

    @rule()
    def give_up_waiting(self) -> None:
        self.tell(GaveUpWaiting())

    @invariant()
    def one_generation_at_a_time(self) -> None:
        assert len(set(self.workers.values())) <= 1

    @invariant()
    def ranks_are_dense(self) -> None:
        group = getattr(self, "run", None) and self.run.group
        if group:
            assert [place.group_rank for place in group.places] == list(range(len(group.places)))
            assert len(set(group.agents)) == len(group.agents)
            shape = self.run.shape
            assert shape.min_nodes <= len(group.places) <= shape.max_nodes

    @invariant()
    def it_never_waits_with_enough_nodes(self) -> None:
        run = getattr(self, "run", None)
        if run and run.phase is Phase.GATHERING:
            assert len(run.ready) < run.shape.max_nodes

    @invariant()
    def it_never_waits_for_the_dead(self) -> None:
        run = getattr(self, "run", None)
        if run:
            assert run.waiting_for <= self.alive

    def teardown(self) -> None:
        """Once faults end and everyone obeys, the run runs or has ended, provided there are nodes enough."""
        if not hasattr(self, "run"):
            return
        while [order for order in self.inbox if not isinstance(order, Finish)]:
            order = next(one for one in self.inbox if not isinstance(one, Finish))
            self.inbox.remove(order)
            if order.agent in self.alive:
                if isinstance(order, OpenStore):
                    self.tell(StoreOpened(order.agent, order.generation, 1))
                elif isinstance(order, Stop):
                    self.tell(Stopped(order.agent, order.generation))
        if len(self.alive) >= self.run.shape.max_nodes:
            assert self.run.phase in (Phase.RUNNING, Phase.ENDED)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def test_the_machine_is_a_value():
    run = Run(TWO)
    assert replace(run) == run and advance(run, Left("nobody")) == (run, [])
