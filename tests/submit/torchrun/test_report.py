"""torchrun's report of a failed worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from dalsegno.runs.torchrun.agent import FailedWorker, pass_on, render_report


def test_report_has_the_layout_of_torchrun() -> None:
    root = FailedWorker(3, 1, 4711, 1, 0.0, "/l/error.json", "Traceback:\nValueError: bad")
    other = FailedWorker(2, 0, 4710, -9, 0.0)
    lines = render_report("train.py", "gpu-1", root, [other]).splitlines()
    assert lines[:4] == ["=" * 53, "train.py FAILED", "-" * 53, "Failures:"]
    assert lines[4:] == [
        "[1]:",
        lines[5],
        "  host      : gpu-1",
        "  rank      : 2 (local_rank: 0)",
        "  exitcode  : -9 (pid: 4710)  (SIGKILL)",
        "  error_file: <N/A>",
        "  traceback : Signal 9 (SIGKILL) received by PID 4710",
        "-" * 53,
        "Root Cause (first observed failure):",
        "[0]:",
        lines[5],
        "  host      : gpu-1",
        "  rank      : 3 (local_rank: 1)",
        "  exitcode  : 1 (pid: 4711) ",
        "  error_file: /l/error.json",
        "  traceback : Traceback:",
        "  ValueError: bad",
        "=" * 53,
    ]


def test_report_equals_that_of_torch(tmp_path: Path) -> None:
    errors = pytest.importorskip("torch.distributed.elastic.multiprocessing.errors")
    theirs = errors.ProcessFailure(local_rank=1, pid=4711, exitcode=-9, error_file=str(tmp_path / "none"))
    ours = FailedWorker(3, 1, 4711, -9, theirs.timestamp)
    import socket

    said = str(errors.ChildFailedError("train.py", {3: theirs})).strip()
    assert render_report("train.py", socket.getfqdn(), ours) == said


def test_only_error_files_of_a_plausible_size_are_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = tmp_path / "error.json", tmp_path / "of_the_parent.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(theirs))
    with ours.open("wb") as file:
        file.truncate(1 << 30)
    pass_on(str(ours))
    assert not theirs.exists()
    ours.write_text("{}")
    pass_on(str(ours))
    assert theirs.read_text() == "{}"
