"""Tests of requests about nodes and automation, also over the controller's real socket."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dalsegno.errors import DalsegnoError
from dalsegno.health import GpuIdentity, Remedy, Verdict
from dalsegno.recovery.answers import Answers
from dalsegno.recovery.client import ask
from dalsegno.recovery.controller import SOCKET, Controller
from dalsegno.recovery.decisions.actions import ChangePhase, Drain, Note, Repair
from dalsegno.recovery.decisions.facts import NodeFault
from dalsegno.recovery.decisions.phase import HeldAction, NodePhase
from dalsegno.recovery.decisions.policy import Policy
from dalsegno.recovery.decisions.records import DAY_S
from dalsegno.recovery.journal.event import EventKind
from dalsegno.recovery.journal.store import Journal
from dalsegno.recovery.runs.run_hints import CheckChange
from dalsegno.recovery.watch import JOURNAL
from dalsegno.wire.frames import Message

XID = NodeFault("xid", Remedy.REBOOT, "Xid 79", "79")
STRANGER = 4711


@pytest.fixture
def folder() -> Iterator[Path]:
    root = Path(tempfile.mkdtemp(prefix="ds-", dir="/tmp"))
    (root / "controller").mkdir()
    (root / "run").mkdir()
    yield root
    shutil.rmtree(root)


@pytest.fixture
def store(folder: Path) -> Iterator[Journal]:
    one = Journal(folder / JOURNAL)
    yield one
    one.close()


@pytest.fixture
def answers(folder: Path) -> Iterator[Answers]:
    one = Answers(folder / JOURNAL, lambda: None)
    yield one
    one.close()


def drained(store: Journal, node: str, at: float) -> None:
    action = Drain(node, XID)
    store.end(store.begin(action, at), action, "drained: xid[79] Xid 79", "", at, Policy(), ())


def test_the_status_shows_the_hourly_budget_and_held_back_nodes(store: Journal, answers: Answers):
    begun = time.time()
    for node in ("n1", "n2"):
        store.begin(Drain(node, XID), begun, ("train",))
    store.record_change(
        ChangePhase("n3", NodePhase.SUSPECTED, "stays in service", XID, held_back=HeldAction.HOUR), begun
    )
    assert answers.answer(STRANGER, {"automation": "status"})["taken"] == {"train": 2}
    held = {node["node"]: node["held_back"] for node in answers.answer(STRANGER, {"nodes": True})["nodes"]}
    assert held == {"n1": "", "n2": "", "n3": HeldAction.HOUR.value}
    answers.answer(0, {"automation": "resume"})
    assert answers.answer(STRANGER, {"automation": "status"})["taken"] == {"train": 0}


def test_the_forecast_of_a_node_uses_the_current_policy_and_partitions(folder: Path, store: Journal):
    drained(store, "n1", time.time())
    policy, partitions = Policy(can=frozenset({Remedy.REPLACE})), {"n1": ("train",)}
    answers = Answers(folder / JOURNAL, lambda: None, lambda: policy, lambda node: partitions.get(node, ()))
    why = "this cluster's machines cannot be rebooted automatically"
    answer = answers.answer(STRANGER, {"node": "n1"})
    assert answer["ahead"] == {"how": "replace", "why": why, "held_back": ""}
    answers.answer(0, {"automation": "pause"})
    assert answers.answer(STRANGER, {"node": "n1"})["ahead"]["held_back"] == HeldAction.PAUSED.value
    policy = Policy(can=frozenset())
    assert answers.answer(STRANGER, {"node": "n1"})["ahead"]["how"] == ""
    answers.close()


def test_events_are_ordered_and_can_be_resumed(store: Journal, answers: Answers):
    drained(store, "n1", 100.0)
    store.record_change(ChangePhase("n1", NodePhase.NEEDS_ADMIN, "nothing helps"), 101.0)
    store.record_change(Note("n2", "job 7 is over"), 102.0)
    events = answers.answer(STRANGER, {"events": 0})["events"]
    assert [(event["node"], event["kind"]) for event in events] == [("n1", "drain"), ("n1", "turn"), ("n2", "note")]
    later = answers.answer(STRANGER, {"events": events[1]["id"]})["events"]
    assert [event["text"] for event in later] == ["job 7 is over"]
    assert answers.answer(STRANGER, {"events": -1})["events"] == later


def test_a_node_is_shown_with_its_gpus_and_history(store: Journal, answers: Answers):
    drained(store, "n1", 100.0)
    store.record_gpus("n1", [GpuIdentity(0, "GPU-a", "serial", "H100"), GpuIdentity(1, "GPU-b")], 100.0)
    answer = answers.answer(STRANGER, {"node": "n1"})
    assert (answer["node"]["phase"], answer["node"]["reason"]) == ("drained", "dalsegno:reboot:xid[79] Xid 79")
    assert [gpu["uuid"] for gpu in answer["gpus"]] == ["GPU-a", "GPU-b"]
    assert answer["events"][-1]["text"] == "drained: xid[79] Xid 79"
    assert [each["node"] for each in answers.answer(STRANGER, {"nodes": True})["nodes"]] == ["n1"]
    with pytest.raises(DalsegnoError, match="unknown node"):
        answers.answer(STRANGER, {"node": "n9"})


def test_pause_from_the_web_page_names_the_person(answers: Answers):
    answers.answer(0, {"automation": "pause", "by": "ada in the web page"})
    assert answers.store.events()[-1].text == "paused by ada in the web page"
    with pytest.raises(DalsegnoError):
        answers.answer(STRANGER, {"automation": "resume", "by": "root"})
    answers.answer(0, {"automation": "resume", "by": "a\nb"})
    assert answers.store.events()[-1].text == "resumed by root"


def test_only_root_and_the_owner_may_pause(store: Journal, answers: Answers):
    with pytest.raises(DalsegnoError, match="only root and the cluster's owner may pause"):
        answers.answer(STRANGER, {"automation": "pause"})
    assert answers.answer(STRANGER, {"automation": "status"})["automation"] == "on"
    assert answers.answer(os.geteuid(), {"automation": "pause"})["automation"] == "paused"
    assert store.refresh().paused, "visible on another connection"
    assert answers.answer(0, {"automation": "resume"})["automation"] == "on"
    status = answers.answer(0, {"automation": "status"})
    assert (status["mode"], status["per_hour"], status["taken"]) == ("auto", Policy().per_hour, {})
    texts = [event["kind"] for event in answers.answer(STRANGER, {"events": 0})["events"]]
    assert texts == ["automation", "automation"]


@pytest.mark.parametrize(
    "request_",
    [{"events": "all"}, {"events": True}, {"events": 1 << 60}, {"automation": "fly"}, {"automation": 3},
     {"node": ["n1"]}, {"node": "n1", "events": 0}, {"nodes": 1}],
    ids=str,
)  # fmt: skip
def test_invalid_requests_are_refused(answers: Answers, store: Journal, request_: Message):
    with pytest.raises(DalsegnoError) as caught:
        answers.answer(0, request_)
    assert caught.value.hint
    assert store.events() == []


def test_the_controller_answers_over_its_socket(folder: Path, store: Journal):
    drained(store, "n1", 100.0)
    controller = Controller(folder, (), {})
    asked = threading.Thread(target=lambda: answered.append(ask(folder / SOCKET, {"events": 0}, 5)))
    answered: list[Message] = []
    asked.start()
    while asked.is_alive():
        controller.turn(0.01)
    controller.close()
    assert answered[0]["events"][0]["text"] == "drained: xid[79] Xid 79"


def test_a_refused_request_is_logged_once_and_changes_nothing(
    folder: Path, store: Journal, caplog: pytest.LogCaptureFixture
):
    controller = Controller(folder, (), {})
    for request in ({"automation": "pause"}, {"forgive": "GPU-a"}, {"start": "/root"}):
        assert "error" in controller.answer(STRANGER, request)
    controller.close()
    assert len([line for line in caplog.messages if line.startswith(f"refused: request of uid {STRANGER}")]) == 1
    assert store.events() == [] and not store.refresh().paused


def test_old_rows_are_deleted_and_unfinished_actions_kept(store: Journal, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("dalsegno.recovery.journal.store.MAX_KEPT", 2)
    unfinished = store.begin(Drain("n0", XID), 99.0)
    for number in range(1, 6):
        drained(store, f"n{number}", 100.0 + number)
    store.tidy()
    assert [event.node for event in store.events()] == ["n4", "n5"]
    assert store.action(unfinished) == (Drain("n0", XID), 99.0)
    assert store.db.execute("SELECT COUNT(*) FROM actions").fetchone() == (3,)


def test_tidy_keeps_the_last_verdicts_and_deletes_old_marks(store: Journal, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("dalsegno.recovery.journal.store.MAX_KEPT", 2)
    store.record_checks([CheckChange("n1", "xid", Verdict.FAILED, "Xid 79")], 100.0)
    for number in range(20):
        store.record_checks(
            [CheckChange("n2", "disk", Verdict.WARNED if number % 2 else Verdict.PASSED, "")], 101.0 + number
        )
    for number in range(3):
        store.pause(False, "root", 100.0 + number)
    store.tidy(now=100.0 + 61 * DAY_S)
    assert store.last_verdicts() == [("n1", "xid", Verdict.FAILED), ("n2", "disk", Verdict.WARNED)]
    assert store.db.execute("SELECT COUNT(*) FROM checks").fetchone() == (3,)
    assert store.db.execute("SELECT COUNT(*) FROM marks").fetchone() == (1,)
    assert store.last_event() == 3, "event ids are not reused"


def test_the_journal_shrinks_after_rows_are_deleted(folder: Path, monkeypatch: pytest.MonkeyPatch):
    store = Journal(folder / JOURNAL)
    with store._changing(store.records):
        for number in range(3000):
            store._event(float(number), "n1", EventKind.DRAIN, "text " * 100)
    store.db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    before = (folder / JOURNAL).stat().st_size
    monkeypatch.setattr("dalsegno.recovery.journal.store.MAX_KEPT", 10)
    store.tidy()
    assert before > 1_500_000 and (folder / JOURNAL).stat().st_size < before / 4
    assert [event.id for event in store.events()] == list(range(2991, 3001))
    store.close()


def test_a_damaged_journal_is_an_error_with_a_hint(folder: Path):
    (folder / JOURNAL).write_bytes(b"not a database, whatever its name says" * 100)
    with pytest.raises(DalsegnoError, match="cannot be read") as caught:
        Journal(folder / JOURNAL)
    assert "move the file away" in caught.value.hint


def test_the_journal_is_readable_only_by_its_owner(folder: Path, store: Journal):
    assert (folder / JOURNAL).stat().st_mode & 0o777 == 0o600


def test_only_the_owner_may_forgive_a_replaced_gpu(store: Journal, answers: Answers):
    store.record_gpus("n1", [GpuIdentity(0, "GPU-a")], 100.0)
    repair = Repair("n1", Remedy.REPLACE, XID, "boot-1", ("GPU-a",))
    store.end(store.begin(repair, 101.0), repair, "replaced", "", 101.0, Policy(), ())
    with pytest.raises(DalsegnoError, match="may forgive a GPU, not uid 4711"):
        answers.answer(STRANGER, {"forgive": "GPU-a"})
    for name in ("GPU-b", "n9", ""):
        with pytest.raises(DalsegnoError, match="neither a replaced GPU nor a node"):
            answers.answer(0, {"forgive": name})
    assert store.refresh().replaced_gpus == {"GPU-a"}
    assert [gpu["uuid"] for gpu in answers.answer(0, {"forgive": "n1"})["forgiven"]] == ["GPU-a"]
    assert store.refresh().replaced_gpus == frozenset()
    assert "GPU GPU-a was forgiven by root and may come back" in [event.text for event in store.events(node="n1")]


def test_a_node_is_shown_with_its_check_results(store: Journal, answers: Answers):
    drained(store, "n1", 100.0)
    store.record_checks([CheckChange("n1", "gpu-ecc", Verdict.FAILED, "4 errors")], 99.0)
    assert answers.answer(STRANGER, {"node": "n1"})["checks"] == [
        {"at": 99.0, "node": "n1", "check": "gpu-ecc", "verdict": "failed", "text": "4 errors"}
    ]


def test_several_threads_may_create_the_journal_at_once(folder: Path):
    """The recovery loop and the code that answers requests open the journal independently."""
    for number in range(20):
        wrong, start = list[Exception](), threading.Barrier(4)

        def open_it(path: Path, start: threading.Barrier = start, wrong: list[Exception] = wrong) -> None:
            start.wait()
            try:
                Journal(path).close()
            except DalsegnoError as error:
                wrong.append(error)

        threads = [threading.Thread(target=open_it, args=(folder / f"{number}.sqlite",)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []


def test_the_users_of_slurm_are_part_of_the_answer(folder: Path, store: Journal):
    drained(store, "n1", time.time())
    answers = Answers(folder / JOURNAL, lambda: None, lambda: Policy(slurm_users=frozenset({"root", "ada"})))
    for request in ({"nodes": True}, {"node": "n1"}):
        assert answers.answer(STRANGER, request)["slurm_users"] == ["ada", "root"]
    answers.close()
