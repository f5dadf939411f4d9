"""The Slurm job of a benchmark, the search for nccl-tests on a node, and the history of measurements."""

from __future__ import annotations

import subprocess
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from dalsegno.bench.job import BenchMeasurement, choose_program, make_argv, nccl_tests_places, read_history, srun_argv
from dalsegno.cli.measure.bench import command as bench
from dalsegno.cli.measure.bench_build import command as build
from dalsegno.cli.measure.bench_job import earlier, record
from dalsegno.errors import DalsegnoError, UsageError
from dalsegno.runs.submit.options import make_request
from dalsegno.runs.submit.plan import ClusterFacts, PartitionFacts, plan_run
from dalsegno.runs.submit.values import Gpus, NodeCount

PARTITION = PartitionFacts("gpu", default=True, nodes=4, cpus=192, gpus=8, gpu_type="h100", instance="p5.48xlarge")


def plan(**fields):
    facts = ClusterFacts(
        partitions=(PARTITION,), mpi_types=("pmi2", "pmix"), launcher=("/usr/bin/python3", "/ds/programs.py")
    )
    return plan_run(make_request("all_reduce", (), {"framework": "mpi", "chdir": "/fsx", **fields}), facts, "bench-1")


def test_srun_gets_the_nodes_gpus_and_mpi_and_no_mark_of_a_run():
    words = srun_argv(plan(nodes=NodeCount(2, 2), gpus_per_node=Gpus(8)), ["all_reduce_perf", "-b", "8"])
    assert words[0] == "srun"
    assert {"--nodes=2", "--ntasks=16", "--ntasks-per-node=8", "--gpus-per-node=8", "--mpi=pmix"} <= set(words)
    assert words[-3:] == ["all_reduce_perf", "-b", "8"]
    assert not any(word.startswith("--comment") for word in words)


def test_a_job_in_a_container_has_its_image_and_runs_nowhere_else():
    words = srun_argv(plan(nodes=NodeCount(1, 1), container_image="/fsx/nccl.sqsh"), ["all_reduce_perf"])
    assert "--container-image=/fsx/nccl.sqsh" in words
    assert words[-1] == "all_reduce_perf"
    assert "sh" in words  # the shell of the guard


def test_the_variables_of_the_instance_type_are_part_of_the_plan():
    assert {each.name: each.value for each in plan().variables}["FI_PROVIDER"] == "efa"
    assert "FI_PROVIDER" not in {each.name for each in plan(env=(("FI_PROVIDER", "tcp"),)).variables}


def test_nccl_tests_are_looked_for_in_the_given_folder_only():
    assert nccl_tests_places("/fsx/nt", "x_perf", {"PATH": "/bin"}) == ["/fsx/nt/build/x_perf", "/fsx/nt/x_perf"]
    assert nccl_tests_places("/fsx/nt/x_perf", "x_perf", {}) == ["/fsx/nt/x_perf"]


def test_without_a_folder_the_path_comes_before_the_usual_folders():
    places = nccl_tests_places("", "x_perf", {"NCCL_TESTS_HOME": "/own"})
    assert places[:3] == ["/own/build/x_perf", "/own/x_perf", "x_perf"]
    assert "/opt/nccl-tests/build/x_perf" in places


def program(folder: Path, name: str = "all_reduce_perf") -> Path:
    file = folder / name
    file.write_text('#!/bin/sh\necho "ran $*"\n')
    file.chmod(0o755)
    return file


def run(words: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)


def test_the_first_program_that_exists_runs_with_its_arguments(tmp_path: Path):
    there = program(tmp_path)
    done = run(choose_program([f"{tmp_path}/no/all_reduce_perf", str(there)], ["-b", "8 9"], ["echo", "torch"]))
    host, ran = done.stdout.splitlines()
    assert host.startswith("# host ")
    assert ran == "ran -b 8 9"


def test_without_such_a_program_the_other_command_runs():
    assert run(choose_program(["/no/x_perf"], [], ["echo", "measured with", "torch"])).stdout == "measured with torch\n"


def test_without_any_program_the_message_names_the_host():
    done = run(choose_program(["/no/x_perf"], [], []))
    assert done.returncode == 127
    assert "x_perf was not found" in done.stderr


def test_a_module_is_loaded_before_its_program_is_looked_for(tmp_path: Path):
    """A login shell defines `module` as a function, as Lmod and Environment Modules do. The function extends PATH."""
    (tmp_path / "tools").mkdir()
    program(tmp_path / "tools")
    lines = f'module() {{ [ "$*" = "load nccl-tests/2.19" ] && PATH="$PATH:{tmp_path}/tools"; }}\n'
    (tmp_path / ".bash_profile").write_text(lines)
    env = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    for module, code, text in (("nccl-tests/2.19", 0, "ran -b 8\n"), ("other", 1, "")):
        words = choose_program(["all_reduce_perf"], ["-b", "8"], ["echo", "torch"], module)
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60, env=env)
        assert (done.returncode, done.stdout.endswith(text), "torch" in done.stdout) == (code, True, False)


