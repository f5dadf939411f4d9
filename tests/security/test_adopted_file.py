"""The cluster file of `adopt watch` decides which nodes are drained.

Root does not use a file that others can change.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from dalsegno.cli.cluster.adopt import command
from dalsegno.errors import DalsegnoError

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="to act as another user takes root")


@pytest.mark.parametrize("open_to_others", ["file", "folder", "mode"])
def test_root_watches_with_no_file_that_others_can_change(tmp_path: Path, monkeypatch, open_to_others: str):
    monkeypatch.delenv("SUDO_UID", raising=False)
    folder = tmp_path / "work"
    folder.mkdir(mode=0o755)
    file = folder / "cluster.yaml"
    file.write_text("name: broken")  # the file is not even read
    if open_to_others == "mode":
        folder.chmod(0o777)
    else:
        os.chown(file if open_to_others == "file" else folder, 54321, 54321)
    failure = CliRunner().invoke(command, ["watch", str(file)]).exception
    assert isinstance(failure, DalsegnoError) and "other users can change" in failure.what


def test_root_watches_with_a_file_of_its_own(tmp_path: Path):
    file = tmp_path / "cluster.yaml"
    file.write_text("name: broken")
    failure = CliRunner().invoke(command, ["watch", str(file)]).exception
    assert isinstance(failure, Exception) and "other users can change" not in str(failure)
