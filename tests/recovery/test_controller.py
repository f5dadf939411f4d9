"""Tests of the controller with real processes. It starts and restarts coordinators, and recovers from its own crash."""

import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dalsegno.errors import DalsegnoError
from dalsegno.recovery.client import controller_answers
from dalsegno.recovery.controller import RUNS, SOCKET
from dalsegno.targets.local.folder import Folder
from dalsegno.wire.frames import pack
from tests.recovery.stage import SOURCE, Stage, say_and_hear
from tests.waiting import eventually

pytestmark = pytest.mark.cluster  # real processes: too slow for the unit part

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture
def stage() -> Iterator[Stage]:
    root = Path(tempfile.mkdtemp(prefix="ds-", dir="/tmp"))  # short, for the socket, and open to other users
    root.chmod(0o755)
    stage = Stage(root)
    yield stage
    stage.close()
    shutil.rmtree(root)


def test_target_and_controller_agree_on_paths():
    folder = Folder(Path("/state"))
    assert (folder.controller_socket, folder.runs) == (Path("/state") / SOCKET, Path("/state") / RUNS)


def test_a_coordinator_has_its_own_session_and_a_small_environment(stage: Stage):
    stage.up()
    run = stage.run("r1")
    stage.start(run)
    eventually(lambda: stage.started(run))
    (said,) = stage.started(run)
    assert (said["sid"], said["cwd"], said["uid"]) == (said["pid"], "/", os.geteuid())
    assert set(said["env"]) - {"LC_CTYPE"} == {
        "PATH",
        "HOME",
        "USER",
        "LOGNAME",
        "DALSEGNO_MARK",
        "DALSEGNO_CONTROLLER",
    }
    assert stage.runs() == [{"run": "r1", "folder": str(run), "uid": os.geteuid(), "pid": said["pid"]}]
    assert stage.socket.stat().st_mode & 0o777 == 0o666


def test_requesting_the_same_run_again_changes_nothing(stage: Stage):
    stage.up()
    run, other = stage.run("r1"), stage.run("r2")
    for folder in (run, run, other, run):
        stage.start(folder)
    eventually(lambda: stage.started(run) and stage.started(other))
    assert len(stage.started(run)) == 1
    assert [one["run"] for one in stage.runs()] == ["r1", "r2"]


@pytest.mark.parametrize("code", [0])
def test_a_run_that_is_over_is_removed(stage: Stage, code: int):
    stage.up()
    run = stage.run("r1", code=code)
    stage.start(run)
    eventually(lambda: stage.runs() == [])
    assert len(stage.started(run)) == 1 and not stage.record(run).exists()


def test_a_crashed_coordinator_is_restarted(stage: Stage):
    stage.up()
    run = stage.run("r1", code=64)
    stage.start(run)
    # The first restart is immediate, the second follows after a second.
    eventually(lambda: len(stage.started(run)) == 3)
    (run / "plan.json").write_text('{"code": 0}')
    eventually(lambda: stage.runs() == [])


def test_a_killed_coordinator_is_restarted(stage: Stage):
    stage.up()
    run = stage.run("r1")
    stage.start(run)
    eventually(lambda: stage.started(run))
    os.kill(stage.pids(run)[0], signal.SIGKILL)
    eventually(lambda: len(stage.started(run)) == 2)
    assert stage.runs()[0]["pid"] == stage.pids(run)[1]


def test_coordinators_survive_the_controller_and_are_taken_over(stage: Stage):
    stage.up()
    lives, dies = stage.run("lives"), stage.run("dies")
    for run in (lives, dies):
        stage.start(run)
    eventually(lambda: stage.started(lives) and stage.started(dies))
    stage.kill()
    os.kill(stage.pids(dies)[0], signal.SIGKILL)
    stage.up()
    eventually(lambda: len(stage.started(dies)) == 2)
    assert len(stage.started(lives)) == 1 and len(stage.runs()) == 2
    os.kill(stage.pids(lives)[0], signal.SIGKILL)
    eventually(lambda: len(stage.started(lives)) == 2)


def test_a_crash_before_the_pid_is_recorded_starts_no_second_coordinator(stage: Stage):
    stage.up()
    run = stage.run("r1")
    stage.start(run)
    eventually(lambda: stage.started(run))
    stage.kill()
    record = json.loads(stage.record(run).read_text())
    stage.record(run).write_text(json.dumps({**record, "pid": 0, "start": 0}))
    stage.up()
    assert stage.runs()[0]["pid"] == stage.pids(run)[0]
    assert len(stage.started(run)) == 1


def test_an_abandoned_run_restarts_only_on_request(stage: Stage):
    run = stage.run("r1")
    stage.record(run).parent.mkdir(parents=True)
    stage.record(run).write_text(json.dumps({"folder": str(run), "uid": os.geteuid(), "given_up": True}))
    stage.up()
    assert stage.runs()[0]["given_up"] is True and stage.started(run) == []
    stage.start(run)
    eventually(lambda: stage.started(run))
    assert "given_up" not in stage.runs()[0]


