"""Tests that a rank that stays slow is named, with the readings of its node and of the other nodes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dalsegno.health.messages import GpuReading
from dalsegno.health.result import Verdict
from dalsegno.runs.coordinator.agents.messages import Stepped
from dalsegno.runs.coordinator.generations.events import AgentJoined, StoreOpened
from dalsegno.runs.coordinator.generations.generations import Run, advance
from dalsegno.runs.coordinator.generations.group import Shape
from dalsegno.runs.coordinator.reports.goodput import ProgressWriter
from dalsegno.runs.slow_ranks import LASTING_S, CheckRemark, NodeReading, SlowWatch, describe_slow_rank, find_slow_rank
from dalsegno.runs.status import NodeRole, RunNodeStatus, RunPhase, RunStatus, SlowRank

PLACES = {0: "n1", 1: "n1", 2: "n2", 3: "n2"}


def test_slowest_rank_is_found_if_it_stands_out() -> None:
    assert find_slow_rank({"0": 0.9, "1": 1.0, "2": 1.2, "3": 1.8}, PLACES) == SlowRank(3, "n2", 1.8)
    assert find_slow_rank({"0": 0.9, "1": 1.1}, PLACES) is None
    assert find_slow_rank({"zero": 9.0, "1": float("nan")}, PLACES) is None
    assert find_slow_rank({}, PLACES) is None


def test_rank_is_reported_once_after_it_was_slow_for_some_time() -> None:
    watch, slow = SlowWatch(), SlowRank(3, "n2", 1.8)
    reported = [watch.update(slow, at) for at in (0.0, LASTING_S - 1, LASTING_S, LASTING_S + 9)]
    assert reported == [False, False, True, False] and watch.lasting == slow


def test_another_slow_rank_starts_over() -> None:
    watch = SlowWatch()
    watch.update(SlowRank(3, "n2", 1.8), 0.0)
    watch.update(SlowRank(0, "n1", 1.5), LASTING_S)
    assert not watch.update(SlowRank(0, "n1", 1.5), LASTING_S + 1) and watch.lasting is None
    watch.update(None, 2 * LASTING_S)
    assert watch.lasting is None


def test_lasting_slow_rank_of_a_run_is_noted_once_with_its_node(tmp_path: Path) -> None:
    run, writer, notes = running("n1", "n2", "n3"), ProgressWriter(tmp_path / "progress.json"), list[str]()
    writer.record_step(Stepped(1, 7, {"loss": 0.5}, busy_s={0: 0.1, 1: 0.25, 2: 0.1}))
    writer.write(last=True)
    for at in (0.0, LASTING_S - 1, LASTING_S, LASTING_S + 9):
        writer.watch_slow_ranks(run, notes.append, at)
    assert notes == [SlowRank(1, "n2", 2.5).sentence()] and writer.slow.lasting == SlowRank(1, "n2", 2.5)
    after = replace(run, generation=2)
    writer.changed(run, after)
    writer.watch_slow_ranks(after, notes.append, LASTING_S + 10)
    assert len(notes) == 1 and writer.slow.lasting is None, "the ranks of a new generation are measured again"


def running(*agents: str) -> Run:
    """Return a run whose first generation runs with one rank on each node."""
    run = Run(Shape(len(agents), len(agents), 1), 3)
    for agent in agents:
        run, _ = advance(run, AgentJoined(agent))
    run, _ = advance(run, StoreOpened(agents[0], run.generation, 29400))
    return run


def status(slow: SlowRank | None) -> RunStatus:
    nodes = tuple(RunNodeStatus(name, NodeRole.MEMBER, index) for index, name in enumerate(("n1", "n2", "n3")))
    return RunStatus("r", "r", "ada", RunPhase.RUNNING, 0, 0, nproc_per_node=2, nodes=nodes, slow_rank=slow)


def test_evidence_compares_the_gpu_of_the_rank_with_the_median_of_other_nodes() -> None:
    fine = tuple(GpuReading(index, 50.0, None, None, 100.0, 1900.0, 16) for index in range(2))
    hot = (fine[0], GpuReading(1, 88.0, None, None, 100.0, 700.0, 8))
    warned = "57 of 900 TCP segments were retransmitted within 60 s (6 %)"
    network = CheckRemark("network", Verdict.WARNED, warned)
    readings = {
        "n1": NodeReading(fine, (CheckRemark("clock", Verdict.UNKNOWN, "chronyc took 9 s"),)),
        "n2": NodeReading(hot, (CheckRemark("clock", Verdict.UNKNOWN, "chronyc took 8 s"), network)),
        "n3": NodeReading(fine, (network,)),  # a neighbour, which retransmits to n2
        "foreign": NodeReading((GpuReading(0, 20.0),), (network,)),
    }
    assert describe_slow_rank(status(SlowRank(3, "n2", 1.8)), readings) == (
        "rank 3 on n2 takes 1.8 times as long for a step as the median of all ranks, which wait for it; GPU 1:"
        " clock 700 MHz (others 1900 MHz), temperature 88 °C (others 50 °C), PCIe lanes 8 (others 16),"
        f" utilization 100 % (others 100 %); network: {warned}"
    )


def test_without_readings_the_rank_is_named_alone() -> None:
    assert describe_slow_rank(status(SlowRank(3, "n2", 1.8)), {}).endswith("which wait for it")
    assert describe_slow_rank(status(None), {}) == ""
