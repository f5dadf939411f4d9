"""Tests of the watcher of a cluster that Dal Segno did not create, with recorded answers in place of Slurm."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dalsegno.adopt.render import with_armed
from dalsegno.cluster import find_slurm, watcher_folder
from dalsegno.errors import DalsegnoError
from dalsegno.recovery.client import WATCHER_SOCKET, ask, controller_answers
from dalsegno.recovery.watcher import ExistingSite, NodeWatcher
from dalsegno.slurm.client import SlurmClient
from dalsegno.spec.model import starter
from dalsegno.system.processes import FakeRunner
from tests.waiting import eventually

NODE = (
    "NodeName={name} CPUTot=8 NodeAddr=127.0.0.1 Port=1 RealMemory=1000 State={state} Partitions=train "
    "BootTime=1794805539 {reason}\n"
)


@dataclass
class Slurm:
    """The answers of Slurm, and every command that was run."""

    nodes: str = ""
    runner: FakeRunner = field(init=False)

    def __post_init__(self) -> None:
        self.runner = FakeRunner(lambda argv, stdin: self.answer(argv))

    def answer(self, argv: tuple[str, ...]) -> str:
        if argv[:3] == ("scontrol", "show", "config"):
            return "Configuration data as of 1794808537\nSlurmUser               = slurmadm(64030)\n"
        return "" if argv[0] == "squeue" else self.nodes

    @property
    def changes(self) -> list[tuple[str, ...]]:
        return [argv for argv in self.runner.calls if "update" in argv]


@pytest.fixture
def slurm() -> Slurm:
    drained = NODE.format(name="n2", state="IDLE+DRAIN", reason="Reason=Kill task failed [slurmadm@1794805539]")
    return Slurm(NODE.format(name="n1", state="IDLE", reason="") + drained)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(starter("existing").replace("  # armed: [train]  ", "  armed: []"))
    return path


@pytest.fixture
def watcher(tmp_path: Path, file: Path, slurm: Slurm) -> Iterator[NodeWatcher]:
    watcher = NodeWatcher(tmp_path / "w", file, SlurmClient(slurm.runner, {}), "")
    yield watcher
    watcher.close()


def test_events_name_what_would_be_done_and_slurm_is_only_read(watcher: NodeWatcher, slurm: Slurm):
    event = eventually(lambda: watcher.turn(0.05))[0]
    assert event.node == "n2"
    assert event.text == "Slurm has taken it out of service (Kill task failed); would validate it and return it"
    assert slurm.changes == []


def test_requests_about_nodes_are_answered_and_runs_are_refused(watcher: NodeWatcher, tmp_path: Path):
    eventually(lambda: watcher.turn(0.05))
    assert [node["node"] for node in watcher.answer(0, {"nodes": True})["nodes"]] == ["n1", "n2"]
    status = watcher.answer(0, {"automation": "status"})
    assert (status["mode"], status["armed"]) == ("observe", [])
    assert "starts no runs" in watcher.answer(0, {"start": str(tmp_path)})["error"]
    assert not serve_while(watcher, lambda: controller_answers(tmp_path / "w" / WATCHER_SOCKET)), "for `dalsegno run`"


def test_answers_arrive_through_the_socket(watcher: NodeWatcher, tmp_path: Path):
    eventually(lambda: watcher.turn(0.05))
    answer = serve_while(watcher, lambda: ask(tmp_path / "w" / WATCHER_SOCKET, {"events": 0}, 10))
    assert [event["node"] for event in answer["events"]] == ["n2"]


def serve_while(watcher: NodeWatcher, ask_it):
    """Call a client in another thread while the watcher serves."""
    answers = []
    client = threading.Thread(target=lambda: answers.append(ask_it()))
    client.start()
    while client.is_alive():
        watcher.turn(0.02)
    return answers[0]


def test_changed_file_changes_the_policy_and_a_faulty_one_does_not(file: Path, slurm: Slurm):
    site = ExistingSite(file, SlurmClient(slurm.runner, {}))
    assert site.policy().armed == frozenset() and not site.policy().agents
    assert "slurmadm" in site.slurm_users
    text = with_armed(file.read_text(), ["train"])
    assert text is not None
    write(file, text, 1)
    assert site.policy().armed == {"train"}
    write(file, "name: broken\n", 2)
    assert site.policy().armed == {"train"}


def write(file: Path, text: str, age: int) -> None:
    file.write_text(text)
    os.utime(file, ns=(0, age))


def test_file_of_another_target_is_refused(file: Path, slurm: Slurm):
    file.write_text(starter("local"))
    with pytest.raises(DalsegnoError) as caught:
        ExistingSite(file, SlurmClient(slurm.runner, {}))
    assert caught.value.what == "its target is `local`" and caught.value.hint


def test_commands_find_the_watcher_of_the_same_slurm(tmp_path: Path, file: Path, slurm: Slurm):
    env = {"DALSEGNO_HOME": str(tmp_path / "home"), "SLURM_CONF": "/etc/slurm/slurm.conf", "PATH": "/usr/bin"}
    folder = watcher_folder("demo", env)
    watcher = NodeWatcher(folder, file, SlurmClient(slurm.runner, {}), env["SLURM_CONF"])
    assert find_slurm(env=env).watcher == folder / WATCHER_SOCKET and find_slurm(env=env).controller is None
    assert find_slurm(env={**env, "SLURM_CONF": "/other"}).watcher is None
    watcher.close()
    assert find_slurm(env=env).watcher is None
