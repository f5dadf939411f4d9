"""Tests of the variables that programs of each framework get. Of the frameworks, only an MPI must be installed."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from dalsegno.runs.folder import RunFolder
from tests.cluster.conftest import Answer, Cli
from tests.cluster.runs import Run, footprint

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


@pytest.fixture
def work(cluster_for_runs: Cli) -> Path:
    """Return a folder that all hosts see."""
    folder = cluster_for_runs.home / f"work-{os.urandom(2).hex()}"
    folder.mkdir()
    return folder


def follow(cli: Cli, work: Path, *words: str) -> tuple[Answer, Run]:
    """Run `dalsegno run` to its end and check that nothing of it is left."""
    before, known = footprint(cli), runs(cli)
    answer = cli.run("run", *words, cwd=work)
    (name,) = runs(cli) - known
    run = Run(cli, work, RunFolder(cli.home / "runs" / name), before)
    run.no_trace()
    return answer, run


def runs(cli: Cli) -> set[str]:
    return {str(each["run"]) for each in json.loads(cli.ok("runs", "--json", "--all"))}


def said(answer: Answer) -> dict[int, dict[str, object]]:
    """Return what each rank printed as JSON."""
    assert answer.code == 0, answer.err
    lines = [line.partition("] ") for line in answer.out.splitlines()]
    return {int(rank[1:]): json.loads(text) for rank, _, text in lines}


# TensorFlow and JAX

# Listens at its own address and connects to all others.
MEETS = """
import json, os, socket, time
def meet(addresses, own):
    host, _, port = addresses[own].rpartition(":")
    listener = socket.create_server((host, int(port)), backlog=64)
    for address in addresses:
        for attempt in range(200):
            try:
                socket.create_connection((address.rpartition(":")[0], int(address.rpartition(":")[2])), 5).close()
                break
            except ConnectionRefusedError:
                time.sleep(0.05)
        else:
            raise SystemExit(f"nobody at {address}")
    open(f"met.{own}", "w").close()
    while len([name for name in os.listdir() if name.startswith("met.")]) < len(addresses):
        time.sleep(0.02)
"""
TENSORFLOW = (
    MEETS
    + """
config = json.loads(os.environ["TF_CONFIG"])
meet(config["cluster"]["worker"], config["task"]["index"])
print(json.dumps({**config, "host": socket.gethostname(), "torch": "RANK" in os.environ}), flush=True)
"""
)


def test_tensorflow_gets_worker_addresses_and_index(cluster_for_runs: Cli, work: Path):
    (work / "train.py").write_text(TENSORFLOW)
    answer, run = follow(cluster_for_runs, work, "--framework", "tensorflow", "-N2", "--nproc-per-node=2", "train.py")
    result = said(answer)
    assert {rank: each["task"] for rank, each in result.items()} == {
        rank: {"type": "worker", "index": rank} for rank in range(4)
    }
    (workers,) = {json.dumps(each["cluster"]) for each in result.values()}
    addresses = json.loads(workers)["worker"]
    assert len(set(addresses)) == 4 and len({address.rpartition(":")[0] for address in addresses}) == 2
    assert [result[rank]["host"] for rank in range(4)] == [node for node in run.nodes for _ in range(2)]
    assert not any(each["torch"] for each in result.values())


JAX = (
    MEETS
    + """
names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "SLURM_PROCID", "SLURM_NTASKS",
         "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_NUM_NODES")
rank = int(os.environ["JAX_PROCESS_ID"])
if rank == 0:
    meet([os.environ["JAX_COORDINATOR_ADDRESS"]], 0)
