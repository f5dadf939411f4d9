"""Tests that need no host: the fake, the output of commands, password files, and the command line of `ssh`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dalsegno.errors import DalsegnoError
from dalsegno.system.processes import Completed
from dalsegno.system.ssh import (
    FakeHostRunner,
    HostCall,
    SshAddress,
    SshConnections,
    SshError,
    SshFault,
    client_argv,
    read_password_file,
)

ADDRESS = SshAddress("gpu-1", "10.0.0.1", "admin", 2222, "/keys/a", "me@bastion:2200")


def test_fake_answers_records_calls_and_passes_lines_on():
    lines: list[str] = []
    fake = FakeHostRunner(lambda call: f"one\n{call.host}\n")
    assert fake.run("gpu-1", ["a"], stdin=b"x", root=True, on_line=lines.append).exit_code == 0
    assert lines == ["one", "gpu-1"]
    assert fake.calls == [HostCall("gpu-1", ("a",), b"x", root=True)]


def test_fake_raises_an_error_and_keeps_the_others():
    error = SshError("gpu-2", SshFault.CUT, "lost", hint="try again")
    fake = FakeHostRunner(lambda call: error if call.host == "gpu-2" else Completed(call.argv, 3))
    found = fake.each(["gpu-1", "gpu-2"], lambda host: fake.run(host, ["a"]).exit_code)
    assert found == {"gpu-1": 3, "gpu-2": error}


def test_shell_on_a_host_asks_before_it_accepts_a_key():
    argv = client_argv(SshAddress("a", "10.0.0.1"), terminal=True)
    assert argv == ["ssh", "-a", "-x", "-o", "StrictHostKeyChecking=ask", "--", "10.0.0.1"]


def test_command_without_terminal_never_accepts_an_unknown_key():
    argv = client_argv(SshAddress("a", "10.0.0.1", "ann"), ["echo", "a b"], known_hosts=Path("/k%h"))
    trust = ["-a", "-x", "-o", "StrictHostKeyChecking=yes", "-o", "UserKnownHostsFile=/k%%h"]
    assert argv == ["ssh", *trust, "-l", "ann", "--", "10.0.0.1", "echo 'a b'"]


def test_jump_host_gets_the_same_key_and_the_same_check():
    argv = client_argv(ADDRESS, ["true"], terminal=True)
    proxy = next(word for word in argv if word.startswith("ProxyCommand="))
    assert proxy == (
        "ProxyCommand=ssh -a -x -o StrictHostKeyChecking=ask -i /keys/a -p 2200 -W '[%h]:%p' -- me@bastion"
    )
    assert argv[-4:] == ["-t", "--", "10.0.0.1", "true"]


def test_password_file_is_read_only_if_nobody_else_can_read_it(tmp_path):
    path = tmp_path / "password"
    path.write_text("correct horse\nsecond line\n")
    path.chmod(0o600)
    assert read_password_file(path) == "correct horse"
    path.chmod(0o640)
    with pytest.raises(DalsegnoError, match="open to other users") as raised:
        read_password_file(path)
    assert "chmod 600" in raised.value.hint and "horse" not in raised.value.what


@pytest.mark.parametrize("content", ["", "\n", "a\0b\n"])
def test_password_file_without_password_is_refused(tmp_path, content):
    path = tmp_path / "password"
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(DalsegnoError, match="has no password"):
        read_password_file(path)


def test_password_file_that_is_missing_or_a_pipe_is_refused_without_waiting(tmp_path):
    with pytest.raises(DalsegnoError, match="cannot be read"):
        read_password_file(tmp_path / "missing")
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(DalsegnoError, match="open to other users"):
        read_password_file(tmp_path / "pipe")


def test_output_is_passed_on_line_by_line_and_long_lines_in_pieces():
    client = pytest.importorskip("dalsegno.system.ssh_client")
    lines: list[str] = []
    output = client.CommandOutput(lines.append)
    for data in (b"a", b"b\nc\r", b"\nd", b"x" * client.MAX_LINE, b"end"):
        output.add(output.stdout, data)
    output.add(output.stderr, b"to stderr\n")
    output.finish()
    assert lines[:2] == ["ab", "c"]
    assert "".join(lines[2:]) == "d" + "x" * client.MAX_LINE + "end"


def test_last_lines_are_bounded_and_safe_to_print():
    client = pytest.importorskip("dalsegno.system.ssh_client")
    output = client.CommandOutput(None)
    output.add(output.stdout, b"\x1b[2J" + b"y" * 100_000 + b"\n" + b"n\n" * 1000 + "\u202ereversed\n".encode())
    shown = output.last_lines()
    assert len(shown.splitlines()) == client.LAST_LINES and "\x1b" not in shown and "\u202e" not in shown


def test_too_much_output_is_an_error():
    client = pytest.importorskip("dalsegno.system.ssh_client")
    output = client.CommandOutput(None)
    with pytest.raises(client.OutputLimitExceeded):
        for _ in range(100):
            output.add(output.stderr, bytes(1 << 20))
    assert len(output.stderr) <= client.MAX_OUTPUT + (1 << 20)


def test_too_many_lines_are_an_error():
    client = pytest.importorskip("dalsegno.system.ssh_client")
    lines: list[str] = []
    output = client.CommandOutput(lines.append)
    with pytest.raises(client.OutputLimitExceeded):
        output.add(output.stdout, b"\n" * (client.MAX_LINES + 1))
    assert len(lines) == client.MAX_LINES


def test_settings_do_not_show_the_password():
    connections = SshConnections([], sudo_password="correct horse")
    assert "horse" not in repr(vars(connections))
