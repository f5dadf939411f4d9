"""The settings of a benchmark, its environment and its requirements."""

import re
import socket
from pathlib import Path

import click
import pytest

from dalsegno.bench.ladder.ladder import (
    LadderAsk,
    check_torch,
    examples_folder,
    local_env,
    parse_caps,
    tcp_bytes_sent,
    world_env,
)
from dalsegno.cli.measure.bench import command as bench
from dalsegno.cli.measure.bench_job import JOB_OPTIONS
from dalsegno.errors import DalsegnoError, UsageError


def first(hosts: str) -> str:
    return hosts.split(",")[0]


SRUN = {
    "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "a,b", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "3",
}  # fmt: skip


def test_settings_survive_json():
    ask = LadderAsk(model_mb=0.5, layers=2, steps=1, batch=3, device="cpu", bucket_caps_mb=(0.5, 2.0))
    assert LadderAsk.from_json(ask.to_json()) == ask


def test_progress_is_reported_four_times():
    assert [number for number in range(40) if LadderAsk(steps=40).progress(number)] == [0, 10, 20, 30]
    assert LadderAsk(steps=2).progress(1) == "step 2 of 2, all rungs in turn"


def test_bucket_caps_are_parsed_without_duplicates():
    assert parse_caps("1,0.5,1") == (1.0, 0.5)


@pytest.mark.parametrize("text", ["", "a", "0", "-1", "1,,2", "inf", "nan"])
def test_invalid_bucket_caps_are_refused(text: str):
    with pytest.raises(UsageError):
        parse_caps(text)


def test_process_without_a_launcher_has_no_world():
    assert world_env({}, first) is None


def test_torchrun_variables_are_used_unchanged():
    assert world_env({"RANK": "1", "WORLD_SIZE": "2", **SRUN}, first) == {}


def test_srun_step_gives_a_world_with_its_first_host_as_master():
    assert world_env(SRUN, first) == {
        "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "a", "MASTER_PORT": "20710",
    }  # fmt: skip


def test_batch_script_is_not_a_step():
    assert world_env({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"}, first) is None


def test_local_processes_use_one_thread_each():
    assert local_env(1, 3) == {
        "RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3", "OMP_NUM_THREADS": "1"
    }  # fmt: skip


def test_error_without_torch_names_the_package():
    with pytest.raises(DalsegnoError) as caught:
        check_torch(find=lambda name: None)
    assert "pip install 'dalsegno[torch]'" in caught.value.hint


def test_ladder_example_is_found():
    assert (examples_folder() / "ladder" / "ring.py").exists()


def test_kernel_counts_bytes_sent_over_tcp():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        other, _ = server.accept()
        with other:
            before = tcp_bytes_sent()
            if before is None:
                pytest.skip("this kernel does not tell")
            one.sendall(b"x" * 1000)
            assert other.recv(1000, socket.MSG_WAITALL)
            assert tcp_bytes_sent() == before + 1000


def test_the_page_names_every_option_of_the_benchmarks():
    page = (Path(__file__).parents[2] / "docs/bench.md").read_text()
    shared = {each.word for each in JOB_OPTIONS} | {"sbatch_arg", "cluster", "json_"}
    context = click.Context(bench)
    for name in ("all_reduce", "pairs", "gemm", "memory", "storage", "launch", "read"):
        found = bench.get_command(context, name)
        assert isinstance(found, click.Command)
        options = [each for each in found.params if isinstance(each, click.Option) and each.name not in shared]
        missing = [each.opts for each in options if not any(re.search(rf"`{word}\b", page) for word in each.opts)]
        assert not missing, name
