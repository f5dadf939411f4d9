"""`dalsegno doctor` on real Slurm: a script before its job, a failed job, and a failed run."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cluster.conftest import Cli
from tests.cluster.runs import QUICK
from tests.waiting import eventually

NCCL = "import torch, torch.distributed as dist\ndist.init_process_group('nccl')\n"
JOB = """#!/bin/bash
#SBATCH --partition=lab
#SBATCH --nodes=1
srun --container-image=alpine torchrun --nproc_per_node=4 train.py
"""


def symptoms(cli: Cli, *words: str) -> dict[str, dict[str, object]]:
    result = json.loads(cli.run("doctor", "--json", *words).out)
    return {each["symptom"]: each for each in result["findings"]}


def folder(cli: Cli) -> Path:
    """Return a new folder that all hosts see."""
    path = cli.home / "doctor"
    path.mkdir(exist_ok=True)
    return path


def test_batch_script_is_examined_against_its_partition_and_its_nodes(shared: Cli) -> None:
    work = folder(shared)
    (work / "train.py").write_text(NCCL)
    (work / "job.sbatch").write_text(JOB)
    found = symptoms(shared, str(work / "job.sbatch"), "--probe", "--python", "/nowhere/bin/python")
    assert found["wrong-backend"]["fix"] == "#SBATCH --gpus-per-node=4"
    assert found["environment-not-shared"]["evidence"] == [{"where": "lab-1", "text": "no /nowhere/bin/python"}]
    assert "script-unreadable" not in found


def test_failed_job_is_examined_from_its_record_and_its_output(shared: Cli) -> None:
    work = folder(shared)
    script, output = work / "fails.sh", work / "fails-%j.out"
    script.write_text("#!/bin/sh\necho 'RuntimeError: Address already in use'\nexit 1\n")
    sbatch = ("shell", "--", "sbatch", "--parsable", "-p", "lab", "-o", str(output), str(script), "--nodes=2")
    job = shared.ok(*sbatch).strip()
    lost = shared.ok(*sbatch[:-4], "-o", str(work / "nowhere/%j.out"), str(script)).strip()
    eventually(lambda: "ended with exit code 1" in shared.ok("why", job))
    eventually(lambda: "misplaced-options" in symptoms(shared, job))
    found = symptoms(shared, job)
    assert found["port-in-use"]["evidence"][0]["where"] == f"{work}/fails-{job}.out:1"  # type: ignore[index]
    assert "--nodes=2 after the script's name" in str(found["misplaced-options"]["what"])
    assert shared.run("doctor", job).code == 1
    eventually(lambda: "could not be started" in shared.ok("why", lost), 20)
    assert symptoms(shared, lost).keys() == {"output-folder"}


def test_step_of_srun_that_completed_has_no_findings(shared: Cli) -> None:
    step = ("shell", "--", "srun", "-p", "lab", "--chdir=/tmp", "--nodes=1", "sh", "-c", "echo $SLURM_JOB_ID")
    assert symptoms(shared, shared.ok(*step).strip()) == {}


def test_failed_run_points_to_the_doctor_which_knows_its_error(shared: Cli) -> None:
    work = folder(shared)
    (work / "broken.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\")\n")
    words = ("-p", "lab", "--max-restarts", "0", *QUICK, str(work / "broken.py"))
    answer = shared.run("run", *words, cwd=work)
    assert answer.code == 1
    run = answer.err.partition("dalsegno doctor ")[2].partition("`")[0]
    assert f"hint: run `dalsegno doctor {run}`: it knows this error" in answer.err
    evidence = symptoms(shared, run)["torch-missing"]["evidence"][0]  # type: ignore[index]
    assert evidence["where"].startswith("rank 0, line ")
    assert "failed: ModuleNotFoundError" in shared.ok("why", run)