print(json.dumps({name: os.environ[name] for name in names}), flush=True)
"""
)


def test_jax_gets_coordinator_and_process_id(cluster_for_runs: Cli, work: Path):
    (work / "train.py").write_text(JAX)
    answer, _ = follow(cluster_for_runs, work, "--framework", "jax", "-N", "2", "--nproc-per-node", "2", "train.py")
    result = said(answer)
    assert sorted(result) == [0, 1, 2, 3]
    assert len({each["JAX_COORDINATOR_ADDRESS"] for each in result.values()}) == 1
    for rank, each in result.items():
        place = {"SLURM_PROCID": rank, "SLURM_LOCALID": rank % 2, "SLURM_NODEID": rank // 2, "JAX_PROCESS_ID": rank}
        sizes = {"JAX_NUM_PROCESSES": 4, "SLURM_NTASKS": 4, "SLURM_STEP_NUM_NODES": 2}
        assert {name: int(str(each[name])) for name in (*place, *sizes)} == {**place, **sizes}


# Plain programs

TASK = """#!/bin/sh
echo "$SLURM_PROCID of $SLURM_NTASKS on $(hostname) with $# arguments: $1, rank ${RANK-none}"
exit "$2"
"""


@pytest.mark.parametrize("code", [0, 7])
def test_plain_program_has_slurm_variables_and_its_exit_code(cluster_for_runs: Cli, work: Path, code: int):
    program(work / "task", TASK)
    words = ("--framework", "plain", "-N2", "--nproc-per-node=2", "./task", "a b", str(code))
    answer, _ = follow(cluster_for_runs, work, *words)
    assert answer.code == code, answer.err
    if code == 0:  # for other codes, the first rank that exits ends the others
        assert sorted(answer.out.splitlines()) == [
            f"[{rank}] {rank} of 4 on train-{rank // 2 + 1} with 2 arguments: a b, rank none" for rank in range(4)
        ]


def test_program_on_path_runs_as_plain(cluster_for_runs: Cli, work: Path):
    answer, _ = follow(cluster_for_runs, work, "--framework", "plain", "echo", "hello there")
    assert (answer.code, answer.out) == (0, "hello there\n"), answer.err


def program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def test_torch_variables_reach_a_shell_script_without_preload(cluster_for_runs: Cli, work: Path):
    names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    program(work / "task", f"#!/bin/sh\necho {' '.join(f'${name}' for name in names)} $1\n")
    refused = cluster_for_runs.run("run", "-N2", "cat", cwd=work)
    assert refused.code == 2 and "`--no-preload`" in refused.err
    answer, run = follow(cluster_for_runs, work, "--no-preload", "-N", "2", "./task", "x y")
    assert answer.code == 0, answer.err
    result = [line.split() for line in sorted(answer.out.splitlines())]
    assert [each[:6] for each in result] == [["[0]", "0", "0", "0", "2", "1"], ["[1]", "1", "0", "1", "2", "1"]]
    assert result[0][6:] == result[1][6:] and result[0][-2:] == ["x", "y"]
    assert run.generation == 1


# Preload

IMPORTS = "import sys, os\nprint('pid', os.getpid(), 'slow' in sys.modules, flush=True)\n"


@pytest.mark.parametrize(
    ("module", "note"),
    [
        (
            "raise RuntimeError('no weights')",
            "modules are not preloaded on train-1: import slow: RuntimeError: no weights",
        ),
        ("import os\nos._exit(3)", "modules are not preloaded on train-1: the warm parent died"),
        (
            "import threading as t, time\nt.Thread(target=time.sleep, args=(99,), name='reader', daemon=True).start()",
            "threads of the warm parent on train-1 do not exist in its workers: reader",
        ),
    ],
)
def test_failed_preload_is_reported_in_one_line(cluster_for_runs: Cli, work: Path, module: str, note: str):
    (work / "slow.py").write_text(module)
    (work / "train.py").write_text(IMPORTS)
    words = ("--framework", "jax", "--preload", "slow", "--env", f"PYTHONPATH={work}", "train.py")
    answer, run = follow(cluster_for_runs, work, *words)
    assert answer.code == 0, answer.err
    assert [line for line in answer.err.splitlines() if note in line], answer.err
    assert [entry["text"] for entry in run.journal("note")] == [note]
    assert answer.out.split()[-1] == str("thread" in note)


# MPI

HELLO = r"""
#include <mpi.h>
#include <stdio.h>

int main(int argc, char **argv) {
    int rank, size, sum, length;
    char host[MPI_MAX_PROCESSOR_NAME];
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    MPI_Get_processor_name(host, &length);
    MPI_Allreduce(&rank, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    printf("rank %d of %d on %s, sum %d\n", rank, size, host, sum);
    MPI_Finalize();
    return argc > 1 ? 9 : 0;
}
"""


@pytest.fixture(scope="module")
def hello(cluster_for_runs: Cli) -> Path:
    """Compile an Open MPI program with one exchange among all ranks."""
    folder = cluster_for_runs.home / "mpi"
    folder.mkdir()
    (folder / "hello.c").write_text(HELLO)
    subprocess.run(["mpicc", "-o", "hello", "hello.c"], cwd=folder, check=True)
    return folder


@pytest.mark.parametrize("nodes", [1, 2])
def test_open_mpi_ranks_connect_through_slurm(cluster_for_runs: Cli, hello: Path, nodes: int):
    words = ("--framework", "mpi", "-N", str(nodes), "--nproc-per-node", "2", "./hello")
    answer, _ = follow(cluster_for_runs, hello, *words)
    assert answer.code == 0, answer.err
    size = 2 * nodes
    assert sorted(answer.out.splitlines()) == [
        f"[{rank}] rank {rank} of {size} on train-{rank // 2 + 1}, sum {sum(range(size))}" for rank in range(size)
    ]


def test_run_has_the_exit_code_of_an_mpi_program(cluster_for_runs: Cli, hello: Path):
    answer, _ = follow(cluster_for_runs, hello, "--framework", "mpi", "-N", "2", "./hello", "fails")
    assert answer.code == 9, answer.err
