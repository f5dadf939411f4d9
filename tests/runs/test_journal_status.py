"""The journal and the status file of a run."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dalsegno.runs import journal
from dalsegno.runs.status import NodeRole, RunCause, RunNodeStatus, RunPhase, RunStatus, read_status, write_status

STATUS = RunStatus(
    "train-k3f9x", "train", "ada", RunPhase.RUNNING, created=1.0, updated=2.5, generation=3, restarts=1, wanted_nodes=2,
    world_size=8, nproc_per_node=4,
    nodes=(RunNodeStatus("n1", NodeRole.MEMBER, 0), RunNodeStatus("n2", NodeRole.SPARE)), jobs=(17, 18),
    message="é", started=1.5,
)  # fmt: skip


def test_journal_entries_are_read_in_order(tmp_path: Path):
    path = tmp_path / "journal.jsonl"
    journal.append(path, 1.25, "began", host="head")
    journal.append(path, 2.0, "note", text="line\nbreak é")
    assert list(journal.read(path)) == [
        {"at": 1.25, "event": "began", "host": "head"},
        {"at": 2.0, "event": "note", "text": "line\nbreak é"},
    ]


def test_missing_journal_is_empty(tmp_path: Path):
    assert list(journal.read(tmp_path / "journal.jsonl")) == []


@pytest.mark.parametrize("end", [b'{"at":3,"ev', b"\xff\xfe\n", b"17\n", b"\n\n", b"[1]\n"])
def test_line_cut_off_by_a_crash_is_skipped(tmp_path: Path, end: bytes):
    path = tmp_path / "journal.jsonl"
    journal.append(path, 1.0, "began")
    with path.open("ab") as file:
        file.write(end)
    assert [entry["event"] for entry in journal.read(path)] == ["began"]


def test_entry_after_a_cut_off_line_is_not_lost(tmp_path: Path):
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'{"at":1.0,"event":"began"}\n{"at":3,"ev')
    journal.append(path, 4.0, "came back")
    assert [entry["event"] for entry in journal.read(path)] == ["began", "came back"]


def test_status_survives_the_round_trip(tmp_path: Path):
    write_status(tmp_path / "status.json", STATUS)
    assert read_status(tmp_path / "status.json") == STATUS


def test_status_is_readable_by_everyone(tmp_path: Path):
    write_status(tmp_path / "status.json", STATUS)
    assert (tmp_path / "status.json").stat().st_mode & 0o777 == 0o644


def test_missing_status_is_none(tmp_path: Path):
    assert read_status(tmp_path / "status.json") is None


def test_run_is_over_in_phase_ended():
    assert not STATUS.over and RunStatus(**{**vars(STATUS), "phase": RunPhase.ENDED}).over


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        ("handed over", RunCause.HANDED_OVER),
        ("Slurm refused: Invalid qos specification", RunCause.REFUSED),
        ("cancelled", RunCause.CANCELLED),
        ("cancelled: its cluster was taken down", RunCause.TAKEN_DOWN),
        ("rank 0 on n1 failed: KeyError", RunCause.OTHER),
    ],
)
def test_old_status_without_a_cause_is_read(tmp_path: Path, message: str, cause: RunCause):
    path = tmp_path / "status.json"
    write_status(path, replace(STATUS, message=message))
    old = json.loads(path.read_text())
    del old["cause"]
    path.write_text(json.dumps(old))
    found = read_status(path)
    assert found is not None and found.cause is cause


def test_phases_of_a_later_version_are_unknown(tmp_path: Path):
    path = tmp_path / "status.json"
    write_status(path, STATUS)
    later = json.loads(path.read_text())
    later["phase"], later["cause"], later["nodes"][0]["state"] = "dreaming", "whim", "guest"
    path.write_text(json.dumps(later))
    found = read_status(path)
    assert found is not None
    assert (found.phase, found.cause, found.nodes[0].state) == (RunPhase.UNKNOWN, RunCause.OTHER, NodeRole.UNKNOWN)
