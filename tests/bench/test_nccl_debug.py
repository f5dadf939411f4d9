"""Tests of reading NCCL's log lines: network, links, ranks and algorithm, and the advice on them."""

from pathlib import Path

import pytest

from dalsegno.bench.nccl.debug import MAX_WARNINGS, NcclNetwork, NcclProblem, find_problems, read_debug, separate_tables
from dalsegno.bench.nccl.machines import BenchMachines
from dalsegno.bench.nccl.parse import read_tables
from dalsegno.bench.nccl.report import MachineAsk, read_reports
from dalsegno.bench.nccl.verdict import BenchLevel, BenchReason
from dalsegno.hardware import find_instance, gpu_of

RECORDED = Path(__file__).parents[1] / "recorded"
INFO = "gpu49:65234:65300 [0] NCCL INFO "


def machines(instance: str = "p5.48xlarge", nodes: int = 2) -> BenchMachines:
    found = find_instance(instance)
    return BenchMachines(nodes, found.gpus, found, gpu_of(found))


def problems(*lines: str, on: BenchMachines | None = None) -> list[NcclProblem]:
    debug = read_debug("".join(f"{INFO}{line}\n" for line in lines))
    return [finding.problem for finding in find_problems(debug, on or machines())]


HEALTHY = (
    "NET/OFI Initializing aws-ofi-nccl 1.18.0",
    "NET/OFI Selected provider is efa, fabric is efa-direct (found 32 nics)",
    "Using network AWS Libfabric", "NVLS multicast support is available on dev 0",
    "Channel 00/0 : 7[7] -> 8[0] [send] via NET/AWS Libfabric/0/GDRDMA", "Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM",
    "ncclCommInitRank comm 0x55 rank 0 nranks 16 cudaDev 0 nvmlDev 0 busId 53000 - Init COMPLETE",
    "Pattern 4, crossNic 0, nChannels 16, bw 40.000000/40.000000, type NVL/PIX, sameChannels 1",
    "AllReduce: 17179869184 Bytes -> Algo NVLS_TREE proto SIMPLE channel{Lo..Hi}={0..15}",
)  # fmt: skip


def test_healthy_log_shows_no_problem():
    assert problems(*HEALTHY) == []


def test_network_ranks_and_algorithm_are_read():
    debug = read_debug("".join(f"{INFO}{line}\n" for line in HEALTHY) + "NCCL version 2.27.5+cuda12.9\n")
    assert (debug.network, debug.provider, debug.cards, debug.size) == (NcclNetwork.EFA, "efa", 32, 16)
    assert debug.algorithm(16 << 30) == "NVLS_TREE" and debug.version == "2.27.5"
    older = read_debug(f"{INFO}1026048 Bytes -> Algo 1 proto 2 time 34.693867\n{INFO}Using network IB\n")
    assert older.algorithm(1026048) == "RING" and older.network is NcclNetwork.INFINIBAND


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("Using network Socket", NcclProblem.SOCKETS),
        ("Channel 00/0 : 7[7] -> 8[0] [send] via NET/Socket/0", NcclProblem.SOCKETS),
        ("NET/OFI Selected Provider is tcp;ofi_rxm", NcclProblem.NO_EFA),
        ("NET/OFI No eligible providers were found", NcclProblem.NO_EFA),
        ("NET/Plugin: Could not find: libnccl-net.so. Using internal network plugin.", NcclProblem.NO_PLUGIN),
        ("NET/Plugin : No plugin found (libnccl-net.so), using internal implementation", NcclProblem.NO_PLUGIN),
        ("NET/OFI Selected provider is efa, fabric is efa (found 4 nics)", NcclProblem.FEW_CARDS),
        ("Channel 00/0 : 7[7] -> 8[0] [send] via NET/AWS Libfabric/0", NcclProblem.NO_GPU_DIRECT),
        ("Pattern 4, crossNic 0, nChannels 2, bw 20.0/20.0, type PHB/PIX, sameChannels 1", NcclProblem.NO_NVLINK),
        ("Channel 00 : 0[0] -> 1[1] via SHM/direct/direct", NcclProblem.SHARED_MEMORY),
        ("NVLS multicast support is not available on dev 0", NcclProblem.NO_IN_SWITCH),
        ("NCCL_P2P_DISABLE set by environment to 1.", NcclProblem.SWITCHED_OFF),
    ],
)
def test_line_shows_its_problem_with_advice(line: str, problem: NcclProblem):
    debug = read_debug(f"{INFO}{line}\n")
    (finding,) = find_problems(debug, machines())
    assert finding.problem is problem and finding.hint


