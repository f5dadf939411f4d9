"""`doctor` and `why` on jobs, with a Slurm that answers from a table: output files, old records, failed jobs."""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from dalsegno.doctor import Severity, examine
from dalsegno.doctor.case import Case
from dalsegno.doctor.gather import DoctorOrder, gather_job
from dalsegno.errors import NotThere
from dalsegno.slurm.client import SlurmClient
from dalsegno.slurm.facts import JobInfo, JobState
from dalsegno.slurm.parse.outputs import expand_name, with_output_files
from dalsegno.system.processes import Completed
from dalsegno.why import explain_job
from tests.slurm.test_client import Slurm, fails, recorded

ARRAY_TASK = JobInfo(43, "train", "ada", JobState.FAILED, array_id=40, array_task="3", batch_host="n1.lab", batch=True)
SINGLE = JobInfo(23, "train", "ada", JobState.FAILED, batch=True, work_dir="/home/ada")


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("j-%j.out", "j-43.out"),
        ("%x_%A_%a.out", "train_40_3.out"),
        ("%5j-%03a-%b.out", "00043-003-3.out"),
        ("%u/%N-%n-%t-%s-%J.out", "ada/n1-0-0-batch-43.out"),
        ("100%%-%4x-%q.out", "100%-train-%q.out"),
        ("%99j.out", "0000000043.out"),
        (r"\j-%j.out", "j-%j.out"),
        ("plain.out", "plain.out"),
    ],
)
def test_patterns_in_output_names_are_replaced_as_slurm_does(name: str, path: str):
    assert expand_name(ARRAY_TASK, name) == path


def test_output_files_are_in_the_working_folder_and_have_slurms_default_name():
    named = with_output_files(JobInfo(23, "x", "ada", JobState.FAILED, batch=True, work_dir="/w", stdout="j-%j.out"))
    assert (named.stdout, named.stderr) == ("/w/j-23.out", "/w/j-23.out")
    assert with_output_files(SINGLE).stdout == "/home/ada/slurm-23.out"
    assert with_output_files(ARRAY_TASK).stdout == "/slurm-40_3.out"
    assert with_output_files(JobInfo(7, "x", "ada", JobState.FAILED, work_dir="/w")).stdout == "", "a job of srun"


@dataclass(frozen=True)
class Access:
    client: SlurmClient
    env: Mapping[str, str]


def queued(folder: Path, *, state: str = "FAILED", code: str = "768", batch: str = "1", **more: str) -> str:
    """Return squeue's recorded answer for one job of this user, changed to this state."""
    *facts, name, comment, _, _, _, _ = recorded("squeue-one").rstrip("\n").rstrip("\x1e").split("\x1f")
    facts[5], facts[10], facts[23], facts[25] = str(os.geteuid()), state, code, batch
    facts[11] = more.get("reason", "NonZeroExitCode")
    paths = (str(folder), more.get("command", "(null)"), more.get("stdout", "(null)"), "(null)")
    return "\x1f".join((*facts, name, comment, *paths)) + "\x1e\n"


def examined(answers: Mapping[str, str | Completed]) -> Case:
    slurm = Slurm({"SubmitLine": "", **answers})
    order = DoctorOrder(Access(SlurmClient(slurm, {}), {}), slurm, {})
    return gather_job("5", order)


def test_output_with_a_pattern_in_its_name_is_read(tmp_path: Path):
    (tmp_path / "j-5.out").write_text("MemoryError\n")
    case = examined({"squeue": queued(tmp_path, stdout="j-%j.out")})
    assert [sign.where for sign in case.signs] == [f"{tmp_path}/j-5.out:1"] and case.unchecked == ()


def test_command_that_shows_the_output_names_the_file_and_not_the_pattern(tmp_path: Path):
    slurm = SlurmClient(Slurm({"squeue": queued(tmp_path, stdout=f"{tmp_path}/logs-%x_%j.out")}), {})
    assert explain_job(slurm.job(5)).next == f"tail {tmp_path}/logs-mixed_5.out"


# Failures of unknown cause


def test_failed_job_of_unknown_cause_is_not_called_healthy(tmp_path: Path):
    (tmp_path / "slurm-5.out").write_text("Traceback (most recent call last):\n  x\nZeroDivisionError: by 0\n")
    ((symptom, finding),) = examine(examined({"squeue": queued(tmp_path)}))
    assert (symptom.name, finding.severity) == ("unknown-failure", Severity.ERROR)
    assert finding.what == "job 5 failed with exit code 3; no known cause found"
    assert [each.text for each in finding.evidence] == ["ZeroDivisionError: by 0"]
    assert f"tail {tmp_path}/slurm-5.out" in finding.fix


