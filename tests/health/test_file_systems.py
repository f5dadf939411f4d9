"""Tests of the check of shared file systems: whether the node is at fault, or the NFS server."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dalsegno.health import Remedy, Result, Verdict
from dalsegno.health.checks.file_systems import (
    AWAY_CHECKS,
    AWAY_S,
    RECONNECT_S,
    Mount,
    NfsServer,
    ask_shared,
    judge_shared,
    nfs_server,
)
from dalsegno.health.expected import Expected
from dalsegno.health.facts import SeenBefore
from dalsegno.health.node_reader import LocalNode, RecordedNode
from dalsegno.health.result import SERVER_AWAY
from dalsegno.system.hanging_calls import NoAnswer
from dalsegno.system.network import nfs_answers

NFS = "head:/srv{path} {path} nfs4 rw,vers=4.2,hard,proto=tcp,clientaddr=10.0.0.7,addr={server} 0 0\n"
HOME, TEAM = NFS.format(path="/home", server="10.0.0.1"), NFS.format(path="/team", server="10.0.0.2")


def judged(
    folder: Path, mounts: str, *, hanging: tuple[str, ...] = (), away: str = "", at: float = 0.0, seen: SeenBefore
) -> Result:
    """Return the result on a node with these mounts, of which some hang, and with these servers away."""
    for name in ("proc/self", "commands"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "proc/self/mounts").write_text(mounts)
    (folder / "nfs_servers_away").write_text(away)
    (folder / "now").write_text(str(at))
    for old in (folder / "commands").iterdir():
        old.unlink()
    (folder / "commands/stat").write_text("nfs")
    for path in hanging:
        (folder / f"commands/stat --file-system --format=%T {path.replace('/', '+')}.hangs").touch()
    return judge_shared(ask_shared(RecordedNode(folder, Expected("n1"), seen)))


def silent_for_long(
    folder: Path, mounts: str, *, hanging: tuple[str, ...], away: str, until: float = 0.0, seen: SeenBefore
) -> Result:
    """Return the result of the last of several checks, between which these servers stay away."""
    times = [until - AWAY_S * (1 - each / AWAY_CHECKS) for each in range(AWAY_CHECKS + 1)]
    return [judged(folder, mounts, hanging=hanging, away=away, at=at, seen=seen) for at in times][-1]


def test_node_that_hangs_while_its_server_answers_is_to_be_rebooted(tmp_path: Path):
    found = judged(tmp_path, HOME, hanging=("/home",), seen=SeenBefore())
    assert (found.remedy, found.code, found.text) == (Remedy.REBOOT, "", "/home does not answer within 1.25 s")


def test_node_whose_server_does_not_answer_is_only_to_be_drained(tmp_path: Path):
    found = silent_for_long(tmp_path, HOME, hanging=("/home",), away="10.0.0.1", seen=SeenBefore())
    assert (found.verdict, found.remedy, found.code) == (Verdict.FAILED, Remedy.DRAIN, SERVER_AWAY)
    assert found.text == "/home does not answer within 1.25 s: NFS server 10.0.0.1 does not answer"


def test_server_that_is_silent_for_a_short_time_is_only_a_warning(tmp_path: Path):
    seen = SeenBefore()
    for at in (0.0, 10.0, 20.0, AWAY_S - 1):
        found = judged(tmp_path, HOME, hanging=("/home",), away="10.0.0.1", at=at, seen=seen)
        assert (found.verdict, found.code) == (Verdict.WARNED, SERVER_AWAY)
    after = judged(tmp_path, HOME, hanging=("/home",), at=AWAY_S, seen=seen)
    assert after.verdict is Verdict.WARNED and after.text.endswith("did not answer until recently")


def test_few_checks_do_not_prove_that_a_server_is_away(tmp_path: Path):
    seen = SeenBefore()
    judged(tmp_path, HOME, hanging=("/home",), away="10.0.0.1", at=0.0, seen=seen)
    found = judged(tmp_path, HOME, hanging=("/home",), away="10.0.0.1", at=10 * AWAY_S, seen=seen)
    assert found.verdict is Verdict.WARNED, "the node was not checked in between"


@pytest.mark.parametrize("hanging", [(), ("/home",)])
def test_overloaded_server_that_answers_now_and_then_is_not_away(tmp_path: Path, hanging: tuple[str, ...]):
    seen = SeenBefore()
    for round_ in range(20):
        began = round_ * 3 * AWAY_S / 4
        judged(tmp_path, HOME, hanging=("/home",), away="10.0.0.1", at=began, seen=seen)
        found = judged(tmp_path, HOME, hanging=("/home",), away="10.0.0.1", at=began + AWAY_S / 2, seen=seen)
        assert found.verdict is Verdict.WARNED
        found = judged(tmp_path, HOME, hanging=hanging, at=began + AWAY_S / 2 + 1, seen=seen)
        assert found.verdict is (Verdict.WARNED if hanging else Verdict.PASSED)


def test_server_is_not_asked_while_file_systems_answer(tmp_path: Path):
    assert judged(tmp_path, HOME, away="10.0.0.1", seen=SeenBefore()).verdict is Verdict.PASSED


def test_one_hanging_file_system_whose_server_answers_is_enough_for_a_reboot(tmp_path: Path):
    both = ("/home", "/team")
    found = judged(tmp_path, HOME + TEAM, hanging=both, away="10.0.0.1", seen=SeenBefore())
    assert found.remedy is Remedy.REBOOT and found.text.startswith("/team does not answer within 1.25 s; /home")
    found = silent_for_long(tmp_path, HOME + TEAM, hanging=both, away="10.0.0.1\n10.0.0.2", seen=SeenBefore())
    assert (found.remedy, found.code) == (Remedy.DRAIN, SERVER_AWAY)


def test_node_has_time_to_connect_again_after_its_server_was_away(tmp_path: Path):
    seen = SeenBefore()
    silent_for_long(tmp_path, HOME, hanging=("/home",), away="10.0.0.1", until=1000.0, seen=seen)
    again = judged(tmp_path, HOME, hanging=("/home",), at=1000.0 + RECONNECT_S - 1, seen=seen)
    assert (again.remedy, again.code) == (Remedy.DRAIN, SERVER_AWAY)
    assert again.text.endswith("NFS server 10.0.0.1 did not answer until recently")
    assert judged(tmp_path, HOME, hanging=("/home",), at=1000.0 + RECONNECT_S, seen=seen).remedy is Remedy.REBOOT
    other = judged(tmp_path, TEAM, hanging=("/team",), at=1001.0, seen=seen)
    assert other.remedy is Remedy.REBOOT, "the outage of one server explains nothing about another"


def test_missing_mount_is_the_fault_of_the_node(tmp_path: Path):
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/fstab").write_text("10.0.0.1:/srv/home /home nfs4 defaults 0 0\n")
    assert judged(tmp_path, "", away="10.0.0.1", seen=SeenBefore()).remedy is Remedy.REBOOT


@pytest.mark.parametrize(
    ("kind", "options", "server"),
    [
        ("nfs4", "rw,vers=4.2,proto=tcp,addr=10.0.0.5", NfsServer("10.0.0.5", 2049, 4)),
        ("nfs4", "rw,vers=4.1,proto=tcp6,port=20049,addr=fd00::5", NfsServer("fd00::5", 20049, 4)),
        ("nfs", "rw,vers=3,port=0,proto=tcp,mountport=1,addr=10.0.0.5", NfsServer("10.0.0.5", 2049, 3)),
        ("nfs4", "rw,vers=4.2,proto=rdma,port=20049,addr=10.0.0.5", None),
        ("nfs", "rw,vers=3,proto=udp,addr=10.0.0.5", None),
        ("nfs4", "rw,hard", None),
        ("lustre", "rw,addr=10.0.0.5", None),
    ],
)
def test_server_is_read_from_the_options_of_the_mount(kind: str, options: str, server: NfsServer | None):
    assert nfs_server(Mount("x:/y", "/y", kind, options)) == server


@contextmanager
def server_with(answer: bytes | None) -> Iterator[tuple[int, list[bytes]]]:
    """Run a server that accepts a connection, reads and sends `answer`; None: it never answers."""
    got: list[bytes] = []
    done = threading.Event()

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            got.append(connection.recv(100))
            if answer is None:
                done.wait(10)
            else:
                connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1], got
        done.set()


def test_server_that_answers_an_empty_request_is_there():
    with server_with(b"\x80\0\0\x18" + bytes(24)) as (port, got):
        assert nfs_answers("127.0.0.1", port, 4, 5)
    words = [int.from_bytes(got[0][at : at + 4], "big") for at in range(0, 44, 4)]
    assert words == [0x80000000 | 40, 1, 0, 2, 100003, 4, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("answer", [None, b""])
def test_server_that_accepts_connections_and_does_not_answer_is_away(answer: bytes | None):
    with server_with(answer) as (port, _):
        assert not nfs_answers("127.0.0.1", port, 4, 0.3)


def test_server_with_a_closed_port_is_away():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert not nfs_answers("127.0.0.1", port, 4, 5)


def test_server_with_too_little_time_to_answer_is_not_away():
    node = LocalNode(Expected("n1"))
    with server_with(None) as (port, _):
        node.until = time.monotonic() + 0.2
        with pytest.raises(NoAnswer, match="out of time"):
            node.nfs_answers("127.0.0.1", port, 4, timeout_s=5)


def test_server_that_is_silent_for_the_whole_time_limit_does_not_answer():
    node = LocalNode(Expected("n1"))
    with server_with(None) as (port, _):
        node.until = time.monotonic() + 60
        assert not node.nfs_answers("127.0.0.1", port, 4, timeout_s=0.2)
