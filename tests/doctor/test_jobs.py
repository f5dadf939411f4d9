"""`doctor` and `why` on jobs, with a Slurm that answers from a table: output files, old records, failed jobs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from dalsegno.doctor.case import Case
from dalsegno.doctor.gather import DoctorOrder, gather_job
from dalsegno.slurm.client import SlurmClient
from dalsegno.slurm.facts import JobInfo, JobState
from dalsegno.slurm.parse.outputs import expand_name, with_output_files
from dalsegno.system.processes import Completed
from dalsegno.why import explain_job
from tests.slurm.test_client import Slurm, recorded

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
