"""Tests of the dialog with sudo on a host: what is shown, and when the password is written."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.waiting import eventually

from dalsegno.errors import DalsegnoError
from dalsegno.spec.facts import SshAccess, SshHost
from dalsegno.system.sudo_session import SudoDialog, session_argv, sudo_argv
from dalsegno.targets.ssh.shell import root_argv

MARK = "dalsegno-0123456789abcdef"
ASK, GO = f"{MARK}-ask".encode(), f"{MARK}-go".encode()
ANSWER, BEGIN = b"secret\n", MARK.encode() + b"\n"


def talk(*output: bytes) -> tuple[bytes, bytes]:
    """Give the output to a new dialog; return everything that it shows and everything that it answers."""
    dialog = SudoDialog("secret", MARK)
    steps = [dialog(part) for part in output]
    return b"".join(shown for shown, _ in steps) + dialog.rest(), b"".join(answer for _, answer in steps)


def test_password_is_written_once_when_sudo_asks():
    assert talk(b"lecture\n", ASK, GO, b"output\n") == (b"lecture\noutput\n", ANSWER + BEGIN)


def test_password_is_not_written_where_sudo_does_not_ask():
    assert talk(GO, b"output\n") == (b"output\n", BEGIN)


def test_marks_that_arrive_in_pieces_are_recognised():
    text = b"Warning: - dalsegno-\n" + ASK + b"\r\n" + GO + b"output\n"
    pieces = [text[at : at + 1] for at in range(len(text))]
    assert talk(*pieces) == (b"Warning: - dalsegno-\noutput\n", ANSWER + BEGIN)


def test_command_that_prints_the_question_gets_no_password():
    assert talk(GO, ASK) == (ASK, BEGIN)


def test_second_question_is_reported_as_a_wrong_password():
    with pytest.raises(DalsegnoError, match="refuses the password") as raised:
        talk(ASK, b"Sorry, try again.\n", ASK)
    assert "secret" not in str(raised.value) and "sudo_password_file" in raised.value.hint


def test_message_of_a_host_without_the_command_is_shown_in_full():
    assert talk(b"asks is not in the sudoers file.\ndalse") == (b"asks is not in the sudoers file.\ndalse", b"")


# The program itself, with a shell in the place of ssh and a stand-in for sudo

NO_PASSWORD = '#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done; shift\nexec "$@"\n'
RUN = "import sys; from dalsegno.system.sudo_session import main; sys.exit(main(sys.argv[2:]))"


def start(folder: Path, remote: str) -> subprocess.Popen[bytes]:
    """Start the program with this shell script as its ssh."""
    (folder / "sudo").write_text(NO_PASSWORD)
    (folder / "sudo").chmod(0o755)
    password = folder / "password"
    password.touch(0o600)
    password.write_text("secret\n")
    argv = [sys.executable, "-c", RUN, *session_argv(str(password), MARK, ["sh", "-c", remote])]
    env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    pipe = subprocess.PIPE
    return subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, env=env, start_new_session=True)


def test_password_never_reaches_the_command_even_if_another_asked_for_it(tmp_path: Path):
    """As a jump host could, whose messages are in the same stream as those of the host."""
    command = shlex.join(sudo_argv(["cat"], MARK))
    process = start(tmp_path, f"printf %s {ASK.decode()} >&2; sleep 0.3; exec {command}")
    assert process.communicate(b"one\ntwo\n", timeout=30) == (b"one\ntwo\n", b"")
    assert process.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signal_ends_ssh_and_the_command_on_the_host(tmp_path: Path, number: signal.Signals):
    """As on a host, the command is in a session of its own, and its parent ends with the connection."""
    command = shlex.join(sudo_argv(["sh", "-c", "echo $$; sleep 600; true"], MARK))
    process = start(tmp_path, f"exec 3<&0; setsid {command} <&3 & exec 3<&-; wait")
    assert process.stdin and process.stdout and process.stderr
    remote = int(process.stdout.readline())
    assert os.path.exists(f"/proc/{remote}")
    process.send_signal(number)
    assert process.wait(timeout=30) == 128 + number
    eventually(lambda: not is_running(remote))
    for stream in (process.stdin, process.stdout, process.stderr):
        stream.close()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_host_gets_no_terminal_on_which_a_program_answers():
    """Other users of the host can write to a terminal there, and could ask for the password."""
    host, access = SshHost("n1", "192.0.2.1", "ops"), SshAccess(sudo_password_file="/password")
    read, write = os.openpty()
    with os.fdopen(write, "r+b", buffering=0), os.fdopen(read, "r+b", buffering=0):
        code = (
            "from dalsegno.spec.facts import SshAccess, SshHost\n"
            "from dalsegno.targets.ssh.shell import root_argv\n"
            f"import os; os.write(2, repr(root_argv({host!r}, ['id'], {access!r}, terminal=True)).encode())\n"
        )
        done = subprocess.run([sys.executable, "-c", code], stdin=write, stdout=write, stderr=subprocess.PIPE)
    argv = done.stderr.decode()
    assert "'-t'" in argv and "sudo -- id" in argv and "sudo-session" not in argv
    assert "-t" not in root_argv(host, ["id"], access, terminal=False)
    assert "sudo-session" in root_argv(host, ["id"], access, terminal=False)
