"""The verdict on nccl-tests tables: limits, expectations, machines, history, and the published tables."""

from dataclasses import replace
from pathlib import Path

import pytest

from dalsegno.bench.nccl.limits import Bottleneck, find_bound, find_expectation, unreachable_floors, vendor_floors
from dalsegno.bench.nccl.machines import (
    BenchMachines,
    count_ranks,
    find_gpu_of_product,
    find_machines,
    name_test,
    read_hints,
)
from dalsegno.bench.nccl.parse import read_tables
from dalsegno.bench.nccl.report import MachineAsk, NcclReport, earlier_results, read_reports
from dalsegno.bench.nccl.table import (
    CPU,
    IterationTimes,
    NcclDevice,
    NcclOutputUnreadable,
    NcclRow,
    NcclTable,
    NcclTest,
    NcclTiming,
)
from dalsegno.bench.nccl.verdict import (
    BenchLevel,
    BenchReason,
    BenchVerdict,
    find_knee,
    history_threshold,
    judge,
    size_text,
    worst,
)
from dalsegno.errors import UsageError
from dalsegno.hardware import find_instance, gpu_of, instances

RECORDED = Path(__file__).parents[1] / "recorded"
GIB = 1 << 30


def machines(instance: str, nodes: int) -> BenchMachines:
    found = find_instance(instance)
    return BenchMachines(nodes, found.gpus, found, gpu_of(found))


def table(busbw: float, test: NcclTest = NcclTest.ALL_REDUCE, ranks: int = 16, size: int = 8 * GIB) -> NcclTable:
    return NcclTable(test, (row(size, busbw, test.bus_factor(ranks)),))


