"""The notes of a drill's training: read as they grow, whole lines only."""

from __future__ import annotations

from pathlib import Path

from dalsegno.drill.notes import Notes
from dalsegno.drill.story import Step


def test_lines_are_read_once_and_only_whole(tmp_path: Path):
    notes = Notes(tmp_path / "notes")
    assert notes.read() == [] and notes.last is None
    notes.path.write_text("step 1.5 0 3.25 1\nstep 2.0 1 3.")
    assert notes.read() == [Step(1.5, 0, 3.25, 1)]
    notes.path.write_text("step 1.5 0 3.25 1\nstep 2.0 1 3.0 1\nweights abc\n")
    assert notes.read() == [Step(2.0, 1, 3.0, 1)]
    assert (notes.read(), notes.weights, notes.last) == ([], "abc", Step(2.0, 1, 3.0, 1))
