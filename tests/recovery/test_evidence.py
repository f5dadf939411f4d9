"""Evidence is whole or not there."""

from pathlib import Path

import pytest

from dalsegno.errors import DalsegnoError
from dalsegno.recovery.evidence import MOST_KEPT, save_evidence


def test_a_bundle_is_a_folder_of_files_that_only_root_reads(tmp_path: Path):
    path = save_evidence(tmp_path / "evidence", "gpu-1", {"ps.txt": "1 init\n\ud800", "findings.json": "{}"}, 0.0)
    assert path == tmp_path / "evidence/gpu-1/19700101T000000Z"
    assert sorted(each.name for each in path.iterdir()) == ["findings.json", "ps.txt"]
    assert (path / "ps.txt").read_text() == "1 init\n?" and path.stat().st_mode & 0o077 == 0


def test_a_name_cannot_lead_elsewhere(tmp_path: Path):
    path = save_evidence(tmp_path / "e", "gpu-1", {"../../x": "text"}, 0.0)
    assert [each.name for each in path.iterdir()] == ["x"] and not (tmp_path / "x").exists()


def test_the_same_second_again_and_what_a_crash_has_left_are_fine(tmp_path: Path):
    (tmp_path / "gpu-1/.19700101T000000Z.1.tmp").mkdir(parents=True)
    for text in ("first", "second"):
        path = save_evidence(tmp_path, "gpu-1", {"a": text}, 0.0)
    assert (path / "a").read_text() == "second"
    assert [each.name for each in (tmp_path / "gpu-1").iterdir()] == [path.name]


def test_old_bundles_go(tmp_path: Path):
    for second in range(MOST_KEPT + 3):
        save_evidence(tmp_path, "gpu-1", {"a": ""}, float(second))
    assert sorted(each.name for each in (tmp_path / "gpu-1").iterdir())[0] == "19700101T000003Z"
    assert len(list((tmp_path / "gpu-1").iterdir())) == MOST_KEPT


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DalsegnoError):
        save_evidence(tmp_path / "file", "gpu-1", {}, 0.0)
