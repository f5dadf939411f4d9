"""Tests of which pairs are measured at the same time, and of which node or link is named as bad."""

from __future__ import annotations

from itertools import combinations
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from dalsegno.bench.collectives.pairs import (
    GroupResult,
    PairFault,
    PairFaultKind,
    draw_matrix,
    is_compared,
    judge_pairs,
    next_groups,
    pair_of,
    picture_of,
    rounds,
)
from dalsegno.bench.picture import to_svg
from dalsegno.cli.measure.bench_pairs import command, compare_with_history, conclude, vendor_floor
from dalsegno.errors import UsageError
from dalsegno.runs.submit.options import make_request
from dalsegno.runs.submit.plan import ClusterFacts, PartitionFacts, RunPlan, plan_run
from dalsegno.runs.submit.values import Gpus

NODES = [f"gpu-{number:02d}" for number in range(40)]
FAST, SLOW = 100.0, 20.0


def measure(nodes, bad_nodes=(), bad_links=(), noise=None):
    return {
        pair_of(a, b): (SLOW if {a, b} & set(bad_nodes) or pair_of(a, b) in bad_links else FAST)
        * (noise(a, b) if noise else 1.0)
        for a, b in combinations(nodes, 2)
    }


def search(nodes, bad_nodes=(), bad_links=()):
    """Return the faults that the bisection names, and the number of rounds of measurements."""
    results, count = [], 0
    while not (step := next_groups(nodes, results)).done:
        count += 1
        assert count < 200, "the search does not end"
        assert step.groups
        taken = [node for group in step.groups for node in group]
        assert len(taken) == len(set(taken)), "a node cannot be in two groups at once"
        for group in step.groups:
            slow = bool(set(group) & set(bad_nodes)) or any(set(link) <= set(group) for link in bad_links)
            results.append(GroupResult(group, slow))
    return step, count


@given(st.integers(2, 30))
def test_a_tournament_has_each_pair_once_and_no_node_twice_in_a_round(count: int):
    played = rounds(NODES[:count])
    assert sorted(pair for each in played for pair in each) == sorted(combinations(NODES[:count], 2))
    assert all(len({node for pair in each for node in pair}) == 2 * len(each) for each in played)
    assert len(played) == count - 1 + count % 2


