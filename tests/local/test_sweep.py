"""Tests of which processes `down` ends: of users' processes, only marked ones that the controller has recorded."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dalsegno.system.children import MARK, Child, Identity, environment, start
from dalsegno.targets.local.folder import Folder
from dalsegno.targets.local.sweep import end_processes, end_strays
from tests.waiting import eventually

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
NOBODY = Identity(65534, 65534)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    folder = Folder(tmp_path)
    folder.runs.mkdir(parents=True)
    return folder


@pytest.fixture
def coordinator(folder: Folder) -> Iterator[Child]:
    """A user's process with the cluster's mark, as the controller would start it."""
    child = start(["sleep", "100"], {MARK: str(folder.root), "PATH": os.defpath}, identity=NOBODY)
    eventually(lambda: any(environment(child.process.pid)))
    yield child
    child.popen.kill()
    child.popen.wait()
    child.close()


def record(folder: Folder, child: Child, late: int = 0) -> None:
    fact = {"pid": child.process.pid, "start": child.process.start + late}
    (folder.runs / "r1.json").write_text(json.dumps(fact))


def test_recorded_coordinator_is_ended(folder: Folder, coordinator: Child):
    record(folder, coordinator)
    assert end_processes(folder)
    assert coordinator.popen.wait(60) == -9


def test_process_of_another_user_with_the_mark_is_not_ended(folder: Folder, coordinator: Child):
    assert not end_processes(folder)
    record(folder, coordinator, late=1)  # the record describes another process that had this PID
    (folder.runs / "r2.json").write_text("{")
    assert not end_processes(folder)
    assert coordinator.poll() is None


def test_coordinators_outlive_the_supervisor_of_loopback_hosts(folder: Folder, coordinator: Child):
    record(folder, coordinator)
    stray = start(["sleep", "100"], {MARK: str(folder.root), "PATH": os.defpath})
    # For a moment after exec, the kernel shows an empty environment.
    eventually(lambda: any(environment(stray.process.pid)))
    end_strays(folder, [], loopback=True)
    assert stray.popen.wait(60) == -15 and coordinator.poll() is None
    stray.close()
