"""What others can learn from the controller of its nodes, and who may pause it: over its real socket."""

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
from dalsegno.recovery.actions import Drain, Mend, Note, Turn
from dalsegno.recovery.answers import Answers
from dalsegno.recovery.book import DAY_S
from dalsegno.recovery.client import ask
from dalsegno.recovery.controller import SOCKET, Controller
from dalsegno.recovery.event import EventKind
from dalsegno.recovery.facts import NodeFault
from dalsegno.recovery.phase import HeldAction, NodePhase
from dalsegno.recovery.policy import Policy
from dalsegno.recovery.run_hints import News
from dalsegno.recovery.store import Journal
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


def test_the_budget_of_the_hour_is_told_and_who_is_left_for_it(store: Journal, answers: Answers):
    begun = time.time()
    for node in ("n1", "n2"):
        store.begin(Drain(node, XID), begun, ("train",))
    store.turn(Turn("n3", NodePhase.SUSPECTED, "stays in service", XID, held_back=HeldAction.HOUR), begun)
    assert answers.answer(STRANGER, {"automation": "status"})["taken"] == {"train": 2}
    held = {node["node"]: node["held_back"] for node in answers.answer(STRANGER, {"nodes": True})["nodes"]}
    assert held == {"n1": "", "n2": "", "n3": HeldAction.HOUR.value}
    answers.answer(0, {"automation": "resume"})
    assert answers.answer(STRANGER, {"automation": "status"})["taken"] == {"train": 0}


def test_what_is_ahead_of_a_node_is_told_with_it_by_the_policy_and_the_partitions_of_now(folder: Path, store: Journal):
    drained(store, "n1", time.time())
    policy, partitions = Policy(can=frozenset({Remedy.REPLACE})), {"n1": ("train",)}
    answers = Answers(folder / JOURNAL, lambda: None, lambda: policy, lambda node: partitions.get(node, ()))
    why = "this cluster's machines cannot be rebooted automatically"
    told = answers.answer(STRANGER, {"node": "n1"})
    assert told["ahead"] == {"how": "replace", "why": why, "held_back": ""}
    answers.answer(0, {"automation": "pause"})
    assert answers.answer(STRANGER, {"node": "n1"})["ahead"]["held_back"] == HeldAction.PAUSED.value
    policy = Policy(can=frozenset())
    assert answers.answer(STRANGER, {"node": "n1"})["ahead"]["how"] == ""
    answers.close()


def test_events_come_in_order_and_from_where_one_left_off(store: Journal, answers: Answers):
    drained(store, "n1", 100.0)
    store.turn(Turn("n1", NodePhase.GIVEN_UP, "nothing helps"), 101.0)
    store.turn(Note("n2", "job 7 is over"), 102.0)
    events = answers.answer(STRANGER, {"events": 0})["events"]
    assert [(event["node"], event["kind"]) for event in events] == [("n1", "drain"), ("n1", "turn"), ("n2", "note")]
    later = answers.answer(STRANGER, {"events": events[1]["id"]})["events"]
    assert [event["text"] for event in later] == ["job 7 is over"]
    assert answers.answer(STRANGER, {"events": -1})["events"] == later


def test_a_node_is_told_of_with_its_passport_and_its_history(store: Journal, answers: Answers):
    drained(store, "n1", 100.0)
    store.record_gpus("n1", [GpuIdentity(0, "GPU-a", "serial", "H100"), GpuIdentity(1, "GPU-b")], 100.0)
    told = answers.answer(STRANGER, {"node": "n1"})
    assert (told["node"]["phase"], told["node"]["reason"]) == ("drained", "dalsegno:reboot:xid[79] Xid 79")
    assert [gpu["uuid"] for gpu in told["gpus"]] == ["GPU-a", "GPU-b"]
    assert told["events"][-1]["text"] == "drained: xid[79] Xid 79"
    assert [each["node"] for each in answers.answer(STRANGER, {"nodes": True})["nodes"]] == ["n1"]
    with pytest.raises(DalsegnoError, match="unknown node"):
        answers.answer(STRANGER, {"node": "n9"})


def test_only_root_and_the_owner_may_pause(store: Journal, answers: Answers):
    with pytest.raises(DalsegnoError, match="only root and the cluster's owner may pause"):
        answers.answer(STRANGER, {"automation": "pause"})
    assert answers.answer(STRANGER, {"automation": "status"})["automation"] == "on"
    assert answers.answer(os.geteuid(), {"automation": "pause"})["automation"] == "paused"
    assert store.look().paused, "the watch's own connection sees it"
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
def test_what_cannot_be_meant_is_refused(answers: Answers, store: Journal, request_: Message):
    with pytest.raises(DalsegnoError) as caught:
        answers.answer(0, request_)
    assert caught.value.hint
    assert store.events() == []


def test_the_controller_answers_over_its_socket(folder: Path, store: Journal):
    drained(store, "n1", 100.0)
    controller = Controller(folder, (), {}, lambda text: None)
    asked = threading.Thread(target=lambda: told.append(ask(folder / SOCKET, {"events": 0}, 5)))
    told: list[Message] = []
    asked.start()
    while asked.is_alive():
        controller.turn(0.01)
    controller.close()
    assert told[0]["events"][0]["text"] == "drained: xid[79] Xid 79"


