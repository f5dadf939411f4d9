"""Tests of saving evidence atomically."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from dalsegno.errors import DalsegnoError
from dalsegno.recovery.act import ActionContext, do
from dalsegno.recovery.decisions.actions import TakeEvidence
from dalsegno.recovery.fakes import FakeAgents, FakeCluster, FakeSlurm
from dalsegno.recovery.journal.evidence import INCOMPLETE, MAX_KEPT, save_evidence


def test_a_bundle_is_a_private_folder_of_files(tmp_path: Path):
    path = save_evidence(tmp_path / "evidence", "gpu-1", {"ps.txt": "1 init\n\ud800", "findings.json": "{}"}, 0.0)
    assert path == tmp_path / "evidence/gpu-1/19700101T000000Z"
    assert sorted(each.name for each in path.iterdir()) == ["findings.json", "ps.txt"]
    assert (path / "ps.txt").read_text() == "1 init\n?" and path.stat().st_mode & 0o077 == 0


def test_file_names_cannot_leave_the_bundle(tmp_path: Path):
    path = save_evidence(tmp_path / "e", "gpu-1", {"../../x": "text"}, 0.0)
    assert [each.name for each in path.iterdir()] == ["x"] and not (tmp_path / "x").exists()


def test_bundles_of_one_second_are_numbered_and_leftovers_removed(tmp_path: Path):
    (tmp_path / "gpu-1/.19700101T000000Z.1.tmp").mkdir(parents=True)
    for text in ("first", "second", "third"):
        save_evidence(tmp_path, "gpu-1", {"a": text}, 0.0)
    found = {each.name: (each / "a").read_text() for each in (tmp_path / "gpu-1").iterdir()}
    assert found == {"19700101T000000Z": "first", "19700101T000000Z-2": "second", "19700101T000000Z-3": "third"}


def test_a_repeated_action_replaces_only_its_own_bundle(tmp_path: Path):
    for action, text in (("a1", "cut short"), ("a2", "another"), ("a1", "whole")):
        save_evidence(tmp_path, "gpu-1", {"a": text}, 0.0, action)
    found = {each.name: (each / "a").read_text() for each in (tmp_path / "gpu-1").iterdir()}
    assert found == {"19700101T000000Z": "whole", "19700101T000000Z-2": "another"}


OWN = ("action.txt", "report.json", "slurm.txt", "jobs.txt")  # what the controller adds


class Silent:
    """A target without any capability."""


class Asked(Silent):
    def __init__(self, *found: Mapping[str, str] | Exception) -> None:
        self.found = list(found)

    def read_logs(self, node: str) -> Mapping[str, str]:
        found = self.found.pop()
        if isinstance(found, Exception):
            raise found
        return found


AGENT = "agent: its agent is not connected\n"


@pytest.mark.parametrize(
    ("target", "gaps", "files"),
    [
        (Silent(), f"{AGENT}machine: this target keeps no logs of a node that does not answer\n", set()),
        (Asked({}), f"{AGENT}machine: the target has no logs of it\n", set()),
        (Asked(DalsegnoError("no disk", hint="-")), f"{AGENT}machine: no disk\n", set()),
        (Asked({"console.log": "panic"}), AGENT, {"console.log"}),
    ],
)
def test_the_bundle_of_a_lost_node_says_what_is_missing_and_why(
    tmp_path: Path, target: object, gaps: str, files: set[str]
):
    cluster = FakeCluster.of(2)
    cluster.power_off("n1")
    context = ActionContext(FakeSlurm(cluster), FakeAgents(cluster), target, tmp_path)
    do(TakeEvidence("n1"), "id", 0.0, context)
    bundle = tmp_path / "n1/19700101T000000Z"
    assert (bundle / INCOMPLETE).read_text() == gaps
    assert {each.name for each in bundle.iterdir()} == {INCOMPLETE, *OWN, *files}


def test_a_complete_bundle_reports_nothing_missing(tmp_path: Path):
    cluster = FakeCluster.of(2)
    do(TakeEvidence("n1"), "id", 0.0, ActionContext(FakeSlurm(cluster), FakeAgents(cluster), Silent(), tmp_path))
    names = {each.name for each in (tmp_path / "n1/19700101T000000Z").iterdir()}
    assert names == {"dmesg.txt", *OWN}


def test_old_bundles_are_removed(tmp_path: Path):
    for second in range(MAX_KEPT + 3):
        save_evidence(tmp_path, "gpu-1", {"a": ""}, float(second))
    assert sorted(each.name for each in (tmp_path / "gpu-1").iterdir())[0] == "19700101T000003Z"
    assert len(list((tmp_path / "gpu-1").iterdir())) == MAX_KEPT


def test_an_unwritable_folder_is_an_error(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DalsegnoError):
        save_evidence(tmp_path / "file", "gpu-1", {}, 0.0)