def test_failed_job_without_output_has_its_state_as_evidence(tmp_path: Path):
    ((_, finding),) = examine(examined({"squeue": queued(tmp_path)}))
    assert [each.text for each in finding.evidence] == ["FAILED"] and "sacct -j 5" in finding.fix


def test_known_cause_replaces_the_unknown_one(tmp_path: Path):
    (tmp_path / "slurm-5.out").write_text("RuntimeError: Address already in use\n")
    assert [each.name for each, _ in examine(examined({"squeue": queued(tmp_path)}))] == ["port-in-use"]


def test_completed_job_whose_output_ends_with_an_error_is_a_warning(tmp_path: Path):
    (tmp_path / "slurm-5.out").write_text("Traceback (most recent call last):\n  x\nKeyError: 'lr'\n")
    ((_, finding),) = examine(examined({"squeue": queued(tmp_path, state="COMPLETED", code="0")}))
    assert finding.severity is Severity.WARNING and "exit code 0, but" in finding.what


def test_cancelled_job_did_not_fail(tmp_path: Path):
    (tmp_path / "slurm-5.out").write_text("slurmstepd: error: *** JOB 5 ON n1 CANCELLED AT 2026-11-18T12:00:00 ***\n")
    assert examine(examined({"squeue": queued(tmp_path, state="CANCELLED", code="15")})) == []


# Records that slurmctld has dropped


FORGOTTEN = fails(recorded("job-missing.stderr"))


def accounted(folder: Path, line: str, code: str = "3:0") -> Mapping[str, str | Completed]:
    """Return the answers of a Slurm that knows job 5 only from the accounting database."""
    rows = recorded("sacct").split("\x1f\n")
    values = rows[0].split("\x1f")
    values[0:3], values[5], values[19] = ["5", "5", pwd.getpwuid(os.geteuid()).pw_name], "FAILED", code
    return {
        "SubmitLine": f"{folder}|{line}\n",
        "--parsable --delimiter": "\x1f".join(values) + "\x1f\n",
        "JobName": "",
        "squeue": FORGOTTEN,
    }


def test_old_job_is_examined_from_the_accounting_database(tmp_path: Path):
    (tmp_path / "j-5.out").write_text("step 1\n")
    case = examined(accounted(tmp_path, "sbatch -o j-%j.out job.sh"))
    assert case.job is not None and case.job.stdout == f"{tmp_path}/j-5.out"
    ((_, finding),) = examine(case)
    assert finding.what == "job 5 failed with exit code 3; no known cause found"
    assert [each.text for each in finding.evidence] == ["step 1"], "the last lines"


def test_old_job_without_a_named_output_has_slurms_default_file(tmp_path: Path):
    job = examined(accounted(tmp_path, "sbatch job.sh")).job
    assert job is not None and job.stdout == f"{tmp_path}/slurm-5.out"


def test_output_that_the_batch_script_of_an_old_job_names_is_read(tmp_path: Path):
    (tmp_path / "job.sh").write_text("#!/bin/sh\n#SBATCH -o mine-%j.log\ntrue\n")
    (tmp_path / "mine-5.log").write_text("MemoryError\n")
    case = examined({"partition": fails("down"), "sinfo": fails("down"), **accounted(tmp_path, "sbatch job.sh")})
    assert [sign.where for sign in case.signs] == [f"{tmp_path}/mine-5.log:1"]


def test_job_that_slurm_has_forgotten_is_an_error_that_names_the_log(tmp_path: Path):
    with pytest.raises(NotThere, match="Slurm has no record of job 5 any more") as error:
        examined({"sacct": fails("Slurm accounting storage is disabled\n"), "squeue": FORGOTTEN})
    assert "dalsegno doctor slurm-5.out" in error.value.hint


# Jobs of srun, and jobs that could not start


def test_options_of_srun_are_not_taken_for_arguments_of_a_script(tmp_path: Path):
    line = f"{tmp_path}|srun -J x --chdir=/tmp/ns --nodes=2 hostname\n"
    row = queued(tmp_path, state="COMPLETED", code="0", batch="0", command="/usr/bin/hostname")
    case = examined({"SubmitLine": line, "squeue": row})
    assert (case.words, examine(case)) == ((), [])
    assert case.unchecked == (
        "the job's output: srun and salloc write to their terminal; if it was saved, give the file",
    )


def test_missing_folder_of_the_output_explains_a_job_that_could_not_start(tmp_path: Path):
    # squeue 22.05 prints 4021 where scontrol prints 0:53.
    case = examined({"squeue": queued(tmp_path, code="4021", stdout="logs/%j.out", reason="JobLaunchFailure")})
    ((symptom, finding),) = examine(case)
    assert (symptom.name, finding.fix) == ("output-folder", f"mkdir -p {tmp_path}/logs")
    assert case.job is not None and "cannot create its output file" in explain_job(case.job).sentence
