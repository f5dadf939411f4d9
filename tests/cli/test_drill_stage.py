"""After its run has ended, a drill waits for nodes that are being repaired."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dalsegno.cli.health.drill_stage import Training
from dalsegno.drill.impacts import DrillMark, DrillMarkKind, FaultImpact, TrainingNotes

IMPACT = FaultImpact(1, "xid 79", "n1", 10.0)


@dataclass
class JournalReader:
    """A controller whose node returns to service at the n-th query.

    The event of the return is available at the same time.
    """

    returns_after: int
    marks: list[DrillMark] = field(default_factory=list)
    asked: int = 0

    def nodes(self) -> list[dict[str, Any]]:
        self.asked += 1
        return [{"node": "n1", "phase": "validating" if self.asked < self.returns_after else "in service", "note": ""}]

    def listen(self, at_once: bool = False) -> list[DrillMark]:
        new = [DrillMark(30.0, DrillMarkKind.RETURNED, "n1")] if at_once and self.asked == self.returns_after else []
        self.marks += new
        return new


def waited(journal_reader: JournalReader, tmp_path: Path) -> dict[str, str]:
    silent: Any = lambda training, marks: None  # noqa: E731
    training = Training(None, TrainingNotes(tmp_path / "notes"), None, journal_reader, 1, silent)  # type: ignore[arg-type]
    return training.all_back([IMPACT], 10.0, lambda text: None)


def test_return_event_is_read_before_the_drill_stops_waiting(tmp_path: Path) -> None:
    """The node returned between two queries, and the event is read before the drill stops waiting."""
    journal_reader = JournalReader(returns_after=3)
    assert waited(journal_reader, tmp_path) == {}
    assert [mark.kind for mark in journal_reader.marks] == [DrillMarkKind.RETURNED] and journal_reader.asked == 3


def test_drill_does_not_wait_for_a_fault_that_the_controller_never_saw(tmp_path: Path) -> None:
    journal_reader = JournalReader(returns_after=0)
    assert waited(journal_reader, tmp_path) == {} and journal_reader.marks == [] and journal_reader.asked == 1
