"""Tests that a slow rank is named once it lasts, with what its node reports beside the others."""

from __future__ import annotations

from dalsegno.health.messages import GpuReading
from dalsegno.runs.slow_ranks import LASTING_S, NodeReading, SlowWatch, describe_slow_rank, find_slow_rank
from dalsegno.runs.status import NodeRole, RunNodeStatus, RunPhase, RunStatus, SlowRank

PLACES = {0: "n1", 1: "n1", 2: "n2", 3: "n2"}


def test_slowest_rank_is_found_if_it_stands_out() -> None:
    assert find_slow_rank({"0": 0.9, "1": 1.0, "2": 1.2, "3": 1.8}, PLACES) == SlowRank(3, "n2", 1.8)
    assert find_slow_rank({"0": 0.9, "1": 1.1}, PLACES) is None
    assert find_slow_rank({"zero": 9.0, "1": float("nan")}, PLACES) is None
    assert find_slow_rank({}, PLACES) is None


def test_rank_is_reported_once_after_it_was_slow_for_some_time() -> None:
    watch, slow = SlowWatch(), SlowRank(3, "n2", 1.8)
    told = [watch.update(slow, at) for at in (0.0, LASTING_S - 1, LASTING_S, LASTING_S + 9)]
    assert told == [False, False, True, False] and watch.lasting == slow


def test_another_slow_rank_starts_over() -> None:
    watch = SlowWatch()
    watch.update(SlowRank(3, "n2", 1.8), 0.0)
    watch.update(SlowRank(0, "n1", 1.5), LASTING_S)
    assert not watch.update(SlowRank(0, "n1", 1.5), LASTING_S + 1) and watch.lasting is None
    watch.update(None, 2 * LASTING_S)
    assert watch.lasting is None


def status(slow: SlowRank | None) -> RunStatus:
    nodes = tuple(RunNodeStatus(name, NodeRole.MEMBER, index) for index, name in enumerate(("n1", "n2", "n3")))
    return RunStatus("r", "r", "ada", RunPhase.RUNNING, 0, 0, nproc_per_node=2, nodes=nodes, slow_rank=slow)


def test_evidence_compares_the_gpu_of_the_rank_with_the_median_of_other_nodes() -> None:
    fine = tuple(GpuReading(index, 50.0, None, None, 100.0, 1900.0, 16) for index in range(2))
    hot = (fine[0], GpuReading(1, 88.0, None, None, 100.0, 700.0, 8))
    warned = "network: 57 of 900 TCP segments were retransmitted within 60 s (6 %)"
    readings = {
        "n1": NodeReading(fine, ("clock: not checked",)),
        "n2": NodeReading(hot, ("clock: not checked", warned)),
        "n3": NodeReading(fine),
        "foreign": NodeReading((GpuReading(0, 20.0),)),
    }
    assert describe_slow_rank(status(SlowRank(3, "n2", 1.8)), readings) == (
        "rank 3 on n2 takes 1.8 times as long for a step as the median of all ranks, which wait for it; GPU 1:"
        " clock 700 MHz (others 1900 MHz), temperature 88 °C (others 50 °C), PCIe lanes 8 (others 16),"
        f" utilization 100 % (others 100 %); {warned}"
    )


def test_without_readings_the_rank_is_named_alone() -> None:
    assert describe_slow_rank(status(SlowRank(3, "n2", 1.8)), {}).endswith("which wait for it")
    assert describe_slow_rank(status(None), {}) == ""
