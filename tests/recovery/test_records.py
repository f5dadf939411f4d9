"""Tests of the records of runs, also of damaged ones."""

import json
import os
from dataclasses import asdict
from pathlib import Path

from dalsegno.recovery.runs.run_records import MAX_ENDED, MAX_ENDED_OF_A_USER, RunRecord, RunRecords
from dalsegno.system.children import start_ticks

ONE = RunRecord("/home/ada/runs/r1", 1001, pid=7, start=99, short_lives=2)


def test_a_record_survives_writing_and_is_private(tmp_path: Path):
    records = RunRecords(tmp_path / "runs")
    assert records.read() == ({}, [])
    records.write(ONE)
    assert records.read() == ({"r1": ONE}, [])
    assert (tmp_path / "runs/r1.json").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "runs").stat().st_mode & 0o777 == 0o700
    records.remove(ONE)
    records.remove(ONE)
    assert records.read() == ({}, [])


def write_ended(folder: Path, record: RunRecord, at: int) -> None:
    (folder / f"ended/{record.run}.json").write_text(json.dumps(asdict(record)))
    os.utime(folder / f"ended/{record.run}.json", (at, at))


def end_run(folder: Path, record: RunRecord) -> dict[str, RunRecord]:
    """Return the records of ended runs after this run has ended."""
    records = RunRecords(folder / "runs")
    records.read()  # creates the folder
    records.write(record)
    records.remove(record)
    assert records.read() == ({}, [])
    return RunRecords(folder / "ended").read()[0]


def test_records_of_ended_runs_are_kept_up_to_a_limit(tmp_path: Path):
    (tmp_path / "ended").mkdir()
    for number in range(MAX_ENDED + 2):
        write_ended(tmp_path, RunRecord(f"/x/old-{number}", number), number)
    left = end_run(tmp_path, ONE)
    assert len(left) == MAX_ENDED and left["r1"] == ONE and "old-0" not in left


def test_records_of_a_user_with_many_ended_runs_displace_only_their_own(tmp_path: Path):
    (tmp_path / "ended").mkdir()
    write_ended(tmp_path, ONE, at=0)
    for number in range(MAX_ENDED_OF_A_USER):
        write_ended(tmp_path, RunRecord(f"/x/many-{number}", 1002), number + 1)
    left = end_run(tmp_path, RunRecord("/x/last", 1002))
    assert len(left) == MAX_ENDED_OF_A_USER + 1
    assert left["r1"] == ONE and "last" in left and "many-0" not in left


def test_damaged_records_are_reported_and_the_others_read(tmp_path: Path):
    records = RunRecords(tmp_path)
    records.write(ONE)
    bad = {"a": "{", "b": "[]", "c": '{"folder": 3, "uid": 1}', "d": "{}", "e": '{"folder": "/r", "uid": true}'}
    for name, text in bad.items():
        (tmp_path / f"{name}.json").write_text(text)
    found, wrong = records.read()
    assert found == {"r1": ONE}
    assert [line.split()[0] for line in wrong] == ["a.json", "b.json", "c.json", "d.json", "e.json"]


def test_unknown_fields_are_ignored(tmp_path: Path):
    (tmp_path / "r2.json").write_text('{"folder": "/x/r2", "uid": 5, "colour": "red"}')
    assert RunRecords(tmp_path).read() == ({"r2": RunRecord("/x/r2", 5)}, [])


def test_a_process_is_identified_by_pid_start_and_owner():
    pid, start = os.getpid(), start_ticks(os.getpid()) or 0
    assert RunRecord("/r", os.geteuid(), pid, start).lives()
    assert not RunRecord("/r", os.geteuid(), pid, start + 1).lives()
    assert not RunRecord("/r", os.geteuid() + 1, pid, start).lives()
    assert not RunRecord("/r", os.geteuid()).lives()
