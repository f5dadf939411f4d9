"""Benchmarks on real nodes: programs of nccl-tests, storage, and torch in the tests marked `long`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from dalsegno.bench.nccl.parse import read_tables
from tests.cluster.conftest import Cli, at_home, taken_down
from tests.cluster.test_containers import make_image

RECORDED = Path(__file__).parents[1] / "recorded" / "nccl-tests-2.13" / "2x-p5.48xlarge.txt"
# Stands in for a program of nccl-tests with MPI. Rank 0 prints the table.
STAND_IN = f'#!/bin/sh\n[ "$SLURM_PROCID" != 0 ] || cat {RECORDED}\n'


@pytest.fixture(scope="module")
def nccl_tests(shared: Cli) -> Path:
    folder = shared.home / "bench-programs" / "nccl-tests" / "build"
    folder.mkdir(parents=True)
    (folder / "all_reduce_perf").write_text(STAND_IN)
    (folder / "all_reduce_perf").chmod(0o755)
    return folder.parent


def test_nccl_tests_on_nodes_are_printed_judged_and_recorded(shared: Cli, nccl_tests: Path):
    words = ("all_reduce", "-b", "8", "-e", "16G", "-f", "2", "--nodes", "2", "--partition", "train")
    answer = shared.run("bench", *words, "--nccl-tests", str(nccl_tests), "--instance", "p5.48xlarge")
    assert answer.code == 0, answer.err
    assert "# host train-1 instance" in answer.out
    assert read_tables(answer.out)[-1].rows == read_tables(RECORDED.read_text())[-1].rows
    assert "PASS" in answer.err
    history = [json.loads(line) for line in (shared.home / "bench" / "shared.jsonl").read_text().splitlines()]
    assert (history[-1]["kind"], round(history[-1]["value"])) == ("all_reduce", 487)


def test_nccl_tests_of_an_image_are_found_and_run_in_it(shared: Cli, nccl_tests: Path):
    image = make_image(nccl_tests.parent)
    mounts = f"{nccl_tests}:/opt/nccl-tests,{RECORDED}:{RECORDED}"
    words = ("--nodes", "1", "--container-image", str(image), "--container-mounts", mounts)
    table = read_tables(shared.ok("bench", "all_reduce", *words, cwd=shared.home))[-1]
    assert table.rows == read_tables(RECORDED.read_text())[-1].rows


def test_source_is_compiled_by_one_make_on_a_node_whatever_its_gpus(shared: Cli):
    source = shared.home / "source"
    source.mkdir()
    (source / "Makefile").write_text("all:\n\tmkdir -p build\n\thostname >> build/hosts\n\ttouch build/x_perf\n")
    built = shared.ok("bench", "build", str(source), "--nodes", "1", "--gpus-per-node", "8", "--partition", "train")
    assert built.strip() == str(source / "build")
    (host,) = (source / "build/hosts").read_text().split()
    assert host.startswith("train-")


FAILING = """#!/bin/sh
echo "# nThread 1 nGpus 1 minBytes 8 maxBytes 1024 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1 validation: 1"
echo "# Using devices"
echo "$(hostname): Test CUDA failure util.cu:674 'no CUDA-capable device is detected'"
exit 2
"""  # as nccl-tests 2.19.6 behaves on a node without GPUs


def test_the_error_of_a_program_of_nccl_tests_is_the_verdict(shared: Cli):
    program = shared.home / "failing" / "all_reduce_perf"
    program.parent.mkdir()
    program.write_text(FAILING)
    program.chmod(0o755)
    answer = shared.run("bench", "all_reduce", "--nodes", "1", "--nccl-tests", str(program), "--json")
    report = json.loads(answer.out)
    assert (answer.code, report["level"], report["reason"]) == (1, "FAIL", "error")
    assert report["sentences"][0].endswith("the test ended with an error: no CUDA-capable device is detected")


def test_a_missing_program_of_nccl_tests_is_named_with_its_node(shared: Cli):
    answer = shared.run("bench", "gather", "--nodes", "1", "--nccl-tests", "/not/there")
    assert answer.code == 1
    assert "gather_perf was not found" in answer.err


def test_storage_is_measured_on_all_nodes_at_once(shared: Cli):
    words = ("storage", "/tmp", "--nodes", "2", "--size", "4M", "--seconds", "1", "--json")
    found = json.loads(shared.ok("bench", *words))
    assert len({each["host"] for each in found}) == 2
    assert all(each["write_mb_per_s"] > 0 and not each["error"] for each in found)


def test_virtual_hosts_get_no_variables_of_a_fabric_that_they_lack(shared: Cli):
    assert "FI_PROVIDER" not in shared.ok("bench", "all_reduce", "--nodes", "2", "--dry-run")


@pytest.mark.long
def test_collectives_and_products_with_torch_on_nodes(shared: Cli):
    small = ("-b", "1K", "-e", "64K", "-f", "8", "-n", "3", "--nodes", "2", "--nccl-tests", "no")
    table = read_tables(shared.ok("bench", "all_gather", *small))[-1]
    assert table.hosts == ("train-1", "train-2")
    assert (table.out_of_bounds, len(table.rows)) == (0, 3)
    found = json.loads(shared.ok("bench", "gemm", "--nodes", "2", "--seconds", "0.2", "--side", "128", "--json"))
    assert [each["result"]["host"] for each in found] == ["train-1", "train-2"]


@pytest.mark.long
def test_the_start_of_a_run_is_measured_in_phases(shared: Cli):
    found = json.loads(shared.ok("bench", "launch", "--nodes", "2", "--repeat", "1", "--json"))
    assert found["until_script_s"][0] > found["srun_s"][0] > 0


FOUR = """
name: one
target: local
partitions: [{name: train, nodes: 4, cpus: 4, memory: 2G, default: true}]
slurm: {accounting: false}
health: {mode: observe}  # the slow node stays
"""


@pytest.fixture(scope="module")
def four(cache: Path) -> Iterator[Cli]:
    with taken_down(at_home(cache)) as cli:
        cli.ok("up", cli.file(FOUR))
        yield cli


NODE = ("net-slow", "train-3", "--rate", "20mbit")
LINK = ("link-slow", "train-2", "--peer", "train-4", "--rate", "20mbit")  # no ring has this link between non-neighbours


def faults_found(cli: Cli, injected: tuple[str, ...], *how: str) -> list[tuple[str, list[str]]]:
    cli.ok("inject", *injected)
    try:
        words = ("pairs", "--nodes", "4", "--size", "4M", "--seconds", "0.2", "--low", "0.2", "--json", *how)
        answer = cli.run("bench", *words, timeout_s=400)
    finally:
        cli.ok("inject", "--clear", injected[1])
    assert answer.code == 1, answer.err
    return [(each["kind"], each["nodes"]) for each in json.loads(answer.out)["faults"]]


def test_bisection_names_a_slow_link_between_two_nodes(four: Cli):
    assert faults_found(four, LINK, "--bisect") == [("link", ["train-2", "train-4"])]


@pytest.mark.long
def test_the_matrix_names_a_slow_link_between_two_nodes(four: Cli):
    assert faults_found(four, LINK) == [("link", ["train-2", "train-4"])]


@pytest.mark.long
@pytest.mark.parametrize("how", [(), ("--bisect",)], ids=["matrix", "bisection"])
def test_pairs_name_a_slow_node(four: Cli, how: tuple[str, ...]):
    assert faults_found(four, NODE, *how) == [("node", ["train-3"])]