# Permissions


def refusal(stage: Stage, folder: Path) -> str:
    with pytest.raises(DalsegnoError) as caught:
        stage.start(folder)
    return caught.value.what


def test_folders_that_are_not_runs_of_the_caller_are_refused(stage: Stage):
    stage.up()
    run = stage.run("r1")
    (stage.root / "home/link").symlink_to(run)
    (stage.root / "home/empty").mkdir()
    for folder in (stage.root / "home/link", stage.root / "home/empty", stage.root / "home/none", run / "plan.json"):
        assert "is not a run folder of yours" in refusal(stage, folder)
    for folder in (Path("home/r1"), run / ".." / "r1"):
        assert "must be an absolute path" in refusal(stage, folder)
    for name in (".hidden", "a b", "x" * 129, "ü"):
        assert "letters, digits" in refusal(stage, stage.root / "home" / name)
    assert stage.runs() == []


def test_a_run_id_in_use_is_refused(stage: Stage):
    stage.up()
    run = stage.run("r1")
    stage.start(run)
    twin = stage.root / "twin/r1"
    shutil.copytree(run, twin)
    assert "the run id `r1` is in use" in refusal(stage, twin)


def ask_as(stage: Stage, uid: int, folder: Path) -> str:
    """Return the error that another user gets."""
    code = "import sys; from dalsegno.recovery.client import *; start_run(*map(Path, sys.argv[1:]))"
    argv = [sys.executable, "-c", code, str(stage.socket), str(folder)]
    env = {"PYTHONPATH": str(SOURCE), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(argv, user=uid, group=uid, extra_groups=[], env=env, capture_output=True, text=True)
    return done.stderr.strip().rpartition("DalsegnoError: ")[2]


@as_root
def test_root_starts_each_users_coordinator_as_that_user(stage: Stage):
    stage.up()
    own, foreign = stage.run("own", owner=NOBODY), stage.run("foreign")
    assert ask_as(stage, NOBODY, own) == ""
    eventually(lambda: stage.started(own))
    (said,) = stage.started(own)
    assert (said["uid"], said["gid"], said["groups"]) == (NOBODY, NOBODY, [NOBODY])
    assert (said["env"]["USER"], said["sid"]) == ("nobody", said["pid"])
    assert "is not a run folder of yours" in ask_as(stage, NOBODY, foreign)
    assert "is not a run folder of yours" in refusal(stage, stage.run("theirs", owner=NOBODY))
    stage.start(foreign)
    assert [one["run"] for one in stage.runs()] == ["own", "foreign"]  # root sees all


@as_root
def test_without_root_only_the_owner_may_start_runs(stage: Stage):
    os.chown(stage.root, NOBODY, NOBODY)
    (stage.root / "run").mkdir()
    os.chown(stage.root / "run", NOBODY, NOBODY)
    stage.up(uid=NOBODY)
    assert "only its owner" in refusal(stage, stage.run("r1"))
    run = stage.run("r2", owner=NOBODY)
    assert ask_as(stage, NOBODY, run) == ""
    eventually(lambda: stage.started(run))


# Misbehaving callers


@pytest.mark.parametrize(
    "data",
    [
        pack({}), pack({"start": 3}), pack({"start": "/x\0y"}), pack({"start": "/\ud800"}), pack({"runs": False}),
        pack({"start": "/x", "runs": True}), pack({"stop": "r1"}), b"\0\0\0\2[]", b"\0\0\0\3abc", b"\xff\xff\xff\xff",
        struct.pack("!I", 60000) + b"[" * 60000,
    ],
)  # fmt: skip
def test_an_invalid_request_is_answered_with_an_error(stage: Stage, data: bytes):
    stage.up()
    answer = say_and_hear(stage.socket, data)
    assert answer is not None and answer["error"]
    assert controller_answers(stage.socket)


def test_an_oversized_request_is_disconnected(stage: Stage):
    stage.up()
    assert say_and_hear(stage.socket, struct.pack("!I", 1 << 20) + b"x" * (1 << 20)) is None
    assert controller_answers(stage.socket)


def test_hanging_callers_do_not_block_others(stage: Stage):
    stage.up()
    hanging = [socket.socket(socket.AF_UNIX) for _ in range(200)]
    try:
        for number, sock in enumerate(hanging):
            sock.connect(str(stage.socket))
            sock.sendall(b"\0\0\0\x09half"[: number % 9])
        run = stage.run("r1")
        stage.start(run)
        eventually(lambda: stage.started(run))
    finally:
        for sock in hanging:
            sock.close()


def test_a_missing_controller_is_an_error_and_does_not_hang(stage: Stage):
    assert not controller_answers(stage.root / "none")
    stage.up()
    assert controller_answers(stage.socket)
    stage.kill()
    assert not controller_answers(stage.socket)
    with pytest.raises(DalsegnoError, match="controller does not answer") as caught:
        stage.start(stage.run("r1"))
    assert "dalsegno up" in caught.value.hint
