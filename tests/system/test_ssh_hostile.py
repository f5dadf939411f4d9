"""Tests of connections to hostile servers: silent ones, ones that send too much, and ones with a false identity."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dalsegno.system.ssh import SshAddress, SshConnections, SshError, SshFault

asyncssh = pytest.importorskip("asyncssh")


@pytest.fixture(autouse=True)
def own_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)


@contextmanager
def server(talk: Callable[[socket.socket], None]) -> Iterator[int]:
    """Serve each connection with `talk` on a port of loopback, and yield the port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    try:
                        talk(connection)
                    except OSError:
                        continue

        threading.Thread(target=serve, daemon=True).start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)


def fault_at(port: int, tmp_path: Path, **settings: object) -> SshError:
    known = tmp_path / "known_hosts"
    known.touch()
    address = SshAddress("gpu-1", "127.0.0.1", "root", port)
    with SshConnections([address], known_hosts=known, **settings) as ssh, pytest.raises(SshError) as raised:
        ssh.run("gpu-1", ["true"])
    assert raised.value.what.isprintable() and raised.value.hint.isprintable()
    assert len(raised.value.what) < 1000
    return raised.value


def test_server_that_says_nothing_is_left_after_the_time_limit(tmp_path):
    with server(lambda connection: connection.recv(1 << 16) and time.sleep(30)) as port:
        started = time.monotonic()
        assert fault_at(port, tmp_path, connect_timeout_s=0.5).fault is SshFault.UNREACHABLE
        assert time.monotonic() - started < 20


def test_server_that_speaks_another_protocol_is_reported(tmp_path):
    with server(lambda connection: connection.sendall(b"HTTP/1.1 400 \x1b]0;owned\x07\r\n\r\n")) as port:
        assert fault_at(port, tmp_path).fault in (SshFault.PROTOCOL, SshFault.CUT)


def test_endless_greeting_is_left(tmp_path):
    def flood(connection: socket.socket) -> None:
        while True:
            connection.sendall(b"\x1b[2J" * 1000 + b"\n")

    with server(flood) as port:
        fault_at(port, tmp_path, connect_timeout_s=20)


class Impostor(asyncssh.SSHServer):
    """A server that lets everybody in, or ends the connection with a message that draws on the terminal.

    It answers nothing for some time after a login, as sshd does while PAM opens the session.
    """

    def __init__(self, polite: bool, silent_s: float = 0.0) -> None:
        self.polite, self.silent_s = polite, silent_s

    def auth_completed(self) -> None:
        time.sleep(self.silent_s)

    def begin_auth(self, username: str) -> bool:
        if not self.polite:
            raise asyncssh.DisconnectError(2, "\x1b[31mroot password:\u202e" + "x" * 10_000)
        return False


@contextmanager
def impostor(
    polite: bool, answer: Callable[[asyncssh.SSHServerProcess], None], known: Path, silent_s: float = 0.0
) -> Iterator[int]:
    loop, key = asyncio.new_event_loop(), asyncssh.generate_private_key("ssh-ed25519")
    threading.Thread(target=loop.run_forever, daemon=True).start()

    async def listen() -> asyncssh.SSHAcceptor:
        return await asyncssh.listen(
            "127.0.0.1", 0, server_host_keys=[key], server_factory=lambda: Impostor(polite, silent_s),
            process_factory=answer, encoding=None,
        )  # fmt: skip

    acceptor = asyncio.run_coroutine_threadsafe(listen(), loop).result(30)
    port = acceptor.get_port()
    known.write_text(f"[127.0.0.1]:{port} {key.export_public_key().decode()}")
    try:
        yield port
    finally:
        loop.call_soon_threadsafe(acceptor.close)
        loop.call_soon_threadsafe(loop.stop)


def test_last_lines_of_a_server_are_bounded_and_safe_to_print(tmp_path):
    with impostor(False, lambda process: process.exit(0), tmp_path / "known_hosts") as port:
        error = fault_at(port, tmp_path)
    assert "root password:\\u202e" in error.what and error.fault is SshFault.PROTOCOL


def test_session_that_ends_without_exit_code_counts_as_cut_off(tmp_path):
    with impostor(True, lambda process: process.close(), tmp_path / "known_hosts") as port:
        assert fault_at(port, tmp_path).fault is SshFault.CUT


@pytest.mark.parametrize(("silent_s", "opens"), [(1.5, True), (8.0, False)])
def test_host_may_be_silent_for_longer_while_it_opens_the_first_session(tmp_path: Path, silent_s: float, opens: bool):
    known = tmp_path / "known_hosts"
    with impostor(True, lambda process: process.exit(0), known, silent_s) as port:
        address = SshAddress("gpu-1", "127.0.0.1", "root", port)
        with SshConnections([address], known_hosts=known, keepalive_s=0.2) as ssh:
            if opens:
                assert ssh.run("gpu-1", ["true"]).exit_code == 0
            else:
                with pytest.raises(SshError) as raised:
                    ssh.run("gpu-1", ["true"])
                assert raised.value.fault is SshFault.CUT


def test_host_that_falls_silent_after_its_first_session_is_cut_off(tmp_path: Path):
    sessions = []

    def answer(process: asyncssh.SSHServerProcess) -> None:
        sessions.append(process)
        if len(sessions) > 1:
            time.sleep(2.0)  # longer than SILENT_INTERVALS, and shorter than FIRST_SILENT_INTERVALS
        process.exit(0)

    known = tmp_path / "known_hosts"
    with impostor(True, answer, known) as port:
        address = SshAddress("gpu-1", "127.0.0.1", "root", port)
        with SshConnections([address], known_hosts=known, keepalive_s=0.2) as ssh:
            assert ssh.run("gpu-1", ["true"]).exit_code == 0
            with pytest.raises(SshError) as raised:
                ssh.run("gpu-1", ["true"])
            assert raised.value.fault is SshFault.CUT
