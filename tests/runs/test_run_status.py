"""The status of a run, from what its coordinator knows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dalsegno.runs import journal
from dalsegno.runs.coordinator.generations.causes import read_failure
from dalsegno.runs.coordinator.generations.generations import GenerationPhase, Run
from dalsegno.runs.coordinator.generations.group import Shape, form_group
from dalsegno.runs.coordinator.reports.report import RunFacts, StatusWriter
from dalsegno.runs.folder import RunFolder
from dalsegno.runs.status import RunPhase, RunStatus, read_status
from tests.runs.small_site import SmallSite

SHAPE = Shape(2, 2, 1)
READY = ("n1", "n2", "n3")
RUNS = Run(SHAPE, phase=GenerationPhase.RUNNING, generation=1, ready=READY, group=form_group(1, SHAPE, READY))
FAILED = replace(RUNS, phase=GenerationPhase.STOPPING, failures=(read_failure(1, "n2", 1, "ValueError: x"),))


def known(run: Run, *, waits: bool = False, coming: tuple[str, ...] = ()) -> RunFacts:
    return RunFacts(
        run, started=1.0, ending=run.exit_code is not None, present=frozenset(run.ready),
        waits=waits, coming=frozenset(coming),
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def write_and_read(folder: RunFolder, facts: RunFacts) -> RunStatus:
    StatusWriter(SmallSite(folder)).status(facts)
    status = read_status(folder.status)
    assert status is not None
    return status


def test_phase_is_stopping_until_the_restart_is_decided(folder: RunFolder):
    assert write_and_read(folder, known(RUNS)).phase is RunPhase.RUNNING
    assert write_and_read(folder, known(FAILED)).phase is RunPhase.STOPPING
    assert (
        write_and_read(folder, known(replace(FAILED, phase=GenerationPhase.GATHERING, failures=()))).phase
        is RunPhase.RESTARTING
    )
    assert (
        write_and_read(folder, known(replace(FAILED, phase=GenerationPhase.ENDED, exit_code=1))).phase
        is RunPhase.ENDING
    )


def test_phase_is_restarting_after_a_lost_node(folder: RunFolder):
    assert (
        write_and_read(folder, known(replace(RUNS, phase=GenerationPhase.STOPPING, lost_member=True))).phase
        is RunPhase.RESTARTING
    )


def test_gathering_run_shows_what_it_waits_for(folder: RunFolder):
    gathers = replace(RUNS, phase=GenerationPhase.GATHERING, ready=("n1",))
    assert write_and_read(folder, known(gathers, waits=True)).message == "waiting for 1 more node from Slurm"
    assert (
        write_and_read(folder, known(gathers, waits=True, coming=("n1", "n3"))).message == "waiting for n3 to be ready"
    )
    begins = replace(gathers, generation=0, group=None)
    assert write_and_read(folder, known(begins, waits=True, coming=("n1", "n3"))).message == "", (
        "starting agents need no message"
    )
    assert write_and_read(folder, known(begins, waits=True)).message == "waiting for 1 more node from Slurm"


def test_status_says_whether_its_message_is_a_note(folder: RunFolder):
    writer = StatusWriter(SmallSite(folder))
    writer.note("n1 has threads")
    writer.status(known(RUNS))
    noted = read_status(folder.status)
    assert noted is not None and noted.message == "n1 has threads" and noted.note_at is not None
    writer.status(known(replace(RUNS, phase=GenerationPhase.GATHERING, ready=("n1",)), waits=True))
    waits = read_status(folder.status)
    assert waits is not None and waits.message == "waiting for 1 more node from Slurm" and waits.note_at is None


@pytest.mark.parametrize(("node", "was"), [("n1", "member"), ("n3", "spare"), ("n4", "starting")])
def test_lost_node_is_journaled_with_its_role(folder: RunFolder, node: str, was: str):
    StatusWriter(SmallSite(folder)).lost(RUNS, node, "its agent is gone")
    (entry,) = journal.read(folder.journal)
    assert (entry["event"], entry["node"], entry["was"]) == ("lost", node, was)
