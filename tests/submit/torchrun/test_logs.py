"""The output of a torchrun's workers, and what is shown of it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from dalsegno.runs.torchrun.args import TorchrunArgs
from dalsegno.runs.torchrun.logs import Logs, Tee, WorkerTail


@pytest.mark.parametrize(
    ("flags", "output", "log"),
    [
        ({}, ["", ""], ["", ""]),
        ({"redirects": "3"}, ["stdout.log"] * 2, ["stderr.log"] * 2),
        ({"redirects": "0:1,1:2"}, ["stdout.log", ""], ["", "stderr.log"]),
        ({"local_ranks_filter": "0"}, ["", "null"], ["", "null"]),
        ({"local_ranks_filter": "0", "redirects": "1"}, ["stdout.log"] * 2, ["", "null"]),
        ({"tee": "1:3"}, ["", "stdout.log"], ["", "stderr.log"]),
        ({"log_dir": os.devnull, "redirects": "3"}, ["", ""], ["", ""]),
    ],
)
def test_log_files_of_each_rank(tmp_path: Path, flags: dict[str, str], output: list[str], log: list[str]) -> None:
    logs = Logs(TorchrunArgs("t.py", **{"log_dir": str(tmp_path / "logs"), **flags}), "job/7", Tee(lambda *_: None))  # type: ignore[arg-type]
    found = [logs.files(2, local, 10 + local) for local in range(2)]
    logs.close(ended_well=True)
    assert [Path(each["output"]).name for each in found] == output
    assert [Path(each["log"]).name for each in found] == log
    if "log_dir" not in flags:
        folder = Path(found[1]["error_file"]).relative_to(tmp_path / "logs")
        assert folder.parts[0].startswith("job_7_") and folder.parts[1:] == ("attempt_2", "1", "error.json")


@pytest.mark.parametrize(
    ("wrote", "ended_well", "stays"),
    [("", True, False), ("output", True, True), ("error_file", True, False), ("error_file", False, True)],
)
def test_temporary_folder_stays_only_if_it_has_output(wrote: str, ended_well: bool, stays: bool) -> None:
    logs = Logs(TorchrunArgs("t.py", redirects="1"), "none", Tee(lambda *_: None))
    files = logs.files(0, 0, 0)
    if wrote:
        Path(files[wrote]).write_text("something")
    logs.close(ended_well)
    root = Path(files["output"]).parents[3]
    assert root.exists() is stays
    shutil.rmtree(root, ignore_errors=True)


def test_teed_lines_are_prefixed_and_filtered(tmp_path: Path) -> None:
    shown: list[tuple[int, bytes]] = []
    tee = Tee(lambda stream, data: shown.append((stream, data)))
    log, kept = tmp_path / "log", tmp_path / "kept"
    tee.follow(str(log), WorkerTail(b"[default1]:", 2, str(kept), (b"loss",)))
    tee.follow(str(tmp_path / "never written"), WorkerTail(b"", 1))
    log.write_bytes(b"step 1\nloss 0.5\nend")
    tee.close()
    assert {stream for stream, _ in shown} == {2}
    assert b"".join(data for _, data in shown) == b"[default1]:step 1\n[default1]:loss 0.5\n[default1]:end\n"
    assert kept.read_bytes() == b"[default1]:loss 0.5\n"
