"""Changes that the journal writes together."""

from __future__ import annotations

from pathlib import Path

import pytest

from dalsegno.recovery.decisions.actions import ChangePhase
from dalsegno.recovery.decisions.phase import NodePhase
from dalsegno.recovery.journal.store import Journal

NODES = [f"n{number}" for number in range(50)]


class CountingJournal(Journal):
    commits = 0

    def commit(self) -> None:
        self.commits += 1
        super().commit()


def suspect(store: Journal, node: str) -> None:
    store.record_change(ChangePhase(node, NodePhase.SUSPECTED, "its agent is silent"), now=7.0)


def phases(store: Journal) -> dict[str, NodePhase]:
    return {name: node.phase for name, node in store.records.nodes.items()}


def test_changes_that_are_written_together_are_one_transaction(tmp_path: Path):
    store = CountingJournal(tmp_path / "journal")
    with store.together():
        for node in NODES:
            suspect(store, node)
            assert phases(store)[node] is NodePhase.SUSPECTED
    assert store.commits == 1
    read_again = Journal(tmp_path / "journal")
    assert phases(read_again) == dict.fromkeys(NODES, NodePhase.SUSPECTED)
    assert [event.node for event in read_again.events()] == NODES


def test_no_change_is_kept_if_one_of_them_fails(tmp_path: Path):
    store = Journal(tmp_path / "journal")
    suspect(store, "before")
    with pytest.raises(ZeroDivisionError), store.together():
        suspect(store, "n0")
        raise ZeroDivisionError
    suspect(store, "after")
    for each in (store, Journal(tmp_path / "journal")):
        assert set(phases(each)) == {"before", "after"}
        assert [event.node for event in each.events()] == ["before", "after"]


def test_nothing_is_committed_without_a_change(tmp_path: Path):
    store = CountingJournal(tmp_path / "journal")
    with store.together():
        pass
    assert store.commits == 0
