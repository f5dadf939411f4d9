"""Temporary log folders: removed when empty, also after their owner was killed."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from dalsegno.runs.torchrun.logs import TemporaryLogs, sweep

HOLDS = "from dalsegno.runs.torchrun.logs import TemporaryLogs; print(TemporaryLogs().path, flush=True); input()"


@pytest.fixture(autouse=True)
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def killed_holder() -> Path:
    """Return a folder whose owner was killed."""
    holder = subprocess.Popen([sys.executable, "-c", HOLDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    path = Path(holder.stdout.readline().strip())
    sweep()
    assert path.is_dir(), "in use"
    holder.kill()
    holder.communicate()
    return path


def test_folder_of_a_killed_owner_is_swept_by_the_next(there: Path) -> None:
    kept = killed_holder()
    (kept / "stdout.log").write_text("somebody may want this")
    left = killed_holder()
    (left / "run_1").mkdir()
    (left / "run_1" / "error.json").touch()
    (there / "torchelastic_torchs_own").mkdir()
    own = TemporaryLogs()
    assert not left.exists() and kept.exists() and (there / "torchelastic_torchs_own").exists()
    own.close()
    assert not Path(own.path).exists()


def test_folder_with_output_stays_and_unwanted_files_do_not_count() -> None:
    first, second = TemporaryLogs(), TemporaryLogs()
    Path(first.path, "error.json").write_text("{}")
    Path(second.path, "error.json").write_text("{}")
    first.close("error.json")
    second.close()
    assert (Path(first.path).exists(), Path(second.path).exists()) == (False, True)
