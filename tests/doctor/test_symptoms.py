"""Each symptom of the doctor: the evidence that shows it, and the advice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dalsegno.doctor import SYMPTOMS, Case, DoctorFinding, Evidence, Severity, examine
from dalsegno.doctor.batch import read_batch
from dalsegno.doctor.case import CaseCluster, FoundSnapshot, NodeProbe, PathPlace, PythonFound, RankTimes
from dalsegno.doctor.logs import LogEnd
from dalsegno.doctor.script import read_script
from dalsegno.doctor.sources import signs_in
from dalsegno.runs.hang import HangReport, HangSuspect
from dalsegno.slurm.facts import JobInfo, JobState

RECORDED = Path(__file__).parents[1] / "recorded/doctor"
CPUS = CaseCluster("partition cpu", nodes=4, gpus_per_node=0, containers=False)
GPUS = CaseCluster("partition gpu", nodes=4, gpus_per_node=8, containers=False)
VENV = PythonFound(
    "/home/ada/venv/bin/python", PathPlace("/home/ada/venv/bin/python", "nfs", True, "rx"), "2.13.0", True
)
ENDED = JobInfo(7, "train", "ada", JobState.FAILED, memory_mib=4096)


def log(name: str) -> Case:
    return Case(name, signs=tuple(signs_in(RECORDED / name, name)))


def script(name: str, **more: object) -> Case:
    facts = read_script((RECORDED / "scripts" / name).read_text(), name)
    return Case(name, script=facts, **more)  # type: ignore[arg-type]


def batch(text: str, **more: object) -> Case:
    return Case("job.sbatch", batch=read_batch(f"#!/bin/bash\n{text}\n", "job.sbatch"), **more)  # type: ignore[arg-type]


def found(case: Case, name: str) -> list[DoctorFinding]:
    return [finding for symptom, finding in examine(case) if symptom.name == name]


# symptom, what is examined, part of the sentence, part of the fix
SHOWN: list[tuple[str, Callable[[], Case], str, str]] = [
    ("torch-missing", lambda: log("torch-missing.log"), "PyTorch is not installed", "-m pip install torch"),
    (
        "torch-missing",
        lambda: script("nccl_backend.py", python=replace(VENV, torch="")),
        "PyTorch is not installed in /home/ada/venv/bin/python",
        "/home/ada/venv/bin/python -m pip install torch",
    ),
    ("launcher-missing", lambda: log("torchrun-not-found.log"), "torchrun is not on the job's PATH", "/bin/activate"),
    (
        "launcher-missing",
        lambda: Case("x", missing_launcher=Evidence("job.sbatch:9", "./pt_cpu/bin/torchrun")),
        "./pt_cpu/bin/torchrun does not exist",
        "python3 -m venv ./pt_cpu && ./pt_cpu/bin/pip install torch",
    ),
    (
        "script-unreadable",
        lambda: log("script-missing.log"),
        "nowhere/train.py does not exist on the node",
        "shared storage",
    ),
    (
        "script-unreadable",
        lambda: Case("x", place=PathPlace("/tmp/train.py", "ext4", False, "r"), cluster=CPUS),
        "/tmp/train.py is on a file system of this machine (ext4)",
        "copy it to shared storage",
    ),
    (
        "script-unreadable",
        lambda: Case("x", place=PathPlace("/fsx/train.py"), probes=(NodeProbe("n1", "r"), NodeProbe("n2", ""))),
        "/fsx/train.py is not readable on 1 of 2 nodes",
        "copy it to shared storage",
    ),
    ("not-executable", lambda: log("not-executable.log"), "./ddp.py is started as a program", "chmod +x ./ddp.py"),
    (
        "syntax",
        lambda: Case("x", script=read_script("def (:\n", "t.py")),
        "t.py is not valid Python",
        "py_compile t.py",
    ),
    ("wrong-backend", lambda: log("nccl-without-gpus.log"), "NCCL backend needs GPUs", 'backend="gloo"'),
    ("wrong-backend", lambda: script("nccl_backend.py", cluster=CPUS), "partition cpu has none", "nccl_backend.py:7"),
    (
        "wrong-backend",
        lambda: script("nccl_backend.py", cluster=GPUS, python=replace(VENV, cuda=False)),
        "torch 2.13.0 in /home/ada/venv/bin/python was built without it",
        "pip install torch",
    ),
    (
        "wrong-backend",
        lambda: replace(script("nccl_backend.py", cluster=GPUS), batch=batch("#SBATCH --nodes=2\npython t.py").batch),
        "its job requests no GPUs",
        "#SBATCH --gpus-per-node=8",
    ),
    (
        "no-process-group",
        lambda: log("no-process-group.log"),
        "before `init_process_group`",
        "then wrap the model in DDP",
    ),
    (
        "no-process-group",
        lambda: script("no_process_group.py"),
        "`init_process_group` is never called",
        "init_process_group(",
    ),
    (
        "environment-not-shared",
        lambda: Case("x", python=replace(VENV, place=PathPlace("/opt/venv/bin/python", "ext4", False)), cluster=CPUS),
        "/opt/venv/bin/python is on a file system of this machine (ext4)",
        "create it on shared storage",
    ),
    (
        "environment-not-shared",
        lambda: Case("x", python=VENV, probes=(NodeProbe("n1", python=False),)),
        "is missing on 1 of 1 nodes",
        "create it on shared storage",
    ),
    (
        "every-rank-saves",
        lambda: script("every_rank_saves.py"),
        "every rank writes the same snapshot",
        "get_rank() == 0",
    ),
    ("no-numpy", lambda: log("no-numpy.log"), "works without it", "-m pip install numpy"),
    ("port-in-use", lambda: log("port-in-use.log"), "MASTER_PORT 29533 was in use", "export MASTER_PORT="),
    (
        "port-in-use",
        lambda: Case("x", port=29500, port_where="job.sbatch:7", probes=(NodeProbe("n1", port_in_use=True),)),
        "MASTER_PORT 29500 is in use on n1",
        "export MASTER_PORT=",
    ),
    (
        "no-containers",
        lambda: log("no-containers.log"),
        "does not know `--container-image`",
        "dalsegno containers check",
    ),
    (
        "no-containers",
        lambda: batch("srun --container-image=a.sqsh python train.py", cluster=GPUS),
        "the workers have no container runtime",
        "dalsegno containers check",
    ),
    (
        "conda-terms",
        lambda: log("conda-terms.log"),
        "terms of Anaconda's channels were not accepted",
        "conda tos accept",
    ),
    ("conda-terms", lambda: batch("conda create -y -p ./pt_cpu python=3.10"), "conda refuses", "conda tos accept"),
    (
        "misplaced-options",
        lambda: log("unrecognized-options.log"),
        "the script got --nodes=2 --partition",
        "before the script",
    ),
    (
        "misplaced-options",
        lambda: batch("python train.py", words=("--nodes=2", "--lr", "0.1")),
        "--nodes=2 after the script's name",
        "put --nodes=2 before the script's name",
    ),
    (
        "misplaced-options",
        lambda: batch("#SBATCH -N 2\npython train.py\n#SBATCH --exclusive"),
        "Slurm ignores #SBATCH lines after the first command",
        "move them to the top",
    ),
    ("launcher-arguments", lambda: log("torchrun-without-script.log"), "torchrun got no script", "single backslash"),
    (
        "launcher-arguments",
        lambda: batch("torchrun --nproc_per_node=4 \\  \n ddp.py"),
        "a backslash with spaces",
        "sed -i",
    ),
    ("launcher-arguments", lambda: batch("srun torchrun --nproc_per_node 4"), "torchrun names no script", "train.py"),
    (
        "output-folder",
        lambda: Case("x", missing_folders=(Evidence("job.sbatch:5", "logs"),)),
        "the folder logs does not exist",
        "mkdir -p logs",
    ),
    (
        "job-state",
        lambda: Case("x", job=replace(ENDED, state=JobState.TIMEOUT)),
        "reached its time limit",
        "a longer `--time`",
    ),
    ("too-few-gpus", lambda: log("duplicate-gpu.log"), "two processes use the same GPU", "LOCAL_RANK"),
    ("no-driver", lambda: log("no-driver.log"), "the node has no GPU", "sinfo -o '%P %G'"),
    ("out-of-memory", lambda: log("cuda-oom.log"), "a GPU ran out of memory", "smaller batch"),
    ("out-of-memory", lambda: log("host-memory.log"), "out of the node's memory", "#SBATCH --mem=0"),
    ("out-of-memory", lambda: log("slurm-oom.log"), "out of the node's memory", "#SBATCH --mem=0"),
    (
        "out-of-memory",
        lambda: Case("x", job=replace(ENDED, state=JobState.OUT_OF_MEMORY)),
        "or of its request of 4096 MiB",
        "#SBATCH --mem=0",
    ),
    (
        "collective-timeout",
        lambda: log("nccl-timeout/job.log"),
        "ALLREDUCE (number 3) timed out",
        "TORCH_FR_DUMP_TEMP_FILE",
    ),
    ("collective-timeout", lambda: log("gloo-timeout.log"), "a rank did not arrive in time", "dalsegno run"),
    (
        "collective-timeout",
        lambda: Case(
            "x", hang=HangReport(1, "rank 1 on gpu-2 did not arrive", HangSuspect.NODE, "r", (1,), ("gpu-2",))
        ),
        "rank 1 on gpu-2 did not arrive; gpu-2 is suspected",
        "dalsegno why gpu-2",
    ),
    (
        "network-error",
        lambda: log("gloo-no-interface.log"),
        "the network interface eth9 does not exist on the node",
        "GLOO_SOCKET_IFNAME=NAME",
    ),
    ("network-error", lambda: log("gloo-unreachable.log"), "could not connect to another rank", "bench pairs"),
    ("network-error", lambda: log("gloo-peer-lost.log"), "usually ended first", "the log of that rank"),
    (
        "slow-rank",
        lambda: Case("x", run="train-x", times=RankTimes({"0": 1.0, "3": 2.4}, {3: "gpu-2"})),
        "rank 3 on gpu-2 takes 2.4 times as long",
        "dalsegno why gpu-2",
    ),
    (
        "slow-dataloader",
        lambda: log("dataloader-workers.log"),
        "64 processes, but the job has 2 cores",
        "num_workers=2",
    ),
    (
        "slow-dataloader",
        lambda: Case("x", run="train-x", times=RankTimes(step_s=0.4, data_s=0.3)),
        "training waits for data 75 % of the time",
        "num_workers=4",
    ),
    (
        "snapshot-world-size",
        lambda: log("deepspeed-world-size.log"),
        "by 8 ranks, and the job has 4",
        "run with 8 ranks",
    ),
    (
        "snapshot-world-size",
        lambda: Case("x", world_size=4, snapshots=(FoundSnapshot("ckpt", 8, "DeepSpeed's ZeRO checkpoint", True),)),
        "ckpt was written by 8 ranks, and the job has 4",
        "run with 8 ranks",
    ),
    (
        "snapshot-world-size",
        lambda: Case("x", world_size=4, snapshots=(FoundSnapshot("ckpt", 8, "checkpoint of Dal Segno"),)),
        "the data is divided differently",
        "run with 8 ranks",
    ),
    (
        "misplaced-options",
        lambda: batch("srun torchrun --nproc-per-node=2 train.py --nodes=2 --gres gpu:8"),
        "--nodes=2 --gres gpu:8 after train.py is an argument of that script",
        "#SBATCH --nodes=2 --gres gpu:8",
    ),
    (
        "script-unreadable",
        lambda: Case("x", missing_script=Evidence("job.sbatch:2", "gone.py")),
        "gone.py does not exist",
        "ls gone.py",
    ),
    (
        "unknown-failure",
        lambda: Case("x.log", ends=(LogEnd("x.log", "ZeroDivisionError: by 0", 9, True),)),
        "x.log ends with an error; no known cause found",
        "read the lines before the error",
    ),
    (
        "unknown-failure",
        lambda: Case("run a", run="a", failure="run a failed with exit code 1", read_next="`dalsegno logs a`"),
        "run a failed with exit code 1; no known cause found",
        "`dalsegno logs a` shows the whole error",
    ),
    ("left-snapshot", lambda: Case("x", left_snapshot="snapshot.pt"), "snapshot.pt exists", "rm snapshot.pt"),
]


@pytest.mark.parametrize(
    ("name", "case", "what", "fix"), SHOWN, ids=[f"{each[0]}-{at}" for at, each in enumerate(SHOWN)]
)
def test_symptom_is_found_with_its_fix(name: str, case: Callable[[], Case], what: str, fix: str):
    (finding, *_) = [each for each in found(case(), name) if what in each.what] or pytest.fail(str(examine(case())))
    assert fix in finding.fix
    assert finding.evidence or case().hang, "a finding says where it was seen"


def test_every_symptom_is_shown_here_and_named_once():
    names = [symptom.name for symptom in SYMPTOMS]
    assert sorted({each[0] for each in SHOWN}) == sorted(names)
    assert len(set(names)) == len(names)


# The problems that a published walkthrough lists, by their messages
WALKTHROUGH = {
    "CondaToSNonInteractiveError: Terms of Service have not been accepted for the following channels": "conda-terms",
    "FileNotFoundError: [Errno 2] No such file or directory: torchrun": "launcher-missing",
    "RuntimeError: Address already in use": "port-in-use",
    "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:94, unhandled system error (run with NCCL_DEBUG"
    "=INFO for details)\nncclSystemError: System call (e.g. socket, malloc) or external library call failed or device"
    " error.\nLast error:\nsocketStartConnect: Connect to 10.1.2.3<52822> failed : No route to host": "network-error",
    "RuntimeError: Gloo connectFullMesh failed with [gloo/transport/tcp/pair.cc:144] no error": "network-error",
    "PermissionError: [Errno 13] Permission denied: 'ddp.py'": "not-executable",
    "RuntimeError: ProcessGroupNCCL is only supported with GPUs, no GPUs found!": "wrong-backend",
    "RuntimeError: Default process group has not been initialized, please make sure to call": "no-process-group",
    "/fsx/ubuntu/awsome-distributed-training/cpu-ddp/ddp.py: Permission denied": "not-executable",
    "torchrun: error: the following arguments are required: training_script": "launcher-arguments",
    "srun: unrecognized option '--container-image'": "no-containers",
    "UserWarning: Failed to initialize NumPy: No module named 'numpy'": "no-numpy",
}


@pytest.mark.parametrize(("message", "name"), WALKTHROUGH.items())
def test_problems_of_the_walkthrough_are_recognized_by_their_messages(message: str, name: str, tmp_path: Path):
    (tmp_path / "slurm-4.out").write_text(f"[RANK 0] Epoch 0\n{message}\n")
    case = Case("slurm-4.out", signs=tuple(signs_in(tmp_path / "slurm-4.out", "slurm-4.out")))
    (pair,) = examine(case)
    line = 3 if "\nncclSystemError" in message else 2
    assert (pair[0].name, pair[1].evidence[0].where) == (name, f"slurm-4.out:{line}")


def test_healthy_case_has_no_findings():
    text = """
