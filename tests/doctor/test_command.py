"""`dalsegno doctor` without a cluster: what it prints, its exit codes, and what it reports as not checked."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dalsegno.cli.training.doctor import command
from dalsegno.doctor import SYMPTOMS
from dalsegno.errors import DalsegnoError, UsageError
from dalsegno.runs import journal
from dalsegno.runs.coordinator.reports.goodput import Goodput, TrainingProgress
from dalsegno.runs.journal import RunEvent
from dalsegno.runs.status import RunPhase, write_status
from dalsegno.spec.facts import facts_to_json
from tests.cli.runs import make_run, status

RECORDED = Path(__file__).parents[1] / "recorded/doctor"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("SLURM_CONF", "DALSEGNO_CLUSTER", "VIRTUAL_ENV", "MASTER_PORT", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DALSEGNO_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", str(tmp_path))
    shutil.copytree(RECORDED, tmp_path / "recorded")
    return tmp_path


def doctor(*words: str) -> Result:
    return CliRunner().invoke(command, list(words))


def test_finding_has_its_evidence_and_its_fix(folder: Path):
    answer = doctor("recorded/no-process-group.log")
    assert answer.exit_code == 1
    assert answer.stdout.splitlines() == [
        "error: the process group was used before `init_process_group`  [no-process-group]",
        "  seen: recorded/no-process-group.log:12: ValueError: Default process group has not been initialized, please"
        " make sure to call init_process_group.",
        '  fix:  call `torch.distributed.init_process_group(backend="gloo")` first ("nccl" on GPUs), then wrap the'
        " model in DDP",
    ]


def test_json_has_the_same_findings(folder: Path):
    result = json.loads(doctor("recorded/cuda-oom.log", "--json").stdout)
    (finding,) = result["findings"]
    assert (finding["symptom"], finding["severity"]) == ("out-of-memory", "error")
    assert finding["evidence"][0]["where"] == "recorded/cuda-oom.log:5"


def test_log_without_known_errors_exits_with_0(folder: Path):
    (folder / "out").write_text("step 1\nstep 2\n")
    answer = doctor("out")
    assert (answer.exit_code, answer.stdout) == (0, "") and "nothing found wrong with out" in answer.stderr


def test_log_that_ends_with_an_unknown_error_exits_with_1(folder: Path):
    (folder / "out").write_text("step 1\nTraceback (most recent call last):\n  x\nZeroDivisionError: by 0\n")
    answer = doctor("out")
    assert answer.exit_code == 1 and "nothing found wrong" not in answer.stderr
    assert answer.stdout.splitlines()[:2] == [
        "error: out ends with an error; no known cause found  [unknown-failure]",
        "  seen: out:4: ZeroDivisionError: by 0",
    ]


def test_run_that_failed_with_an_unknown_error_exits_with_1(folder: Path):
    run = make_run(folder / "home/runs", ranks=1)
    report = "Traceback (most recent call last):\n  x\nValueError: bad\n"
    write_status(run.status, status(phase=RunPhase.ENDED, exit_code=1, generation=1, world_size=1, report=report))
    answer = doctor(run.run)
    assert answer.exit_code == 1
    assert "failed with exit code 1; no known cause found" in answer.stdout and "ValueError: bad" in answer.stdout


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_empty_log_is_called_empty_and_not_without_faults(folder: Path, text: str):
    (folder / "slurm-9.out").write_text(text)
    answer = doctor("slurm-9.out")
    assert (answer.exit_code, answer.stdout) == (0, "")
    assert "the log of slurm-9.out is empty" in answer.stderr and "nothing found wrong" not in answer.stderr
    assert json.loads(doctor("slurm-9.out", "--json").stdout)["empty_log"] is True


def test_note_alone_exits_with_0(folder: Path):
    answer = doctor("recorded/no-numpy.log")
    assert (answer.exit_code, answer.stdout.partition(":")[0]) == (0, "note")


def test_without_a_cluster_it_says_what_it_could_not_check(folder: Path):
    answer = doctor("recorded/scripts/nccl_backend.py")
    assert "not checked: the cluster: there is no cluster yet" in answer.stderr
    assert "wrong-backend" not in answer.stdout, "without nodes, nobody knows whether NCCL fits"


def test_batch_script_is_read_with_the_script_it_starts(folder: Path):
    shutil.copy(RECORDED / "scripts/no_process_group.py", folder / "ddp.py")
    found = {each["symptom"] for each in json.loads(doctor("recorded/job.sbatch", "--json").stdout)["findings"]}
    assert {"no-process-group", "launcher-arguments", "misplaced-options", "output-folder"} <= found


def test_environment_and_script_are_found_through_paths_of_the_batch_script(folder: Path):
    """The environment was never created, as in the sample of a published walkthrough."""
    (folder / "slurm").mkdir()
    shutil.copy(RECORDED / "scripts/no_process_group.py", folder / "ddp.py")
    job = """#!/bin/bash
