"""The page of a drill: where it may be written, and where reports are kept."""

from __future__ import annotations

import os
from pathlib import Path
from threading import Thread

import pytest

from dalsegno.cli.health.drill import KEPT_REPORTS, check_page, keep_report, write_page
from dalsegno.errors import DalsegnoError, UsageError


def test_page_replaces_a_file_but_not_a_pipe(tmp_path: Path):
    page, pipe = tmp_path / "page.html", tmp_path / "pipe"
    write_page(page, "first")
    write_page(page, "second")
    assert page.read_text() == "second"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    write_page(pipe, "told")
    reader.join(60)
    assert read == ["told"] and pipe.is_fifo()


def test_unusable_path_for_the_page_is_refused_before_the_drill(tmp_path: Path):
    check_page(tmp_path / "page.html")
    check_page(Path("/dev/null"))
    with pytest.raises(UsageError, match="there is no folder") as refused:
        check_page(tmp_path / "no" / "page.html")
    assert "--report" in refused.value.hint
    with pytest.raises(UsageError, match="the report cannot be written to /proc/page"):
        check_page(Path("/proc/page.html"))
    with pytest.raises(UsageError, match="it is a folder"):
        check_page(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_check_of_a_pipe_neither_blocks_nor_disturbs_its_reader(tmp_path: Path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    check_page(pipe)
    read: list[str] = []
    reader = Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    with pipe.open("w") as held:  # returns when the reader has opened the pipe
        check_page(pipe)
        held.write("told")
    reader.join(60)
    assert read == ["told"]


def test_folder_that_is_gone_at_the_end_is_an_error_with_a_hint(tmp_path: Path):
    with pytest.raises(DalsegnoError, match="the report cannot be written to") as refused:
        write_page(tmp_path / "gone" / "page.html", "told")
    assert "--report" in refused.value.hint


def test_reports_are_kept_with_the_cluster_up_to_a_limit(tmp_path: Path):
    for number in range(KEPT_REPORTS + 2):
        keep_report(tmp_path / "drills", f"page {number}", {"started": 1e9 + number, "seed": 7, "survived": True})
    pages = sorted((tmp_path / "drills").glob("*.html"))
    assert len(pages) == KEPT_REPORTS and len(list((tmp_path / "drills").glob("*.json"))) == KEPT_REPORTS
    assert pages[-1].read_text() == f"page {KEPT_REPORTS + 1}"
    assert pages[-1].stat().st_mode & 0o777 == 0o600
    (tmp_path / "file").write_text("")
    # A folder that cannot be created is not an error.
    keep_report(tmp_path / "file", "page", {"started": 0.0, "seed": 7})
