"""Tests of `srun dalsegno torchrun` in batch scripts on several hosts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.conftest import SOURCE, Cli
from tests.submit.torchrun.launcher import python_with_torch
from tests.waiting import eventually

BATCH = """#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --job-name=torchrun
#SBATCH --output={folder}/{name}.out
export PYTHONPATH={source} PYTHON_EXEC={python}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun {dalsegno} torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-id $SLURM_JOB_ID \
  --rdzv-endpoint $head:29500 {flags} {folder}/{name}.py
echo "ended with $?"
"""

DDP = """
import os, socket
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
restarts = os.environ["TORCHELASTIC_RESTART_COUNT"]
if {die} and restarts == "0" and dist.get_rank() == 3:
    os.kill(os.getpid(), 9)
dist.barrier()
where = os.environ["SLURMD_NODENAME"]
os.write(1, f"rank {{dist.get_rank()}} of {{int(total)}} on {{where}} after {{restarts}}\\n".encode())
dist.destroy_process_group()
"""

WAITS = f"""#!{sys.executable}
import os, subprocess, time
subprocess.Popen(["sleep", "987"], start_new_session=True)
os.write(1, b"up\\n")
time.sleep(600)
"""


@pytest.fixture
def folder(shared: Cli) -> Path:
    """Return a folder that the cluster's hosts see too."""
    folder = shared.home / "work"
    folder.mkdir(exist_ok=True)
    return folder


def submit(shared: Cli, folder: Path, name: str, script: str, flags: str = "") -> tuple[str, Path]:
    """Submit a batch script; return the job id and its output file."""
    (folder / f"{name}.py").write_text(script)
    (folder / f"{name}.py").chmod(0o755)
    dalsegno = f"{sys.executable} -m dalsegno"
    text = BATCH.format(
        folder=folder, name=name, source=SOURCE, python=python_with_torch(), dalsegno=dalsegno, flags=flags
    )
    (folder / f"{name}.sh").write_text(text)
    return shared.ok("submit", f"{name}.sh", cwd=folder).split()[-1], folder / f"{name}.out"


def said(output: Path) -> str:
    return output.read_text() if output.exists() else ""


def test_torchrun_in_a_batch_script_runs_on_two_hosts(shared: Cli, folder: Path) -> None:
    _, output = submit(shared, folder, "well", DDP.format(die=False))
    eventually(lambda: "ended with" in said(output), 200)
    lines = sorted(line for line in said(output).splitlines() if line.startswith("rank"))
    assert [line.split(" on ")[0] for line in lines] == [f"rank {rank} of 4" for rank in range(4)], said(output)
    hosts = [line.split()[5] for line in lines]
    assert hosts[0] == hosts[1] != hosts[2] == hosts[3], "ranks follow the hosts' order"
    assert "ended with 0" in said(output)
    assert "munge" not in said(output), "the cluster's munge authenticates the agents"


def test_killed_worker_is_restarted(shared: Cli, folder: Path) -> None:
    _, output = submit(shared, folder, "killed", DDP.format(die=True), "--max-restarts 1")
    eventually(lambda: "ended with" in said(output), 200)
    assert said(output).count("after 1\n") == 4 and "ended with 0" in said(output), said(output)
    assert "rank 3 on " in said(output) and "was ended by SIGKILL" in said(output)


def test_scancel_leaves_no_process(shared: Cli, folder: Path) -> None:
    # The workers are plain programs, so that no torch is imported.
    job, output = submit(shared, folder, "waits", WAITS, "--no-python")
    eventually(lambda: said(output).count("up\n") == 4, 200)
    assert len(of_job(job, folder)) > 4
    shared.ok("shell", "--", "scancel", job)
    eventually(lambda: of_job(job, folder) == [])


def of_job(job: str, folder: Path) -> list[str]:
    """Return the processes of a job on all hosts of this machine.

    Other clusters may have jobs with the same id, but from other folders.
    """
    marks, found = {f"SLURM_JOB_ID={job}".encode(), f"SLURM_SUBMIT_DIR={folder}".encode()}, []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if marks <= set(variables):
                found.append(subprocess.list2cmdline(Path(f"/proc/{pid}/cmdline").read_text().split("\0")))
        except (OSError, UnicodeDecodeError):
            continue
    return found
