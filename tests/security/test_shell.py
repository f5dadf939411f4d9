"""`shell --user` as root: the user gets their own session and terminal, and nothing of root's.

A pseudo-terminal stands for root's terminal, with a session leader that runs `dalsegno` as a shell would. Root would
see all output on this terminal, and root's shell would run everything that is typed there.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.conftest import Cli, at_home, taken_down
from tests.waiting import PATIENCE_S, eventually

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user"),
]
FILE = """
name: one
target: local
partitions:
  - {name: train, nodes: 1, cpus: 2, memory: 1G, default: true}
users:
  - {name: eve}
slurm: {accounting: false}
health: {mode: observe}
"""
# Root's shell: it runs the command, and then the next line that is typed.
ROOTS_SHELL = '"$@"; echo "over $?"; read next; echo "does <$next>"'
# Types a command for the next reader of the terminal.
TYPE_FOR_ROOT = """
import fcntl, sys, termios
for name in ("/dev/stdin", "/dev/stdout", "/dev/stderr", "/dev/tty"):
    try:
        with open(name, "rb") as tty:
            for letter in b"touch OWNED\\n":
                fcntl.ioctl(tty, termios.TIOCSTI, bytes([letter]))
    except OSError as error:
        print(name, error.strerror)
"""


@pytest.fixture(scope="module")
def cluster(cache: Path) -> Iterator[Cli]:
    with taken_down(at_home(cache)) as cli:
        cli.ok("up", cli.file(FILE))
        yield cli


class Terminal:
    """Root's terminal with a running command."""

    def __init__(self, cli: Cli, *words: str, rows: int = 33, columns: int = 101) -> None:
        self.seen = ""
        self.pid, self.master = pty.fork()
        if self.pid == 0:
            try:
                fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
                os.chdir(cli.home)
                os.execvpe("sh", ["sh", "-c", ROOTS_SHELL, "sh", *cli.argv("shell", "-u", "eve", *words)], cli.env)
            finally:
                os._exit(99)

    @property
    def name(self) -> str:
        return f"/dev/pts/{struct.unpack('I', fcntl.ioctl(self.master, 0x80045430, bytes(4)))[0]}"  # TIOCGPTN

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def until(self, words: str) -> str:
        """Read until a pattern was printed."""
        until = time.monotonic() + PATIENCE_S
        while not re.search(words, self.seen):
            assert time.monotonic() < until, f"no {words!r} in {self.seen!r}"
            self._read(0.05)
        return self.seen

    def over(self) -> int:
        """Wait until the command ends, and return its exit code. Root's shell still runs."""
        self.until(r"over \d+\r")
        return int(re.findall(r"over (\d+)\r", self.seen)[-1])

    def leave(self) -> str:
        """End root's shell, and return the last line it read."""
        self.type("\n")
        self.until(r"does <.*>")
        os.waitpid(self.pid, 0)
        os.close(self.master)
        return re.findall(r"does <(.*)>", self.seen)[-1]

    def _read(self, within_s: float) -> None:
        while select.select([self.master], [], [], within_s)[0]:
            try:
                self.seen += os.read(self.master, 65536).decode(errors="replace")
            except OSError:
                time.sleep(within_s)
                return


def test_user_has_another_terminal_than_root_and_owns_it(cluster: Cli) -> None:
    roots = Terminal(cluster, "--", "sh", "-c", 'stat -c "%U %n" $(tty); ls -l /proc/self/fd; stty size; exit 7')
    assert roots.over() == 7
    assert re.search(r"^eve /dev/pts/\d+\r?$", roots.seen, re.MULTILINE), roots.seen
    assert f"-> {roots.name}\r" not in roots.seen and "33 101" in roots.seen
    assert roots.leave() == ""


@pytest.mark.parametrize("stdin", ["terminal", "file"])
def test_user_cannot_type_for_root(cluster: Cli, stdin: str) -> None:
    script = cluster.home / "type.py"
    script.write_text(TYPE_FOR_ROOT)
    words = ["python3", str(script)] if stdin == "terminal" else ["sh", "-c", f"python3 {script} < /dev/null"]
    roots = Terminal(cluster, "--", *words)
    assert roots.over() == 0
    assert roots.leave() == ""


def test_background_process_of_the_user_does_not_keep_roots_terminal(cluster: Cli) -> None:
    uid = int(cluster.ok("shell", "-u", "eve", "--", "id", "-u"))
    roots = Terminal(cluster, "--", "sh", "-c", "trap '' HUP; sleep 300 & exit 3")
    assert roots.over() == 3, "without waiting for it"
    eves = [path for path in Path("/proc").glob("[0-9]*") if _uid(path) == uid]
    assert eves and [link for path in eves for link in path.glob("fd/*") if _leads_to(link, roots.name)] == []
    roots.leave()
    cluster.ok("shell", "--", "pkill", "-u", "eve", "sleep")


def _uid(process: Path) -> int:
    with contextlib.suppress(OSError):
        return process.stat().st_uid
    return -1


def _leads_to(link: Path, name: str) -> bool:
    with contextlib.suppress(OSError):
        return os.readlink(link) == name
    return False


def test_job_control_window_and_keys_work_in_a_shell_of_the_user(cluster: Cli) -> None:
    roots = Terminal(cluster, "--", "bash", "--norc", "-i")
    roots.type("id -un; tty\n")
    roots.until(r"eve\r\n/dev/pts/")
    roots.type("sleep 300\n")
    time.sleep(0.5)  # time for the shell to start it
    roots.type("\x1a")
    roots.until(r"Stopped\s+sleep 300")
    roots.type("fg\n")
    roots.until(r"(?s)\$ fg.*sleep 300")
    time.sleep(0.5)
    roots.type("\x03")
    roots.type("echo code $?\n")
    roots.until(r"code 130")
    fcntl.ioctl(roots.master, termios.TIOCSWINSZ, struct.pack("HHHH", 44, 55, 0, 0))
    roots.type("stty size\n")
    roots.until(r"44 55")
    roots.type("exit 5\n")
    assert roots.over() == 5
    roots.leave()


def test_closed_terminal_ends_the_session(cluster: Cli) -> None:
    roots = Terminal(cluster, "--", "sh", "-c", "echo begun; sleep 98765")
    roots.until("begun")
    os.close(roots.master)
    os.waitpid(roots.pid, 0)
    eventually(lambda: cluster.run("shell", "--", "pgrep", "-fx", "sleep 98765").code == 1)


def test_pipes_and_exit_codes_pass_through(cluster: Cli) -> None:
    assert cluster.run("shell", "-u", "eve", "--", "sh", "-c", "echo out; echo err >&2; exit 9") == (
        type(cluster.run("ls"))(9, "out\n", "err\n")
    )
    assert cluster.run("shell", "-u", "eve", "--", "/no/such/command").code == 127
    assert cluster.run("shell", "-u", "eve", "--", "sh", "-c", "kill -9 $$").code == 137
    assert cluster.run("shell", "-u", "eve", "--", "sh", "-c", "ps -o tty= -p $$").out.split() == ["?"]