import os, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
def main():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    model = DDP(torch.nn.Linear(4, 1))
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), "model.pt")
main()
"""
    job = "#SBATCH --nodes=2\n#SBATCH --gpus-per-node=8\nsrun torchrun --nproc_per_node=8 train.py"
    whole = Case(
        "x",
        script=read_script(text, "train.py"),
        place=PathPlace("/fsx/train.py", "lustre", True, "r"),
        batch=read_batch(f"#!/bin/sh\n{job}\n", "job.sbatch"),
        python=VENV,
        cluster=GPUS,
        world_size=16,
        snapshots=(FoundSnapshot("ckpt", 16, "a file for each rank", True),),
        times=RankTimes({"0": 1.0, "1": 1.2}, step_s=0.4, data_s=0.05),
        probes=(NodeProbe("n1", "r", True, True, False, True, 8),),
    )
    assert examine(whole) == []


def test_lost_connection_is_not_reported_where_the_log_shows_why_the_other_rank_ended():
    lost, memory = log("gloo-peer-lost.log"), log("cuda-oom.log")
    both = replace(lost, signs=(*lost.signs, *memory.signs))
    assert [symptom.name for symptom, _ in examine(both)] == ["out-of-memory"]


def test_notes_come_last_and_errors_first():
    case = replace(log("no-numpy.log"), signs=(*log("no-numpy.log").signs, *log("torch-missing.log").signs))
    assert [finding.severity for _, finding in examine(case)] == [Severity.ERROR, Severity.NOTE]


def test_rank_that_nccls_own_lines_show_to_be_behind_is_named(tmp_path: Path):
    text = """
[rank0]:[E1118] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9, OpType=ALLREDUCE, NumelIn=1)
[rank0]:[E1118] [PG ID 0 PG GUID 0(default_pg) Rank 0]  failure PG status: last enqueued work: 9, last completed work: 8
[rank1]:[E1118] [PG ID 0 PG GUID 0(default_pg) Rank 1]  Last enqueued NCCL work: 8, last completed NCCL work: 8.
"""
    (tmp_path / "out").write_text(text)
    (finding,) = found(Case("out", signs=tuple(signs_in(tmp_path / "out"))), "collective-timeout")
    assert finding.what == "ALLREDUCE (number 9) timed out: rank 1 did not call it"


def test_page_lists_every_symptom():
    page = (Path(__file__).parents[2] / "docs/doctor.md").read_text()
    assert [symptom.name for symptom in SYMPTOMS if f"| `{symptom.name}` |" not in page] == []
    assert f"It knows {len(SYMPTOMS)} symptoms" in (Path(__file__).parents[2] / "CHANGELOG.md").read_text()