def test_warnings_of_nccl_are_shown_once_and_few_of_them():
    text = "".join(f"gpu1:1:2 [0] misc/socket.cc:50 NCCL WARN problem {number % 9}\n" for number in range(99))
    found = find_problems(read_debug(text), machines())
    assert [finding.text for finding in found][:2] == ["NCCL warned: problem 0", "NCCL warned: problem 1"]
    assert len(found) == MAX_WARNINGS


def test_sockets_are_right_where_there_is_nothing_else():
    assert problems("Using network Socket", on=machines("p3.16xlarge")) == []
    assert problems("Using network Socket", on=machines(nodes=1)) == []


def test_processes_that_ran_alone_are_found_in_the_log_of_nccl():
    started = "[0] NCCL INFO ncclCommInitRank comm 0x5 rank 0 nranks 1 cudaDev 0 - Init COMPLETE"
    debug = read_debug("".join(f"gpu49:{pid}:{pid} {started}\n" for pid in range(100, 108)))
    (found,) = find_problems(debug, machines())
    assert found.problem is NcclProblem.SEPARATE_RANKS and "8 processes" in found.text


def test_real_output_of_one_rank_has_no_verdict_and_no_false_cause():
    """nccl-tests 2.19.6 printed the file with NCCL 2.28.9 on one H200.

    With a single rank, NCCL logs its size four times.
    """
    text = (RECORDED / "nccl-2.28.9/one_rank.txt").read_text()
    (report,) = read_reports("log", text, MachineAsk())
    assert report.verdict.level is BenchLevel.UNKNOWN and report.verdict.reason is BenchReason.ONE_RANK
    assert [row.size for row in report.table.rows] == [1 << 20, 1 << 23, 1 << 26, 1 << 29]
    assert all(row.out_of_place and row.out_of_place.wrong == 0 for row in report.table.rows)
    assert report.findings == ()


@pytest.mark.parametrize("prefix", [True, False])
def test_tables_of_processes_that_ran_alone_are_one_failure(prefix: bool):
    lines = (RECORDED / "nccl-tests-2.19.6/all_reduce.txt").read_text().splitlines()
    mixed = [
        f"{f'{rank}: ' if prefix else ''}{line.replace('65234', str(70000 + rank))}"
        for line in lines
        if "65235" not in line
        for rank in range(4)
    ]
    text = "\n".join(mixed)
    assert separate_tables(read_tables(text)) == 4
    (report,) = read_reports("log", text, MachineAsk())
    assert (report.verdict.level, report.verdict.reason) == (BenchLevel.FAIL, BenchReason.SEPARATE)
    assert "MPI=1" in report.hints()[0]


def test_tests_that_ran_one_after_another_are_judged_one_by_one():
    one = (RECORDED / "nccl-tests-2.13/1x-BM.GPU4.8.txt").read_text()
    reports = read_reports("log", one + one.replace("258189", "258190"))
    assert [report.verdict.level for report in reports] == [BenchLevel.PASS] * 2


def test_causes_are_looked_for_only_where_the_bandwidth_is_not_right():
    fine = (RECORDED / "nccl-tests-2.13/1x-BM.GPU4.8.txt").read_text()
    log = f"{INFO}NCCL_P2P_DISABLE set by environment to 1.\n{fine}"
    assert read_reports("log", log)[0].findings == ()
    slow = log.replace("232.83", "22.83").replace("233.00", "23.00")
    assert [finding.problem for finding in read_reports("log", slow)[0].findings] == [NcclProblem.SWITCHED_OFF]


def test_error_of_a_rank_is_the_verdict_with_its_own_hint():
    text = (RECORDED / "nccl-tests-2.13/1x-BM.GPU4.8.txt").read_text()
    failure = "gpu-1: Test CUDA failure common.cu:291 'unspecified launch failure'\n"
    (report,) = read_reports("log", text[: text.index("# Out of bounds")] + failure)
    assert report.verdict.sentences()[0].endswith("the test ended with an error: unspecified launch failure")
    assert [hint.partition(":")[0] for hint in report.hints()] == ["check the GPUs of the node that the error names"]


def test_hint_says_how_to_get_a_missing_log():
    slow = (RECORDED / "nccl-tests-2.13/2x-BM.GPU4.8.txt").read_text()
    assert "NCCL_DEBUG=INFO" in read_reports("log", slow)[0].hints()[0]
