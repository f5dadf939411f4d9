"""What a drill does when its run is over: it waits for nodes that are being repaired."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dalsegno.cli.health.drill_stage import Training
from dalsegno.drill.impacts import RETURNED, DrillMark, FaultImpact, TrainingNotes

BLOW = FaultImpact(1, "xid 79", "n1", 10.0)


@dataclass
class JournalReader:
    """A controller whose node returns when it has been asked for so often; it tells of it in the same moment."""

    returns_after: int
    marks: list[DrillMark] = field(default_factory=list)
    asked: int = 0

    def nodes(self) -> list[dict[str, Any]]:
        self.asked += 1
        return [{"node": "n1", "phase": "validating" if self.asked < self.returns_after else "in service", "note": ""}]

    def listen(self, at_once: bool = False) -> list[DrillMark]:
        new = [DrillMark(30.0, RETURNED, "n1")] if at_once and self.asked == self.returns_after else []
        self.marks += new
        return new


def waited(journal_reader: JournalReader, tmp_path: Path) -> dict[str, str]:
    told: Any = lambda training, marks: None  # noqa: E731
    training = Training(None, TrainingNotes(tmp_path / "notes"), None, journal_reader, 1, told)  # type: ignore[arg-type]
    return training.all_back([BLOW], 10.0, lambda text: None)


def test_a_node_that_is_in_service_again_has_been_heard_to_be(tmp_path: Path) -> None:
    """Its return came between two questions: it is no fault that nobody saw."""
    journal_reader = JournalReader(returns_after=3)
    assert waited(journal_reader, tmp_path) == {}
    assert [mark.what for mark in journal_reader.marks] == [RETURNED] and journal_reader.asked == 3


def test_a_fault_that_the_controller_never_saw_is_not_waited_for(tmp_path: Path) -> None:
    journal_reader = JournalReader(returns_after=0)
    assert waited(journal_reader, tmp_path) == {} and journal_reader.marks == [] and journal_reader.asked == 1