def test_make_gets_the_folders_that_are_given():
    homes = {"MPI_HOME": "/opt/mpi", "CUDA_HOME": "", "NCCL_HOME": ""}
    assert make_argv("/src", mpi=True, homes=homes, jobs=4) == [
        "make",
        "-j4",
        "-C",
        "/src",
        "MPI=1",
        "MPI_HOME=/opt/mpi",
    ]


# Compilation, with make and a stand-in for the Makefile of nccl-tests


MAKEFILE = "all:\n\tmkdir -p build\n\ttouch build/all_reduce_perf build/mpi-$(MPI)\n"


def test_an_archive_is_unpacked_and_compiled(tmp_path: Path):
    source = tmp_path / "nccl-tests-2.19.6"
    source.mkdir()
    (source / "Makefile").write_text(MAKEFILE)
    subprocess.run(["tar", "-czf", "source.tar.gz", source.name], cwd=tmp_path, check=True)
    made = CliRunner().invoke(build, [str(tmp_path / "source.tar.gz"), "--into", str(tmp_path / "into")])
    assert made.exception is None
    folder = tmp_path / "into" / source.name / "build"
    assert str(folder) in made.stdout
    assert sorted(each.name for each in folder.iterdir()) == ["all_reduce_perf", "mpi-1"]


def test_a_failed_build_shows_the_compiler_and_what_to_set(tmp_path: Path):
    (tmp_path / "Makefile").write_text("all:\n\t@echo nvcc: not found >&2; exit 1\n")
    made = CliRunner().invoke(build, [str(tmp_path)])
    assert isinstance(made.exception, DalsegnoError)
    assert "nvcc: not found" in made.exception.what
    assert "--cuda-home" in made.exception.hint


@pytest.mark.parametrize("name", ["nothing", "file", "folder"])
def test_invalid_source_of_nccl_tests_is_refused(tmp_path: Path, name: str):
    (tmp_path / "file").write_text("no archive")
    (tmp_path / "folder").mkdir()
    made = CliRunner().invoke(build, [str(tmp_path / name)])
    assert isinstance(made.exception, UsageError)


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["all_reduce", "--output", "/no/where/a.out"], "cannot be written"),
        (["all_reduce", "--instance", "p5.48"], "no instance type"),
        (["broadcast", "--nproc", "2", "-r", "2"], "there is no rank 2"),
        (["all_reduce", "--device", "cpu", "-o", "avg"], "gloo has no operation `avg`"),
        (["gemm", "--nodes", "abc"], "`abc` is not a fixed number of nodes"),
        (["all_reduce", "--nodes", "1:4"], "`1:4` is not a fixed number of nodes"),
        (["build", ".", "--nodes", "2"], "nccl-tests are compiled on one node"),
        (["launch", "--nproc", "2"], "No such option"),
        (["pairs", "--nproc", "2"], "No such option"),
        (["build", ".", "--nproc", "2"], "No such option"),
        (["storage", "--size", "0"], "invalid size `0`"),
        (["memory", "--size", "0"], "invalid size `0`"),
        (["pairs", "--nodes", "2", "--svg", "/no/where/a.svg"], "cannot be written"),
        (["gemm", "--seconds", "nan"], "must be a number"),
        (["allreduce"], "did you mean `all_reduce`?"),
    ],
)
def test_wrong_values_are_refused_before_anything_is_measured(words: list[str], what: str):
    made = CliRunner().invoke(bench, words, standalone_mode=False)
    assert isinstance(made.exception, (DalsegnoError, click.UsageError)) and what in str(made.exception)
    assert not made.stdout


# History


def test_measurements_are_appended_and_read_back(tmp_path: Path):
    file = tmp_path / "bench" / "one.jsonl"
    for value in (1.0, 2.0):
        record(file, BenchMeasurement(10.0, "all_reduce", value, "GB/s", ("a", "b"), {"ranks": 2}))
    record(file, BenchMeasurement(11.0, "all_reduce", 9.0, "GB/s", ("a",), {"ranks": 1}))
    assert earlier(file, "all_reduce", {"ranks": 2}) == [1.0, 2.0]
    assert earlier(file, "gemm", {}) == []
    assert file.stat().st_mode & 0o777 == 0o600


def test_damaged_lines_of_the_history_are_skipped():
    good = BenchMeasurement(1.0, "gemm", 3.0, "TFLOP/s", ("a",), {"device": "GPU 0"})
    assert read_history(f'{{"at": 1\n[]\n{good.to_json()}\n{{"at": "x"}}') == [good]


def test_a_history_that_cannot_be_written_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "bench").write_text("a file")
    record(tmp_path / "bench" / "one.jsonl", BenchMeasurement(1.0, "gemm", 1.0, "TFLOP/s"))
    assert "was not recorded" in capsys.readouterr().err
