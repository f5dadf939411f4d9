"""Tests that `submit` distinguishes job files, sbatch scripts and other files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dalsegno.cli.training.submit import command
from dalsegno.errors import SpecError, UsageError

Submit = Callable[..., Result]


@pytest.fixture
def submit(tmp_path: Path) -> Submit:
    def call(name: str, text: str | None, *words: str) -> Result:
        file = tmp_path / name
        if text is not None:
            file.write_text(text)
        done = CliRunner().invoke(command, [*words, str(file)])
        if done.exception and not isinstance(done.exception, SystemExit):
            raise done.exception
        return done

    return call


def test_file_that_is_neither_job_file_nor_script_is_refused(submit: Submit) -> None:
    with pytest.raises(UsageError, match="is neither a job file nor a script"):
        submit("notes.txt", "hello")
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        submit("gone.sh", None)


def test_invalid_job_file_names_the_line(submit: Submit) -> None:
    with pytest.raises(SpecError) as fault:
        submit("job.yaml", "script: train.py\nnodez: 4\n")
    assert fault.value.where.endswith("job.yaml:2")


def test_unknown_log_level_is_refused_before_slurm_is_asked(submit: Submit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DALSEGNO_LOG_LEVEL", "verbose")
    with pytest.raises(UsageError, match="DALSEGNO_LOG_LEVEL=verbose is not a log level"):
        submit("job.yaml", "script: train.py\n")


def test_job_file_options_are_refused_for_scripts(submit: Submit) -> None:
    with pytest.raises(UsageError, match="are for job files"):
        submit("train.sh", "#!/bin/sh\n", "--dry-run")


def test_a_job_file_takes_no_arguments(tmp_path: Path) -> None:
    (tmp_path / "job.yml").write_text("script: train.py\n")
    done = CliRunner().invoke(command, [str(tmp_path / "job.yml"), "--lr", "1"])
    assert isinstance(done.exception, UsageError)
    assert done.exception.what == "a job file takes no arguments"
