"""Opening targets: from a cluster file's `target`, and from a state folder, whatever is left of it."""

from pathlib import Path

import pytest

from dalsegno.targets.base import ClusterPhase
from dalsegno.targets.registry import open_existing, open_target


def folder_with(home: Path, **files: str) -> Path:
    folder = home / "clusters" / "one"
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / f"{name}.json").write_text(text)
    return folder


@pytest.mark.parametrize("kind", ["ssh", "parallelcluster", "hyperpod", "oci"])
def test_target_is_opened_without_its_sdk_and_without_a_request(kind: str, tmp_path: Path):
    assert open_target(kind, tmp_path / "clusters/one").summary().phase is ClusterPhase.GONE
    assert open_existing(folder_with(tmp_path, state=f'{{"target": "{kind}"}}')).kind == kind


@pytest.mark.parametrize("text", ["{}", "[]", '{"target": 3}', "{", ""])
def test_state_that_names_no_target_is_of_a_local_cluster(text: str, tmp_path: Path):
    assert open_existing(folder_with(tmp_path, state=text)).kind == "local"


def test_applied_file_names_the_target_of_an_older_state(tmp_path: Path):
    assert open_existing(folder_with(tmp_path, state="{}", cluster='{"target": "oci"}')).kind == "oci"


def test_damaged_cluster_can_be_opened_and_summarized(tmp_path: Path):
    assert open_existing(folder_with(tmp_path, state="{")).summary().phase is ClusterPhase.DAMAGED


def test_opening_a_cluster_that_is_not_there_makes_nothing(tmp_path: Path):
    assert open_existing(tmp_path / "clusters/one").summary().phase is ClusterPhase.GONE
    assert list(tmp_path.iterdir()) == []
