"""The requests that the machine room accepts and refuses. Cluster tests show its effect on real hosts."""

import contextlib
import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dalsegno.errors import DalsegnoError, TargetError
from dalsegno.system.files import locked, user_of
from dalsegno.targets.base import CanReboot, CanReplace, CanReset, CanSeePower, name_user
from dalsegno.targets.local.folder import ApplyStage, Folder
from dalsegno.targets.local.machine_room import HostControlClient, HostControlServer
from dalsegno.targets.registry import open_existing
from tests.local.sites import folder_of

OWNER = os.geteuid()
STRANGER = 12345


def ask(room: HostControlServer, uid: int = OWNER, **request: object) -> dict[str, object]:
    return room.answer(uid, json.dumps(request) + "\n")


@pytest.fixture
def short(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A path that is short enough for a socket."""
    import shutil
    import tempfile

    home = Path(tempfile.mkdtemp(dir="/tmp", prefix="ds-"))
    yield home
    shutil.rmtree(home)


@pytest.fixture
def folder(short: Path) -> Folder:
    return folder_of(short)


@pytest.fixture
def room(folder: Folder) -> Iterator[HostControlServer]:
    made = HostControlServer(folder)
    yield made
    made.listener.close()


def test_socket_belongs_to_the_owner(room: HostControlServer, folder: Folder):
    assert folder.room_socket.stat().st_mode & 0o777 == 0o600
    assert folder.room_socket.parent.stat().st_mode & 0o777 == 0o700


def test_status_has_power_state_and_boot_id(room: HostControlServer, folder: Folder):
    assert ask(room, do="power", node="train-1") == {"ok": True, "on": False, "boot": ""}
    folder.boot_id("train-1").write_text("abc\n")
    assert ask(room, do="power", node="train-1")["boot"] == "abc"


def test_other_user_is_refused_whatever_the_socket_mode(room: HostControlServer):
    assert "only root and the cluster's owner" in str(ask(room, STRANGER, do="replace", node="train-1")["error"])


@pytest.mark.parametrize(
    "line", ["", "{", "[]", "null", "7", '{"do": "power"}', '{"do": ["power"], "node": "train-1"}', "[" * 100_000]
)
def test_invalid_request_is_refused(room: HostControlServer, line: str):
    assert "invalid request" in room.answer(OWNER, line)["error"]


@pytest.mark.parametrize("node", ["train-9", "head", "switch", "../train-1", ""])
def test_only_nodes_are_rebuilt(room: HostControlServer, node: str):
    for word in ("reboot", "replace", "reset_gpus", "power"):
        assert "there is no node" in str(ask(room, do=word, node=node)["error"])


def test_users_of_the_machine_are_named(room: HostControlServer, folder: Folder):
    assert ask(room, do="user", node=str(OWNER)) == {"ok": True, "name": user_of(OWNER)}
    for node in ("", "-1", "root", "²"):
        assert "needs a uid" in str(ask(room, do="user", node=node)["error"])
    assert "only root" in str(ask(room, STRANGER, do="user", node="0")["error"])


def test_users_of_the_cluster_have_names_on_the_machine(folder: Folder):
    folder.etc.mkdir(exist_ok=True)
    (folder.etc / "passwd").write_text("root:x:0:0::/root:/bin/sh\nada:x:20001:20001::/home/ada:/bin/bash\nbroken\n")
    target = open_existing(folder.root)
    assert (name_user(target, 20001), name_user(target, 20002)) == ("ada", "uid 20002")
    assert name_user(None, OWNER) == user_of(OWNER)


def test_fault_for_the_web_page_is_checked(room: HostControlServer):
    assert "invalid request" in ask(room, do="inject", node="train-1")["error"]
    assert "invalid request" in ask(room, do="reboot", node="train-1", fault="xid")["error"]
    assert "no fault `none`" in ask(room, do="inject", node="train-1", fault="none")["error"]
    assert "needs a code" in ask(room, do="inject", node="train-1", fault="xid")["error"]
    assert "only root" in ask(room, STRANGER, do="inject", node="train-1", fault="power-off")["error"]


def test_request_during_up_or_down_is_refused(room: HostControlServer, folder: Folder):
    with locked(folder.lock, "the cluster"):
        answer = ask(room, do="reboot", node="train-1")
    assert "another `dalsegno` is working on demo" in str(answer["error"]) and "try again" in str(answer["hint"])


def test_up_waits_for_a_started_action(folder: Folder):
    at_work, up = locked(folder.node_lock, "room", shared=True), locked(folder.node_lock, "a node", wait_s=0.05)
    with at_work, pytest.raises(DalsegnoError), up:
        pass
    with locked(folder.node_lock, "a node", wait_s=0.05):
        pass


def test_partly_created_cluster_has_no_nodes(short: Path):
    room = HostControlServer(folder_of(short, phase=ApplyStage.MAKING))
    assert "is being changed" in str(ask(room, do="reboot", node="train-1")["error"])
    assert ask(room, do="power", node="train-1")["on"] is False, "to look is always allowed"
    room.listener.close()


def test_client_implements_the_protocol_of_recovery(room: HostControlServer, folder: Folder):
    client = HostControlClient(folder.root)
    assert isinstance(client, CanReset) and isinstance(client, CanReboot) and isinstance(client, CanReplace)
    assert isinstance(client, CanSeePower)
    with served(room):
        assert client.is_on("train-1") is False and client.is_off("train-1") is True
        assert client.is_off("train-9") is False, "nothing is known of a name that is not a node"
        with pytest.raises(TargetError, match="train-1 is off"):
            client.reset_gpus("train-1")


class CountedRoom(HostControlServer):
    """Counts the callers that are answered at the same time. Each waits for another one, so that two always overlap."""

    def __init__(self, folder: Folder) -> None:
        super().__init__(folder, max_callers=2)
        self.lock, self.together, self.inside, self.most = threading.Lock(), threading.Barrier(2), 0, 0

    def answer(self, uid: int, line: str) -> dict[str, object]:
        with self.lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
        self.together.wait(60)
        answer = super().answer(uid, line)
        with self.lock:
            self.inside -= 1
        return answer


def test_callers_beyond_the_limit_wait_until_others_are_served(folder: Folder):
    room = CountedRoom(folder)
    with served(room), contextlib.ExitStack() as stack:
        callers = [stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) for _ in range(20)]
        for caller in callers:
            caller.settimeout(60)
            caller.connect(str(folder.room_socket))
            caller.sendall(b'{"do": "power", "node": "train-1"}\n')
        assert all(json.loads(caller.recv(4096))["ok"] for caller in callers)
    assert room.most == 2
    room.listener.close()


@contextlib.contextmanager
def served(room: HostControlServer) -> Iterator[None]:
    """Serve requests during the block. Join the thread before the socket is closed: its descriptor may be reused."""

    def serve() -> None:
        with contextlib.suppress(OSError):
            room.serve()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        room.listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_missing_or_disconnecting_machine_room_is_an_error(folder: Folder):
    client = HostControlClient(folder.root, retry_s=0)
    with pytest.raises(TargetError, match="does not answer"):
        client.is_on("train-1")
    assert client.is_off("train-1") is False, "nobody knows"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder.room_socket))
        listener.listen()
        threading.Thread(target=lambda: listener.accept()[0].close(), daemon=True).start()
        with pytest.raises(TargetError, match="machine room"):
            client.is_on("train-1")