#SBATCH --nodes 2
srun ./pt_cpu/bin/torchrun \\
    "${ARGS[@]}" \\
    $(dirname "$PWD")/ddp.py 500 10
"""
    (folder / "slurm/train.sbatch").write_text(job)
    found = {each["symptom"]: each for each in json.loads(doctor("slurm/train.sbatch", "--json").stdout)["findings"]}
    assert found["launcher-missing"]["evidence"] == [{"where": "slurm/train.sbatch:3", "text": "./pt_cpu/bin/torchrun"}]
    assert found["no-process-group"]["evidence"][0]["where"].endswith("ddp.py:6")


def test_arguments_after_the_script_are_checked(folder: Path):
    answer = doctor("recorded/scripts/own_options.py", "--", "5", "--nodes=2", "--batch-size=8")
    assert "--nodes=2 after the script's name is an argument of the script" in answer.stdout
    assert "put --nodes=2 before" in answer.stdout, "the script defines --batch-size"


def test_fix_keeps_the_value_of_an_option(folder: Path):
    answer = doctor("recorded/scripts/own_options.py", "--", "--nodes", "2", "--gres=gpu:1")
    assert "put --nodes 2 --gres=gpu:1 before the script's name" in answer.stdout


def test_batch_script_that_starts_a_missing_script_is_noticed(folder: Path):
    (folder / "job.sh").write_text("#!/bin/sh\nsrun python gone.py\n")
    assert "error: gone.py does not exist  [script-unreadable]" in doctor("job.sh").stdout
    (folder / "job.sh").write_text("#!/bin/sh\ncd elsewhere\nsrun python gone.py\n")
    assert "gone.py" not in doctor("job.sh").stdout, "the job changes its folder"


def test_python_that_was_examined_is_named_if_the_jobs_own_is_not_known(folder: Path):
    (folder / "python3").symlink_to(sys.executable)
    shutil.copy(RECORDED / "scripts/nccl_backend.py", folder / "train.py")
    (folder / "job.sh").write_text("#!/bin/sh\nsrun python train.py\n")
    said = doctor("job.sh").stderr
    assert "not checked: the job's own PyTorch: no environment is active, so " in said
    assert f"{folder}/python3 was examined (" in said or f"{sys.executable} was examined (" in said


def test_second_subject_is_refused(folder: Path):
    error = doctor("recorded/scripts/own_options.py", "recorded/cuda-oom.log").exception
    assert isinstance(error, UsageError) and "recorded/cuda-oom.log" in error.what and "--" in error.hint


def test_job_without_a_cluster_is_a_usage_error_without_slurms_messages(folder: Path):
    for name in ("sinfo", "squeue"):
        (folder / name).write_text("#!/bin/sh\necho 'error: fetch_config: DNS SRV lookup failed' >&2\nexit 1\n")
        (folder / name).chmod(0o755)
    error = doctor("15").exception
    assert isinstance(error, DalsegnoError) and "there is no cluster" in error.what and "DNS" not in error.what
    assert "log file" in error.hint
    said = doctor("recorded/scripts/own_options.py").stderr
    assert "not checked: the cluster: there is no cluster here" in said and "DNS" not in said


def test_process_group_that_a_module_beside_the_script_starts_counts(folder: Path):
    (folder / "setup_group.py").write_text(
        "import torch.distributed as d\ndef go():\n    d.init_process_group('gloo')\n"
    )
    text = (RECORDED / "scripts/no_process_group.py").read_text()
    (folder / "train.py").write_text(f"import setup_group\nsetup_group.go()\n{text}")
    assert "no-process-group" not in doctor("train.py").stdout


def test_dumps_of_the_flight_recorder_name_the_collective(folder: Path):
    answer = doctor("recorded/nccl-timeout/job.log", "--dumps", "recorded/gloo-hang")
    assert "rank 1 did not arrive" in answer.stdout and "all_reduce (8)" in answer.stdout


def test_checkpoint_of_another_number_of_ranks_is_found(folder: Path):
    (folder / "ckpt").mkdir()
    for rank in range(4):
        (folder / f"ckpt/model_rank{rank}.pt").touch()
    words = ("recorded/scripts/own_options.py", "--checkpoint", "ckpt", "--ranks")
    assert "written by 4 ranks, and the job has 8" in doctor(*words, "8").stdout
    assert "snapshot-world-size" not in doctor(*words, "4").stdout


def test_snapshot_from_which_the_script_would_continue_is_noted(folder: Path):
    (folder / "snapshot.pt").touch()
    assert "note: snapshot.pt exists" in doctor("recorded/scripts/every_rank_saves.py").stdout


@pytest.mark.parametrize("subject", ["nowhere.py", "recorded", "1234", ""])
def test_unknown_subject_is_a_usage_error(folder: Path, subject: str):
    error = doctor(subject).exception
    assert isinstance(error, UsageError) and error.hint


@pytest.mark.parametrize("option", ["--checkpoint", "--dumps"])
def test_folder_that_does_not_exist_is_a_usage_error(folder: Path, option: str):
    error = doctor("recorded/scripts/every_rank_saves.py", option, "nowhere").exception
    assert isinstance(error, UsageError) and error.where == option


def test_run_is_examined_from_its_folder(folder: Path):
    run = make_run(folder / "home/runs", ranks=2)
    write_status(run.status, status(phase=RunPhase.ENDED, exit_code=1, generation=1, world_size=2))
    formed = {"generation": 1, "nodes": ["gpu-1", "gpu-2"], "nproc_per_node": 1}
    journal.append(run.journal, 1.0, RunEvent.GENERATION, **formed)
    run.generation(1).mkdir(parents=True)
    shutil.copy(RECORDED / "cuda-oom.log", run.log(1, 1))
    shutil.copytree(RECORDED / "gloo-hang", run.all_stacks)
    account = Goodput(at=1.0, step=9)
    progress = TrainingProgress(account, {"step_s": 0.2, "data_s": 0.15}, ranks={"0": 1.0, "1": 3.0})
    run.progress.write_text(json.dumps(facts_to_json(progress)))
    result = {each["symptom"]: each for each in json.loads(doctor(run.run, "--json").stdout)["findings"]}
    assert result["out-of-memory"]["evidence"][0]["where"] == "rank 1, line 5"
    assert result["collective-timeout"]["what"].startswith(
        "rank 1 on gpu-2 did not arrive: it is at /home/ada/train.py:6"
    )
    assert "rank 1 on gpu-2 takes 3.0 times as long" in result["slow-rank"]["what"]
    assert "waits for data 75 %" in result["slow-dataloader"]["what"]


def test_symptoms_are_listed(folder: Path):
    rows = doctor("--list").stdout.splitlines()
    assert [row.split()[0] for row in rows[1:]] == [symptom.name for symptom in SYMPTOMS]
