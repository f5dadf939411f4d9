"""The processes of a benchmark on this machine."""

import os
import signal
from pathlib import Path

import pytest
from click.testing import CliRunner

from dalsegno.cli.measure.bench import ddp, progress_of
from dalsegno.cli.measure.ranks import Rank, run_ranks
from dalsegno.errors import DalsegnoError, UsageError


def shell(script: str) -> Rank:
    return Rank(["/bin/sh", "-c", script], dict(os.environ))


def test_all_processes_are_awaited_and_progress_is_shown(tmp_path: Path):
    said: list[str] = []
    ranks = [shell("exit 0"), shell(f"echo halfway >{tmp_path}/progress")]
    run_ranks(ranks, tmp_path, progress_of(tmp_path, said.append))
    assert [line.strip() for line in said] == ["halfway"]


def test_first_failure_ends_the_other_processes_and_shows_its_output(tmp_path: Path):
    with pytest.raises(DalsegnoError) as caught:
        waits = shell(f"echo $$ >{tmp_path}/pid; exec sleep 600")
        fails = shell(f"until [ -s {tmp_path}/pid ]; do :; done; echo no such device >&2; exit 3")
        run_ranks([waits, fails], tmp_path)
    assert caught.value.what == "rank 1 ended with code 3:\n  no such device"
    pid = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, signal.SIG_DFL)


def test_unwritable_picture_is_refused_before_the_measurement(tmp_path: Path):
    pytest.importorskip("torch")  # without torch, the command fails earlier
    asked = CliRunner().invoke(ddp, ["--timeline", str(tmp_path / "not there" / "step.svg")])
    assert isinstance(asked.exception, UsageError)
    assert asked.exception.where == "--timeline"
