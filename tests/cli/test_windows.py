"""Tests that commands which need no Linux work on Windows.

There is no Windows here. Instead, modules that Python lacks there are removed in a separate process before our code is
imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
FILE = "name: small\ntarget: local\npartitions: [{name: train, nodes: 2}]\n"
AS_ON_WINDOWS = """
import os, platform, random, select, signal, socket, sys, tempfile  # the standard library knows what it may use where
import subprocess, typing
import click, pydantic, yaml

signals = [name for name in dir(signal) if name.startswith("SIG") and name not in
           ("SIGINT", "SIGTERM", "SIGABRT", "SIGFPE", "SIGILL", "SIGSEGV", "SIG_DFL", "SIG_IGN")]
gone = {
    signal: [*signals, "pthread_sigmask", "sigwait", "sigwaitinfo", "sigtimedwait", "setitimer", "alarm", "pause"],
    os: ["geteuid", "getuid", "getegid", "getgid", "getgroups", "fork", "forkpty", "openpty", "setsid", "setuid",
         "setgid", "killpg", "getpgid", "chown", "fchown", "lchown", "fchmod", "mkfifo", "posix_spawn", "uname",
         "O_NOFOLLOW", "O_CLOEXEC", "O_DIRECTORY", "O_TMPFILE", "O_NONBLOCK", "O_PATH", "WNOHANG",
         "sched_getaffinity", "initgroups", "getgrouplist", "statvfs", "pipe2", "memfd_create", "pidfd_open"],
    select: ["poll", "epoll"],
    socket: ["AF_UNIX", "SCM_RIGHTS", "SO_PEERCRED", "CMSG_LEN", "send_fds", "recv_fds"],
}
for module, names in gone.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
for name in ("fcntl", "pwd", "grp", "spwd", "termios", "tty", "pty", "resource", "syslog", "posix_ipc"):
    sys.modules[name] = None  # to import it fails
platform.system = lambda: "Windows"
from dalsegno.cli.main import main
main()
"""


def dalsegno(cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(SOURCE), "HOME": str(cwd)}
    argv = [sys.executable, "-c", AS_ON_WINDOWS, *words]
    return subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "words", [["--help"], ["--version"], ["schema"], ["init"], ["validate"], ["validate", "--json"]]
)
def test_commands_that_need_no_linux_work_on_windows(tmp_path: Path, words: list[str]) -> None:
    if words[0] != "init":
        (tmp_path / "cluster.yaml").write_text(FILE)
    done = dalsegno(tmp_path, *words)
    assert (done.returncode, done.stderr if words[0] != "init" else "") == (0, ""), done.stderr


def test_faulty_cluster_file_is_explained_on_windows(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(FILE.replace("nodes", "nodse"))
    done = dalsegno(tmp_path, "validate")
    assert done.returncode == 1 and "nodse" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["plan", "up", "ls", "status", "down", "runs", "events", "shell", "env", "why"])
def test_commands_that_need_linux_say_so_on_windows(tmp_path: Path, command: str) -> None:
    """Or they find nothing, because there is no local cluster."""
    (tmp_path / "cluster.yaml").write_text(FILE)
    done = dalsegno(tmp_path, command)
    assert "Traceback" not in done.stderr
    assert done.returncode in (0, 1, 2) and done.stderr + done.stdout


def test_plan_of_a_local_cluster_names_linux_on_windows(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(FILE)
    done = dalsegno(tmp_path, "plan")
    assert done.returncode == 1 and "Linux" in done.stderr


def test_every_command_can_be_imported_on_windows(tmp_path: Path) -> None:
    """A command that needs Linux must still show its help."""
    script = AS_ON_WINDOWS.replace(
        "main()\n",
        "import click\nfrom dalsegno.cli.main import COMMANDS, cli\n"
        "for name in COMMANDS: assert cli.get_command(click.Context(cli), name)\n",
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env={"PYTHONPATH": str(SOURCE)}, stderr=subprocess.PIPE, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
