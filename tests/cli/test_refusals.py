"""Tests of the hints after Slurm refused a job."""

from __future__ import annotations

from pathlib import Path

import pytest

from dalsegno.cli.training.follow import end_hint
from dalsegno.runs import journal
from dalsegno.runs.journal import RunEvent
from dalsegno.runs.status import RunCause
from tests.cli.runs import make_run, status

MEMORY = """salloc: error: Memory specification can not be satisfied
salloc: error: Job submit/allocate failed: Requested node configuration is not available
"""


@pytest.mark.parametrize(
    ("message", "hint"),
    [
        (MEMORY, "--mem"),
        ("salloc: error: Job submit/allocate failed: Invalid feature specification\n", "--constraint"),
        ("salloc: error: Job submit/allocate failed: Invalid node name specified\n", "--exclude"),
        ("salloc: error: something quite new\n", "salloc-1.log"),
    ],
)
def test_hint_matches_slurm_refusal(tmp_path: Path, message: str, hint: str) -> None:
    run = make_run(tmp_path)
    run.salloc_log(1).write_text(message)
    assert hint in end_hint(run, status(message="Slurm refused: see above", cause=RunCause.REFUSED))


def test_hint_for_other_failures_names_logs_if_any(tmp_path: Path) -> None:
    run, failed = make_run(tmp_path), status(message="rank 0 ended with exit code 3")
    assert end_hint(run, failed) == "`dalsegno why train-k3f9x` shows what happened"
    run.generation(1).mkdir(parents=True)
    (run.generation(1) / "rank0.log").write_text("oh\n")
    assert end_hint(run, failed) == "`dalsegno logs train-k3f9x` shows its output"


def test_hint_names_the_doctor_if_it_knows_the_error(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    report = "Traceback (most recent call last):\nModuleNotFoundError: No module named 'torch'\n"
    hint = "run `dalsegno doctor train-k3f9x`: it knows this error and how to fix it"
    assert end_hint(run, status(report=report, message="rank 0 failed")) == hint
    assert end_hint(run, status(report="ValueError: 3", message="rank 0 failed")) != hint
    journal.append(run.journal, 1.0, RunEvent.HUNG, generation=1, text="rank 1 did not arrive")
    assert end_hint(run, status(report="ValueError: 3", message="rank 0 failed")) == hint
