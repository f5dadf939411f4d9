"""Tests that commands which need no Linux work on Windows.

There is no Windows here. Instead, modules that Python lacks there are removed in a separate process before our code is
imported. That process forks for every command, so that libraries are imported once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import CommandResult

pytestmark = pytest.mark.cluster  # real processes: too slow for the unit part
SOURCE = Path(__file__).parents[2] / "src"
FILE = "name: small\ntarget: local\npartitions: [{name: train, nodes: 2}]\n"
AS_ON_WINDOWS = """
import os, platform, random, select, signal, socket, sys, tempfile  # the standard library knows what it may use where
import json, subprocess, typing
import click, pydantic, yaml

fork = os.fork
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
import dalsegno.cli.main, dalsegno.spec.load, dalsegno.spec.resolve
failed = ""
for name in dalsegno.cli.main.COMMANDS:
    try:
        assert dalsegno.cli.main.cli.get_command(click.Context(dalsegno.cli.main.cli), name)
    except Exception as error:
        failed += f"{name}: {error!r}\\n"
for line in sys.stdin:
    cwd, *words = json.loads(line)
    pid = fork()
    if pid == 0:
        os.chdir(cwd)
        os.environ["HOME"] = cwd
        for number, name in ((0, os.devnull), (1, "stdout"), (2, "stderr")):
            os.dup2(os.open(name, os.O_RDWR | os.O_CREAT, 0o600), number)
        sys.argv = ["dalsegno", *words]
        if words == ["import every command"]:
            sys.exit(failed or 0)
        else:
            dalsegno.cli.main.main()
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
Run = Callable[..., CommandResult]


@pytest.fixture(scope="module")
def windows() -> Iterator[subprocess.Popen[str]]:
    env = {"PATH": os.devnull, "PYTHONPATH": str(SOURCE)}  # Windows has none of Slurm's commands
    argv = [sys.executable, "-c", AS_ON_WINDOWS]
    with subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.communicate(timeout=60)


@pytest.fixture
def dalsegno(tmp_path: Path, windows: subprocess.Popen[str]) -> Run:
    def run(*words: str) -> CommandResult:
        assert windows.stdin and windows.stdout
        print(json.dumps([str(tmp_path), *words]), file=windows.stdin, flush=True)
        code = int(windows.stdout.readline())
        return CommandResult(code, (tmp_path / "stdout").read_text(), (tmp_path / "stderr").read_text())

    return run


@pytest.mark.parametrize(
    "words", [["--help"], ["--version"], ["schema"], ["init"], ["validate"], ["validate", "--json"]]
)
def test_commands_that_need_no_linux_work_on_windows(dalsegno: Run, tmp_path: Path, words: list[str]) -> None:
    if words[0] != "init":
        (tmp_path / "cluster.yaml").write_text(FILE)
    done = dalsegno(*words)
    assert (done.returncode, done.stderr if words[0] != "init" else "") == (0, ""), done.stderr


def test_faulty_cluster_file_is_explained_on_windows(dalsegno: Run, tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(FILE.replace("nodes", "nodse"))
    done = dalsegno("validate")
    assert done.returncode == 1 and "nodse" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["plan", "up", "ls", "status", "down", "runs", "events", "shell", "env", "why"])
def test_commands_that_need_linux_say_so_on_windows(dalsegno: Run, tmp_path: Path, command: str) -> None:
    """Some commands report instead that there is no local cluster."""
    (tmp_path / "cluster.yaml").write_text(FILE)
    done = dalsegno(command)
    assert "Traceback" not in done.stderr
    assert done.returncode in (0, 1, 2) and done.stderr + done.stdout


def test_plan_of_a_local_cluster_names_linux_on_windows(dalsegno: Run, tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(FILE)
    done = dalsegno("plan")
    assert done.returncode == 1 and "Linux" in done.stderr


def test_every_command_can_be_imported_on_windows(dalsegno: Run) -> None:
    """A command that needs Linux must still show its help."""
    done = dalsegno("import every command")
    assert (done.returncode, done.stderr) == (0, "")
