"""Tests of reading the notes of a drill's training while they grow."""

from __future__ import annotations

from pathlib import Path

from dalsegno.drill.impacts import TrainedStep, TrainingNotes


def test_only_complete_lines_are_read_and_each_once(tmp_path: Path):
    notes = TrainingNotes(tmp_path / "notes")
    assert notes.read() == [] and notes.last is None
    notes.path.write_text("step 1.5 0 3.25 1\nstep 2.0 1 3.")
    assert notes.read() == [TrainedStep(1.5, 0, 3.25, 1)]
    notes.path.write_text("step 1.5 0 3.25 1\nstep 2.0 1 3.0 1\nweights abc\n")
    assert notes.read() == [TrainedStep(2.0, 1, 3.0, 1)]
    assert (notes.read(), notes.weights, notes.last) == ([], "abc", TrainedStep(2.0, 1, 3.0, 1))


def test_a_late_step_of_a_lost_node_is_not_the_newest(tmp_path: Path):
    notes = TrainingNotes(tmp_path / "notes")
    notes.path.write_text("step 1.0 39 3.0 1\nstep 2.0 35 3.0 2\nstep 2.1 40 3.0 1\n")
    assert len(notes.read()) == 3 and notes.last == TrainedStep(2.0, 35, 3.0, 2)