def test_a_request_that_is_refused_is_logged_once_and_changes_nothing(folder: Path, store: Journal):
    said = list[str]()
    controller = Controller(folder, (), {}, said.append)
    for request in ({"automation": "pause"}, {"forgive": "GPU-a"}, {"start": "/root"}):
        assert "error" in controller.answer(STRANGER, request)
    controller.close()
    assert len([line for line in said if line.startswith(f"refused: request of uid {STRANGER}")]) == 1
    assert store.events() == [] and not store.look().paused


def test_what_is_old_goes_and_what_is_not_finished_stays(store: Journal, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("dalsegno.recovery.store.MOST_KEPT", 2)
    unfinished = store.begin(Drain("n0", XID), 99.0)
    for number in range(1, 6):
        drained(store, f"n{number}", 100.0 + number)
    store.tidy()
    assert [event.node for event in store.events()] == ["n4", "n5"]
    assert store.action(unfinished) == (Drain("n0", XID), 99.0)
    assert store.db.execute("SELECT COUNT(*) FROM actions").fetchone() == (3,)


def test_tidying_keeps_the_last_verdict_of_every_check_and_drops_marks_that_count_no_more(
    store: Journal, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("dalsegno.recovery.store.MOST_KEPT", 2)
    store.record_checks([News("n1", "xid", Verdict.FAILED, "Xid 79")], 100.0)
    for number in range(20):
        store.record_checks([News("n2", "disk", Verdict.WARNED if number % 2 else Verdict.PASSED, "")], 101.0 + number)
    for number in range(3):
        store.pause(False, "root", 100.0 + number)
    store.tidy(now=100.0 + 61 * DAY_S)
    assert store.last_verdicts() == [("n1", "xid", Verdict.FAILED), ("n2", "disk", Verdict.WARNED)]
    assert store.db.execute("SELECT COUNT(*) FROM checks").fetchone() == (3,)
    assert store.db.execute("SELECT COUNT(*) FROM marks").fetchone() == (1,)
    assert store.last_event() == 3, "numbers of events go on"


def test_a_journal_gives_back_the_room_of_what_was_dropped(folder: Path, monkeypatch: pytest.MonkeyPatch):
    store = Journal(folder / JOURNAL)
    with store._changing(store.book):
        for number in range(3000):
            store._event(float(number), "n1", EventKind.DRAIN, "text " * 100)
    store.db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    before = (folder / JOURNAL).stat().st_size
    monkeypatch.setattr("dalsegno.recovery.store.MOST_KEPT", 10)
    store.tidy()
    assert before > 1_500_000 and (folder / JOURNAL).stat().st_size < before / 4
    assert [event.id for event in store.events()] == list(range(2991, 3001))
    store.close()


def test_a_journal_that_is_damaged_is_told_of_with_what_to_do(folder: Path):
    (folder / JOURNAL).write_bytes(b"not a database, whatever its name says" * 100)
    with pytest.raises(DalsegnoError, match="cannot be read") as caught:
        Journal(folder / JOURNAL)
    assert "move the file away" in caught.value.hint


def test_what_is_in_the_journal_is_for_its_owner_alone(folder: Path, store: Journal):
    assert (folder / JOURNAL).stat().st_mode & 0o777 == 0o600


def test_a_gpu_that_was_sent_away_is_forgiven_by_its_owner_alone(store: Journal, answers: Answers):
    store.record_gpus("n1", [GpuIdentity(0, "GPU-a")], 100.0)
    mend = Mend("n1", Remedy.REPLACE, XID, "boot-1", ("GPU-a",))
    store.end(store.begin(mend, 101.0), mend, "replaced", "", 101.0, Policy(), ())
    with pytest.raises(DalsegnoError, match="may forgive a GPU, not uid 4711"):
        answers.answer(STRANGER, {"forgive": "GPU-a"})
    for name in ("GPU-b", "n9", ""):
        with pytest.raises(DalsegnoError, match="neither a replaced GPU nor a node"):
            answers.answer(0, {"forgive": name})
    assert store.look().replaced_gpus == {"GPU-a"}
    assert [gpu["uuid"] for gpu in answers.answer(0, {"forgive": "n1"})["forgiven"]] == ["GPU-a"]
    assert store.look().replaced_gpus == frozenset()
    assert "GPU GPU-a was forgiven by root and may come back" in [event.text for event in store.events(node="n1")]


def test_what_the_checks_of_a_node_found_is_told_with_it(store: Journal, answers: Answers):
    drained(store, "n1", 100.0)
    store.record_checks([News("n1", "gpu-ecc", Verdict.FAILED, "4 errors")], 99.0)
    assert answers.answer(STRANGER, {"node": "n1"})["checks"] == [
        {"at": 99.0, "node": "n1", "check": "gpu-ecc", "verdict": "failed", "text": "4 errors"}
    ]


def test_a_journal_that_several_make_at_the_same_moment_is_made_once(folder: Path):
    """The loop that looks after nodes and whoever answers questions open it each for itself."""
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


def test_under_whom_slurm_writes_is_told_with_the_nodes(folder: Path, store: Journal):
    drained(store, "n1", time.time())
    answers = Answers(folder / JOURNAL, lambda: None, lambda: Policy(slurm_users=frozenset({"root", "ada"})))
    for request in ({"nodes": True}, {"node": "n1"}):
        assert answers.answer(STRANGER, request)["slurm_users"] == ["ada", "root"]
    answers.close()