def row(size: int, busbw: float, factor: float = 1.875) -> NcclRow:
    timing = NcclTiming(1.0, busbw / factor if factor else 0.0, busbw)
    return NcclRow(size, size // 4, "float", "sum", -1, timing, timing)


def verdict_of(file: str, **ask: object) -> BenchVerdict:
    (report,) = read_reports(file, (RECORDED / file).read_text(), MachineAsk(**ask))  # type: ignore[arg-type]
    return report.verdict


# The published tables


def test_published_table_of_two_p5_passes_and_nvlink_limits_it():
    verdict = verdict_of("nccl-tests-2.13/2x-p5.48xlarge.txt", instance="p5.48xlarge")
    assert (verdict.level, str(verdict.machines)) == (BenchLevel.PASS, "2 x p5.48xlarge")
    assert verdict.sentences() == [
        "all_reduce, 2 x p5.48xlarge: bus bandwidth 487.1 GB/s at 16 GiB, NVLink-bound, expected at least 440 GB/s",
        "limit: NVLink with reduction in the switch: 450 x 8/9 x 1.875 = 750.0 GB/s; reached 65% of it",
        "expected: 440.0 GB/s (OCI's health check of BM.GPU.H100.8); reached 111% of it",
        "a ring is limited by the network of a node: 3200 Gbit/s = 400 GB/s; reached 122% of it, "
        "so NCCL did not use a ring",
        "80% of the highest bandwidth is reached at 512 MiB",
        "AWS's health check of p5.48xlarge asks for 800 GB/s, which is above the limit",
    ]


def test_published_table_of_one_bm_gpu4_passes_without_a_named_machine():
    verdict = verdict_of("nccl-tests-2.13/1x-BM.GPU4.8.txt")
    assert (verdict.level, str(verdict.machines)) == (BenchLevel.PASS, "1 x BM.GPU4.8")
    assert verdict.expected is not None and verdict.expected.by is Bottleneck.NVLINK
    assert (verdict.busbw, round(verdict.expected.busbw)) == (232.83, 228)


def test_published_table_of_two_bm_gpu4_is_degraded_because_the_network_is_not_used_fully():
    verdict = verdict_of("nccl-tests-2.13/2x-BM.GPU4.8.txt")
    assert (verdict.level, verdict.reason) == (BenchLevel.DEGRADED, BenchReason.BELOW)
    assert verdict.expected is not None and verdict.expected.by is Bottleneck.NETWORK
    assert (verdict.busbw, verdict.expected.busbw) == (164.07, 185)
    assert "1600 Gbit/s = 200 GB/s; reached 82% of it" in verdict.sentences()[3]


def test_published_figure_of_two_p4de_passes():
    assert judge(table(78.3), machines("p4de.24xlarge", 2)).level is BenchLevel.PASS


# Limits


@pytest.mark.parametrize(
    ("instance", "nodes", "limit"),
    [
        ("p4d.24xlarge", 1, 300), ("p4d.24xlarge", 2, 93.8), ("p4d.24xlarge", 4, 64.6), ("p4d.24xlarge", 8, 56.2),
        ("p5.48xlarge", 1, 700), ("p5.48xlarge", 2, 750), ("p5.48xlarge", 4, 516.7), ("p5.48xlarge", 8, 450),
        ("p5.48xlarge", 64, 405.6), ("p6-b200.48xlarge", 1, 1400), ("g5.48xlarge", 1, 31.5),
    ],
)  # fmt: skip
def test_all_reduce_has_the_limit_of_its_slowest_part(instance: str, nodes: int, limit: float):
    bound = find_bound(NcclTest.ALL_REDUCE, machines(instance, nodes))
    assert bound is not None and bound.busbw == pytest.approx(limit, abs=0.06)


def test_alltoall_between_nodes_is_limited_by_the_share_of_a_gpu_in_the_network():
    bound = find_bound(NcclTest.ALLTOALL, machines("p5.48xlarge", 2))
    assert bound is not None and bound.busbw == pytest.approx(50 * 15 / 8) and bound.by is Bottleneck.NETWORK


@pytest.mark.parametrize("test", [test for test in NcclTest if test is not NcclTest.UNKNOWN])
@pytest.mark.parametrize("nodes", [1, 2, 3, 64])
def test_no_expectation_exceeds_its_limit_on_any_instance_type(test: NcclTest, nodes: int):
    for instance in instances().values():
        if instance.gpus and instance.gpus * nodes > 1:
            where = machines(instance.name, nodes)
            bound = find_bound(test, where)
            expected = find_expectation(test, where, bound) if bound else None
            assert expected is None or bound is None or 0 < expected.busbw <= bound.busbw, (instance.name, expected)


def test_some_gpus_of_a_node_are_expected_to_use_their_share_of_its_network():
    where = replace(machines("p5.48xlarge", 2), gpus_per_node=1)
    bound = find_bound(NcclTest.ALL_REDUCE, where)
    assert bound is not None and bound.busbw == 400
    expected = find_expectation(NcclTest.ALL_REDUCE, where, bound)
    assert expected is not None and expected.busbw == pytest.approx(0.85 * 50)


def test_vendor_floor_that_nothing_can_reach_is_reported_and_not_used():
    where = machines("p4d.24xlarge", 2)
    bound = find_bound(NcclTest.ALL_REDUCE, where)
    assert bound is not None
    assert [floor.busbw for floor in unreachable_floors(NcclTest.ALL_REDUCE, where, bound)] == [300]
    expected = find_expectation(NcclTest.ALL_REDUCE, where, bound)
    assert expected is not None and expected.busbw == pytest.approx(75)


def test_every_vendor_floor_has_a_source():
    assert len(vendor_floors()) > 20
    assert all(floor.source and floor.owner and floor.busbw > 0 for floor in vendor_floors())


# Levels


@pytest.mark.parametrize(
    ("busbw", "level"),
    [(440, "PASS"), (439, "DEGRADED"), (374.5, "DEGRADED"), (373, "FAIL"), (2.4, "FAIL"), (764, "PASS"),
     (766, "IMPOSSIBLE")],
)  # fmt: skip
def test_level_follows_from_expectation_and_limit(busbw: float, level: str):
    assert judge(table(busbw), machines("p5.48xlarge", 2)).level.value == level


def test_wrong_data_fails_whatever_the_bandwidth():
    fine = table(480)
    (only,) = fine.rows
    assert only.in_place is not None
    wrong = replace(fine, rows=(replace(only, in_place=replace(only.in_place, wrong=3.0)),))
    verdict = judge(wrong, machines("p5.48xlarge", 2))
    assert (verdict.level, verdict.reason, len(verdict.sentences())) == (BenchLevel.FAIL, BenchReason.WRONG_DATA, 1)
    assert judge(replace(fine, out_of_bounds=2), machines("p5.48xlarge", 2)).reason is BenchReason.WRONG_DATA


def test_error_and_a_table_without_rows_fail():
    where = machines("p5.48xlarge", 2)
    assert judge(replace(table(480), error="unhandled system error"), where).reason is BenchReason.ERROR
    assert judge(replace(table(480), rows=()), where).reason is BenchReason.NO_ROWS


def test_small_messages_give_no_verdict_unless_they_reach_the_expectation():
    where = machines("p5.48xlarge", 2)
    small = judge(table(289, size=128 << 20), where)
    assert (small.level, small.reason) == (BenchLevel.UNKNOWN, BenchReason.TOO_SMALL)
    assert judge(table(450, size=512 << 20), where).level is BenchLevel.PASS


def test_other_number_of_ranks_than_asked_for_fails():
    verdict = verdict_of("nccl-tests-2.13/1x-BM.GPU4.8.txt", nodes=2, gpus_per_node=8)
    assert (verdict.level, verdict.reason) == (BenchLevel.FAIL, BenchReason.WRONG_RANKS)
    assert verdict.sentences() == ["all_reduce, 2 x BM.GPU4.8: the test ran with 8 ranks, not with 16"]


def test_one_rank_gives_no_verdict():
    one = replace(table(0.0, ranks=1), devices=(NcclDevice(0, 0, 1, "a", 0, "0x0f", "NVIDIA H200"),))
    verdict = judge(one, find_machines(one))
    assert (verdict.level, verdict.reason) == (BenchLevel.UNKNOWN, BenchReason.ONE_RANK)


def test_lower_placement_counts_and_only_messages_from_one_gib():
    fast, slow = NcclTiming(1, 260, 487), NcclTiming(1, 160, 300)
    rows = (
        NcclRow(512 << 20, 1, "float", "sum", -1, NcclTiming(1, 300, 560), NcclTiming(1, 300, 560)),
        NcclRow(8 * GIB, 1, "float", "sum", -1, fast, slow),
    )
    verdict = judge(NcclTable(NcclTest.ALL_REDUCE, rows), machines("p5.48xlarge", 2))
    assert (verdict.busbw, verdict.size) == (300, 8 * GIB)


def test_knee_is_the_smallest_size_from_which_all_reach_80_percent():
    rows = tuple(row(size, busbw) for size, busbw in ((1, 10), (2, 85), (4, 70), (8, 80), (16, 100)))
    assert find_knee(NcclTable(NcclTest.ALL_REDUCE, rows), 100) == 8
    assert find_knee(NcclTable(NcclTest.ALL_REDUCE, rows[-1:]), 100) == 0


def test_spread_of_the_iterations_is_reported():
    timing = NcclTiming(1, 260, 487, 0, IterationTimes(1, 9, 8, 7.5))
    rows = (NcclRow(8 * GIB, 1, "float", "sum", -1, timing, timing),)
    verdict = judge(NcclTable(NcclTest.ALL_REDUCE, rows), machines("p5.48xlarge", 2))
    assert "the iterations vary by 7.5 %: other jobs, or clocks that change" in verdict.sentences()


def test_worst_level_counts_and_each_has_its_exit_code():
    where = machines("p5.48xlarge", 2)
    verdicts = [judge(table(busbw), where) for busbw in (480, 400, 900)]
    assert worst(verdicts) is BenchLevel.IMPOSSIBLE and worst(verdicts[:2]) is BenchLevel.DEGRADED
    assert {level.value: level.exit_code for level in BenchLevel} == {
        "PASS": 0, "FAIL": 1, "DEGRADED": 3, "IMPOSSIBLE": 4, "UNKNOWN": 5,
    }  # fmt: skip


# History


def test_history_is_median_less_three_mad():
    assert history_threshold([480, 482, 478, 481, 479]) == pytest.approx(480 - 3 * max(1.4826, 4.8))
    assert history_threshold([400, 480, 440, 420, 460]) == pytest.approx(440 - 3 * 1.4826 * 20)
    assert history_threshold([480, 480]) is None


def test_history_raises_the_expectation_and_never_lowers_it():
    where = machines("p5.48xlarge", 2)
    good, bad = [487.0, 486, 488, 485, 489], [200.0, 201, 199, 198, 202]
    assert judge(table(450), where).level is BenchLevel.PASS
    verdict = judge(table(450), where, good)
    assert verdict.level is BenchLevel.DEGRADED
    assert verdict.expected is not None and verdict.expected.why == "median 487.0 of 5 earlier results, less 3 x MAD"
    assert judge(table(200), where, bad).level is BenchLevel.FAIL


def test_history_judges_where_nothing_is_published():
    where = machines("g5.48xlarge", 1)
    assert judge(table(9, ranks=8), where).reason is BenchReason.NO_EXPECTATION
    assert judge(table(9, ranks=8), where, [9.0, 9.1, 8.9, 9.2, 9.0]).level is BenchLevel.PASS
    assert judge(table(5, ranks=8), where, [9.0, 9.1, 8.9, 9.2, 9.0]).level is BenchLevel.FAIL


def test_history_judges_small_messages_on_processors():
    devices_ = tuple(NcclDevice(rank, 0, rank + 1, "cpu-1", rank, "0x00", "AMD EPYC 9654") for rank in range(2))
    found = [replace(table(busbw, ranks=2, size=1 << 20), devices=devices_) for busbw in (2.0, 2.1, 2.0, 1.9, 2.0)]
    for busbw, level in ((2.0, BenchLevel.PASS), (1.0, BenchLevel.FAIL)):
        one = replace(found[0], rows=(row(1 << 20, busbw, 1.0),))
        assert judge(one, find_machines(one), earlier_results(found, one)).level is level
        assert judge(one, find_machines(one)).level is BenchLevel.UNKNOWN


def test_history_of_other_tests_and_other_sizes_of_job_does_not_count():
    text = (RECORDED / "nccl-tests-2.13/1x-BM.GPU4.8.txt").read_text()
    other = list(read_tables((RECORDED / "nccl-tests-2.13/2x-BM.GPU4.8.txt").read_text())) * 5
    same = [replace(one, rows=(row(10 * GIB, 280, 1.75),)) for one in read_tables(text)] * 5
    assert read_reports("x", text, history=other)[0].verdict.level is BenchLevel.PASS
    assert read_reports("x", text, history=same)[0].verdict.level is BenchLevel.DEGRADED


# Machines


@pytest.mark.parametrize("ranks", [4, 8, 16, 64, 128])
@pytest.mark.parametrize("test", [NcclTest.ALL_REDUCE, NcclTest.ALL_GATHER])
def test_ranks_follow_from_the_ratio_of_the_bandwidths(ranks: int, test: NcclTest):
    algbw = 180.0
    timing = NcclTiming(1, algbw, round(algbw * test.bus_factor(ranks), 2))
    assert count_ranks(NcclTable(test, (NcclRow(GIB, 1, "float", "sum", -1, timing),))) == ranks


@pytest.mark.parametrize(
    ("product", "gpu"),
    [("NVIDIA A100-SXM4-40GB", "a100-40"), ("NVIDIA A100-SXM4-80GB", "a100-80"), ("NVIDIA H100 80GB HBM3", "h100"),
     ("Tesla V100-SXM2-16GB", "v100-16"), ("NVIDIA A10G", "a10g"), ("NVIDIA L40S", "l40s"), ("NVIDIA GB200", "gb200"),
     ("NVIDIA GeForce RTX 4090", "rtx4090"), ("CPU", None), ("", None)],
)  # fmt: skip
def test_product_name_leads_to_the_gpu_of_the_catalog(product: str, gpu: str | None):
    found = find_gpu_of_product(product)
    assert (found.name if found else None) == gpu


def devices(hosts: list[str], product: str) -> tuple[NcclDevice, ...]:
    return tuple(
        NcclDevice(8 * node + gpu, 0, 40 + node, host, gpu, "0x0f", product)
        for node, host in enumerate(hosts)
        for gpu in range(8)
    )


@pytest.mark.parametrize(
    ("hosts", "product", "machine"),
    [
        (["ip-10-1-2-3", "ip-10-1-2-4"], "NVIDIA H100 80GB HBM3", "2 x p5.48xlarge"),
        (["gpu-dy-p4d24xlarge-10", "gpu-dy-p4d24xlarge-11"], "NVIDIA A100-SXM4-40GB", "2 x p4d.24xlarge"),
        (["inst-abcde-gpu", "inst-fghij-gpu"], "NVIDIA H100 80GB HBM3", "2 x BM.GPU.H100.8"),
        # AWS and OCI have the same limits for these machines.
        (["node1", "node2"], "NVIDIA H100 80GB HBM3", "2 x 8 H100"),
        (["node1", "node2"], "NVIDIA A100-SXM4-40GB", "2 x 8 A100"),
        (["node1"], "NVIDIA A100 80GB PCIe", "8 ranks"),  # a PCIe card, which lacks the links of the SXM form
    ],
)
def test_gpus_and_host_names_lead_to_the_instance_type(hosts: list[str], product: str, machine: str):
    found = find_machines(replace(table(100), devices=devices(hosts, product)))
    assert str(found) == machine


def test_machine_is_asked_for_where_providers_differ_in_their_limits():
    between = replace(table(160), devices=devices(["node1", "node2"], "NVIDIA A100-SXM4-40GB"))
    inside = replace(table(230, ranks=8), devices=devices(["node1"], "NVIDIA A100-SXM4-40GB"))
    assert judge(between, find_machines(between)).reason is BenchReason.NO_MACHINE
    assert judge(inside, find_machines(inside)).level is BenchLevel.PASS


def test_instance_type_that_the_log_names_is_used():
    hints = read_hints("NET/OFI Running on p4d.24xlarge platform")
    found = find_machines(replace(table(78), devices=devices(["a", "b"], "NVIDIA A100-SXM4-40GB")), hints)
    assert str(found) == "2 x p4d.24xlarge"


def test_unknown_instance_type_and_one_without_gpus_are_refused():
    with pytest.raises(UsageError) as unknown:
        find_machines(table(78), instance="p5.48xlarg")
    assert unknown.value.hint == "did you mean `p5.48xlarge`?"
    with pytest.raises(UsageError):
        find_machines(table(78), instance="m5.large")


def test_name_of_the_test_comes_from_the_command_in_the_log_else_from_its_rows():
    (unnamed,) = read_tables((RECORDED / "nccl-tests-2.11.0/all_gather.txt").read_text())
    assert name_test(unnamed).test is NcclTest.UNKNOWN
    assert name_test(unnamed, read_hints("srun ./build/all_gather_perf -b 8")).test is NcclTest.ALL_GATHER
    assert name_test(unnamed, asked=NcclTest.ALLTOALL).test is NcclTest.ALLTOALL
    (other,) = read_tables((RECORDED / "nccl-tests-2.11.0/all_reduce.txt").read_text())
    assert name_test(other).test is NcclTest.ALL_REDUCE


def test_text_without_a_table_is_an_error_with_a_hint():
    with pytest.raises(NcclOutputUnreadable) as error:
        read_reports("train.log", "epoch 1 loss 2\n")
    assert "train.log" in error.value.what and "all_reduce_perf" in error.value.hint


def test_sizes_are_written_as_nccl_tests_take_them():
    assert [size_text(size) for size in (8, 1024, 3 << 19, 16 * GIB)] == ["8 B", "1 KiB", "1.5 MiB", "16 GiB"]


# Hints that fit the reason


def hints_of(found: NcclTable, **ask: object) -> list[str]:
    known = find_machines(found, **ask)  # type: ignore[arg-type]
    return NcclReport("a.out", found, judge(found, known)).hints()


def test_wrong_number_of_ranks_does_not_suggest_a_slow_node():
    (hint,) = hints_of(table(480.0, ranks=8), instance="p5.48xlarge", nodes=2, gpus_per_node=8)
    assert "--nodes and --gpus-per-node" in hint and "bench pairs" not in hint


def test_processors_are_not_asked_for_larger_messages():
    devices = tuple(NcclDevice(rank, 0, rank, f"train-{rank}", 0, CPU, "AMD EPYC") for rank in range(2))
    found = replace(table(0.5, ranks=2, size=1 << 20), devices=devices)
    verdict = judge(found, find_machines(found))
    assert (verdict.level, verdict.reason) == (BenchLevel.UNKNOWN, BenchReason.NO_GPUS)
    (hint,) = hints_of(found)
    assert "earlier results" in hint and "-b 1G" not in hint and "--instance" not in hint
    assert judge(found, find_machines(found), history=[0.5] * 5).level is BenchLevel.PASS


def test_a_verdict_names_no_bottleneck_that_its_limit_contradicts():
    first, limit, *_ = verdict_of("nccl-tests-2.13/2x-BM.GPU4.8.txt").sentences()
    assert "NVLink" in limit and "network-bound" not in first


def test_impossible_bandwidth_is_not_explained_by_rings():
    verdict = verdict_of("nccl-tests-2.13/2x-p5.48xlarge.txt", instance="p4d.24xlarge")
    assert verdict.level is BenchLevel.IMPOSSIBLE
    assert not any("ring" in each for each in verdict.sentences())
