"""Steps that do not become safe. The ranks agree on a later step, and a crash in the meantime costs little."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from dalsegno.runs.coordinator.generations.memory import AHEAD, COPY_TIMEOUT_S, Safety
from dalsegno.runs.coordinator.generations.snapshots import HeldSnapshot
from dalsegno.train.memory.safe_steps import SafeSteps
from tests.conftest import LONG
from tests.runs.small_nodes import Cluster

STEP_S = 0.5


def rounds(cluster: Cluster, count: int, sends: bool = True, hears: int = 9) -> None:
    """Run rounds of half a second, with one step of every rank in each.

    `hears` limits the messages a node handles per round.
    """
    for _ in range(count):
        for rank in cluster.steps:
            cluster.train(rank)
        for name in [*cluster.nodes]:
            if sends:
                cluster.send(name)
            cluster.tell(name)
        cluster.look(STEP_S)
        for node in cluster.nodes.values():
            cluster.hear(node, hears)


def safe_step(cluster: Cluster) -> int:
    return cluster.newest_safe()[1]


def test_safe_step_follows_without_a_floor_when_copies_succeed() -> None:
    cluster = Cluster(2, 0)
    rounds(cluster, 40)
    assert safe_step(cluster) >= 38
    assert all(node.safe and node.safe.floor == 0 for node in cluster.nodes.values())


def test_ranks_with_different_steps_agree_again() -> None:
    cluster = Cluster(2, 0)
    rounds(cluster, 3)
    one, other = cluster.nodes.values()
    for node, rank, skips in ((one, 0, 1), (other, 1, 0)):  # each rank has skipped the step that the other has
        for step in range(cluster.steps[rank] + 1, cluster.steps[rank] + 7):
            if step % 2 == skips:
                node.write(rank, step, 2, None)
    cluster.steps = {0: 10, 1: 10}
    kept = [{record.step for record in node.memory.values()} for node in (one, other)]
    stuck = safe_step(cluster)
    assert not {step for step in kept[0] & kept[1] if step > stuck}, "no step can become safe"
    rounds(cluster, int(COPY_TIMEOUT_S / STEP_S) + 2 * AHEAD)
    assert safe_step(cluster) > 10


def test_disturbances_of_a_long_generation_do_not_add_up() -> None:
    """Each disturbance costs no more than the first one, because a generation may last for weeks."""
    safety, now, step = Safety(["a", "b"], 2, SafeSteps(1), now=0.0), 0.0, 0
    for _ in range(12):
        step += 1
        safety.update("a", [HeldSnapshot(0, step, 1, 2)])  # the other rank had no free slot and skipped this step
        safety.advance(now)
        now += COPY_TIMEOUT_S + 0.1
        floor = safety.advance(now).floor
        assert floor == step + AHEAD
        step, now = floor, now + 1.0
        for node in ("a", "b"):
            safety.update(node, [HeldSnapshot(rank, step, 1, 2) for rank in (0, 1)])
        assert safety.advance(now).place == (1, step)


def test_slow_copies_get_as_long_as_they_took() -> None:
    """With a timeout that is too short for the network, every step would be abandoned."""
    safety = Safety(["a", "b"], 2, SafeSteps(1), now=0.0)
    for step, now in ((10, 0.0), (20, 40.0), (30, 70.0)):
        both = [HeldSnapshot(rank, step, 1, 2) for rank in (0, 1)]
        safety.update("a", both)
        safety.advance(now)
        assert safety.advance(now + (4.0 if step == 10 else 15.0)).floor == 0
        safety.update("b", both)
        assert safety.advance(now + 30.0 if step == 10 else now + 20.0).place == (1, step)


def test_failing_buddy_costs_only_seconds_of_work() -> None:
    cluster = Cluster(2, 0)
    rounds(cluster, 5)
    safe = cluster.newest_safe()
    rounds(cluster, 30, sends=False)
    assert min(map(len, cluster.holders(safe).values())) == 2, "the safe step stays"
    reachable = cluster.steps[0]
    cluster.restart()
    resumed = cluster.resumed[-1]
    assert resumed is not None
    assert resumed[1] >= reachable - 4 * COPY_TIMEOUT_S / STEP_S
    rounds(cluster, 40)
    assert safe_step(cluster) > reachable, "copies continue when the buddy has recovered"


def test_slow_copy_succeeds() -> None:
    """The copy takes longer than the first timeout, which then grows."""
    cluster = Cluster(2, 0)
    for _ in range(12):
        rounds(cluster, 40, sends=False)  # twenty seconds of rounds
        rounds(cluster, 1)
    assert safe_step(cluster) > 200


@settings(max_examples=30 if LONG else 12, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.booleans()), max_size=60))
def test_ranks_agree_again_after_late_or_skipped_copies(events: list[tuple[int, int, bool]]) -> None:
    cluster = Cluster(3, 0)
    for rank, what, sends in events:
        name = sorted(cluster.nodes)[rank]
        if what == 0:
            cluster.train(rank)
        elif what == 1:
            cluster.steps = dict.fromkeys(cluster.steps, max(cluster.steps.values()))
            cluster.train(rank)  # the other ranks have skipped this step
        elif what == 2:
            cluster.tell(name)
        if sends:
            cluster.send(name)
    cluster.steps = dict.fromkeys(cluster.steps, max(cluster.steps.values()))
    reachable = cluster.steps[0]
    rounds(cluster, 150)
    assert safe_step(cluster) > reachable


def test_skipped_step_never_becomes_safe() -> None:
    """A rank that received the floor may have overwritten the step."""
    safety = Safety(["a", "b"], 2, SafeSteps(1), now=0.0)
    both = [HeldSnapshot(0, 5, 1, 2), HeldSnapshot(1, 5, 1, 2)]
    safety.update("a", both[:1])
    safety.advance(0.0)
    floor = safety.advance(COPY_TIMEOUT_S + 1).floor
    assert floor == 5 + AHEAD
    safety.update("a", both)
    safety.update("b", both)
    assert safety.advance(COPY_TIMEOUT_S + 1).place < (1, 5)
    later = [HeldSnapshot(rank, floor, 1, 2) for rank in (0, 1)]
    safety.update("a", later)
    safety.update("b", later)
    assert safety.advance(COPY_TIMEOUT_S + 1).place == (1, floor)


def test_training_without_snapshots_sets_no_floor() -> None:
    safety = Safety(["a", "b"], 2, SafeSteps(1), now=0.0)
    for node in ("a", "b"):
        safety.update(node, [HeldSnapshot(0, 5, 1, 2), HeldSnapshot(1, 5, 1, 2)])
    assert safety.advance(0.0).place == (1, 5)
    assert safety.advance(1000.0).floor == 0


def test_resumed_step_can_become_safe() -> None:
    safety = Safety(["a", "b"], 2, SafeSteps(2, resumed=(1, 7)), now=0.0)
    both = [HeldSnapshot(0, 7, 1, 2), HeldSnapshot(1, 7, 1, 2)]
    safety.update("a", both)
    assert safety.advance(0.0).place < (1, 7)
    safety.update("b", both)
    assert safety.advance(0.0).place == (1, 7)