@given(
    st.integers(5, 12),
    st.data(),
    st.floats(0.9, 1.0),
)
def test_the_matrix_names_exactly_the_bad_nodes_and_links(count: int, data, lowest: float):
    nodes = NODES[:count]
    bad_nodes = data.draw(st.lists(st.sampled_from(nodes), max_size=(count - 1) // 4, unique=True))
    good = [node for node in nodes if node not in bad_nodes]
    links = data.draw(st.lists(st.sampled_from(list(combinations(good, 2))), max_size=1, unique=True))
    shares = {pair: data.draw(st.floats(lowest, 1.0)) for pair in combinations(nodes, 2)}
    verdict = judge_pairs(measure(nodes, bad_nodes, links, lambda a, b: shares[pair_of(a, b)]))
    assert {each.nodes[0] for each in verdict.faults if each.kind is PairFaultKind.NODE} == set(bad_nodes)
    assert [each.nodes for each in verdict.faults if each.kind is PairFaultKind.LINK] == links


@given(st.integers(3, 40), st.data())
def test_bisection_names_a_single_bad_node(count: int, data):
    nodes = NODES[:count]
    bad = data.draw(st.sampled_from(nodes))
    step, rounds_used = search(nodes, [bad])
    assert step.faults == ((bad,),)
    assert rounds_used <= 2 * count.bit_length() + 6


@given(st.integers(4, 40), st.data())
def test_bisection_names_a_single_bad_link(count: int, data):
    nodes = NODES[:count]
    link = data.draw(st.sampled_from(list(combinations(nodes, 2))))
    step, rounds_used = search(nodes, [], [link])
    assert step.faults == (link,)
    assert rounds_used <= 4 * count.bit_length() + 8


@given(st.integers(6, 24), st.data())
def test_bisection_names_several_bad_nodes(count: int, data):
    nodes = NODES[:count]
    bad = data.draw(st.lists(st.sampled_from(nodes), min_size=2, max_size=3, unique=True))
    step, _ = search(nodes, bad)
    assert {each[0] for each in step.faults if len(each) == 1} == set(bad)
    assert all(len(each) == 1 for each in step.faults)


@pytest.mark.parametrize("count", [2, 3, 7, 32])
def test_bisection_of_a_healthy_cluster_takes_one_measurement(count: int):
    step, rounds_used = search(NODES[:count])
    assert (step.faults, rounds_used) == ((), 1)


def test_slow_node_of_a_pair_is_not_identified_without_a_third():
    step, _ = search(NODES[:2], [NODES[0]])
    assert (step.faults, step.unsure) == ((), ("gpu-00", "gpu-01"))


def test_a_fault_says_how_much_bandwidth_is_left():
    verdict = judge_pairs(measure(NODES[:4], ["gpu-02"]))
    assert verdict.faults == (PairFault(PairFaultKind.NODE, ("gpu-02",), 0.2),)
    assert str(verdict.faults[0]) == "node gpu-02: 20% of the usual bandwidth"


def test_the_heat_map_shows_each_pair_in_percent_of_the_usual():
    shown = draw_matrix(["a", "b", "c"], measure(["a", "b", "c"], [], [("a", "c")]), FAST)
    assert shown == [
        "       1    2    3",
        "a      - 100%  20%",
        "b   100%    - 100%",
        "c    20% 100%    -",
    ]


def test_the_heat_map_as_a_picture_names_both_nodes_of_each_cell():
    nodes = ["a<b>", "c", "d"]
    svg = to_svg(picture_of(nodes, measure(nodes, ["c"]), FAST))
    cells = [each for each in ElementTree.fromstring(svg).iter() if each.tag.endswith("rect")]
    assert len(cells) == 9
    assert len({each.get("fill") for each in cells}) == 3  # fast, slow, and the diagonal
    assert "a&lt;b&gt; - c: 20 GB/s" in svg


def test_a_single_node_is_refused():
    asked = CliRunner().invoke(command, ["--nodes", "1"])
    assert isinstance(asked.exception, UsageError)


LINES = [
    {"nodes": ["a", "b", "c"], "backend": "gloo"},
    {"group": ["a", "b"], "gbytes_per_s": 0.5},
    {"group": ["a", "c"], "gbytes_per_s": 10.0},
    {"group": ["b", "c"], "gbytes_per_s": 10.0},
    {"group": ["a", "b"], "gbytes_per_s": 9.0},
]


def test_a_pair_that_was_fast_when_measured_again_is_fast():
    assert conclude(LINES, low=0.7, floor=0.0)["faults"] == []
    assert [each["nodes"] for each in conclude(LINES[:-1], low=0.7, floor=0.0)["faults"]] == [["a", "b"]]


def test_pairs_below_the_floor_are_bad_even_if_all_are_alike():
    found = conclude(LINES, low=0.7, floor=50.0)["faults"]
    assert {node for each in found for node in each["nodes"]} == {"a", "b", "c"}


def test_all_pairs_are_slow_if_they_are_below_the_median_of_earlier_results_less_three_mad():
    before = [40.0, 41.0, 39.0, 40.5, 39.5]
    threshold = 40.0 - 3 * 1.4826 * 0.5
    assert compare_with_history(threshold + 0.1, before) == {
        "results": 5,
        "threshold": pytest.approx(threshold),
        "slower": False,
    }
    assert compare_with_history(threshold - 0.1, before)["slower"] is True
    assert compare_with_history(1.0, before[:4])["slower"] is False, "too few results"


def plan(gpus: int, instance: str = "p5.48xlarge") -> RunPlan:
    partition = PartitionFacts("gpu", default=True, nodes=4, cpus=192, gpus=8, gpu_type="h100", instance=instance)
    request = make_request("pairs", (), {"framework": "plain", "chdir": "/fsx", "gpus_per_node": Gpus(gpus)})
    return plan_run(request, ClusterFacts(partitions=(partition,)), "bench-1")


def test_vendors_figures_are_floors_of_large_messages_on_known_machines():
    gib = 1 << 30
    assert vendor_floor(plan(8), gib) == pytest.approx(0.85 * 440)
    assert [vendor_floor(plan(8), gib - 1), vendor_floor(plan(0), gib), vendor_floor(None, gib)] == [0.0] * 3
    assert vendor_floor(plan(8, instance=""), gib) == 0.0


def test_a_bisection_reports_what_it_found():
    last = {"usual": 10.0, "faults": [["a"], ["b", "c"]], "unsure": []}
    report = conclude([*LINES, last], low=0.7, floor=0.0)
    assert [(each["kind"], each["nodes"]) for each in report["faults"]] == [("node", ["a"]), ("link", ["b", "c"])]


def test_one_pair_is_compared_only_with_a_floor_or_with_earlier_results():
    lines = [{"nodes": ["n1", "n2"]}, {"group": ["n1", "n2"], "gbytes_per_s": 1.0}]
    report = {**conclude(lines, 0.7, 0.0), "history": {"results": 0, "threshold": None, "slower": False}}
    assert not is_compared(report)
    assert is_compared({**report, "nodes": ["n1", "n2", "n3"]})
    assert is_compared({**report, "history": {"results": 5, "threshold": 0.9, "slower": False}})
    assert is_compared({**report, "floor": conclude(lines, 0.7, 0.5)["floor"]})
