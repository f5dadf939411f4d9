"""A whole cluster through a login whose sudo asks for a password: created, used, changed and removed.

The tests share a head and a node, and run in order. The last one removes the cluster.
"""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.ssh.cluster_operator import Operator
from tests.ssh.hosts import SUDO_PASSWORD, reason_to_skip, running_hosts
from tests.waiting import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
MORE = """\
users: [{name: ada}]
storage: [{name: team, mount: /shared, type: existing, home: true}, {name: disk, mount: /scratch, type: scratch}]
health: {mode: observe}
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    if reason := reason_to_skip():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("sudo")
    shared = folder / "shared"
    shared.mkdir()
    shared.chmod(0o755)
    with running_hosts(2, folder / "hosts", names=["head", "n1"], shared=shared) as rack:
        operator = Operator(folder, rack)
        operator.clear_hosts()
        operator.write(nodes="n1", more=MORE, user="asks")
        text = operator.file.read_text()
        operator.file.write_text(text.replace("ssh:\n", f"ssh:\n  sudo_password_file: {write_password(operator)}\n"))
        operator.up()
        yield operator


def write_password(lab: Operator, password: str = SUDO_PASSWORD) -> str:
    """Write the file with the password; return its path."""
    path = lab.folder / "sudo-password"
    path.touch(mode=0o600)
    path.write_text(f"{password}\n")
    return str(path)


def test_cluster_runs_jobs_and_reports_its_status(lab):
    assert lab.on_head("runuser", "-u", "ada", "--", "srun", "hostname") == "n1\n"
    status = json.loads(lab.dalsegno("status", "--json").out)
    assert status["phase"] == "up", status["problems"]
    assert "nothing to do" in lab.dalsegno("plan", str(lab.file)).out


def test_storage_is_checked_from_the_nodes(lab):
    result = json.loads(lab.dalsegno("storage", "check", "--quick", "--json").out)
    assert result["ok"], result


def test_users_are_added_changed_and_removed(lab):
    lab.dalsegno("user", "add", "bea")
    lab.dalsegno("user", "edit", "bea", "--full-name", "Bea Lind")
    assert ":Bea Lind:/shared/bea:" in lab.rack["n1"].run("getent", "passwd", "bea")
    lab.dalsegno("user", "rm", "bea", "--remove-home")
    assert lab.rack["n1"].run("sh", "-c", "getent passwd bea; ls -d /shared/bea 2>/dev/null; true") == ""


def test_command_of_another_user_gets_its_input_and_not_the_password(lab):
    as_root = ["shell", "--node", "n1", "--user", "root", "--"]
    assert lab.dalsegno(*as_root, "sh", "-c", "id -un; cat", stdin="one\ntwo\n").out == "root\none\ntwo\n"
    assert lab.dalsegno("shell", "--user", "ada", "--", "id", "-un").out == "ada\n"
    done = lab.dalsegno(*as_root, "sh", "-c", "echo spoken >&2; exit 7", code=7)
    assert (done.out, done.err) == ("", "spoken\n")
    look = "cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n'"
    seen = lab.dalsegno(*as_root, "sh", "-c", look).out
    assert "sudo" in seen and SUDO_PASSWORD not in seen


def test_commands_that_the_head_runs_as_root_work(lab):
    assert json.loads(lab.dalsegno("web", "--no-open", "--json").out)["url"].startswith("http")


def test_command_ends_on_the_host_if_it_is_ended_here(lab):
    words = [sys.executable, "-m", "dalsegno", "shell", "--node", "n1", "--user", "root", "--", "sleep", "4321"]
    shell = subprocess.Popen(words, stdin=subprocess.DEVNULL, cwd=lab.folder, env=environment(lab))
    looking = ("sh", "-c", "pgrep -x -f 'sleep 4321' || true")
    eventually(lambda: lab.rack["n1"].run(*looking) != "")
    shell.terminate()
    assert shell.wait(timeout=30) != 0
    eventually(lambda: lab.rack["n1"].run(*looking) == "")


def environment(lab: Operator) -> dict[str, str]:
    env = {**os.environ, "PYTHONPATH": str(lab.source), "DALSEGNO_HOME": str(lab.folder / "home"), "TERM": "dumb"}
    return {name: value for name, value in env.items() if name not in ("SLURM_CONF", "DALSEGNO_CLUSTER")}


def test_at_a_terminal_sudo_asks_the_person(lab):
    """No program answers there, because other users of the host can write to the terminal."""
    words = ["setsid", "--ctty", sys.executable, "-m", "dalsegno", "shell", "--node", "n1", "--user", "root"]
    master, slave = pty.openpty()
    shell = subprocess.Popen(words, stdin=slave, stdout=slave, stderr=slave, cwd=lab.folder, env=environment(lab))
    os.close(slave)
    os.set_blocking(master, False)
    seen = b""

    def shows(text: bytes) -> bool:
        nonlocal seen
        try:
            seen += os.read(master, 65536)
        except BlockingIOError:
            return False
        return text in seen

    eventually(lambda: shows(b"password for asks:"))
    os.write(master, SUDO_PASSWORD.encode() + b"\n")
    eventually(lambda: shows(b"# "))
    os.write(master, b"echo $(id -un) on $(hostname) at $(tty | cut -d/ -f3)\n")
    eventually(lambda: shows(b"root on n1 at pts"))
    os.write(master, b"exit 5\n")
    assert shell.wait(timeout=60) == 5
    os.close(master)
    assert SUDO_PASSWORD.encode() not in seen


def test_wrong_password_is_reported(lab):
    write_password(lab, "wrong")
    done = lab.dalsegno("shell", "--node", "n1", "--user", "root", "--", "true", code=1)
    assert "error: sudo on the host refuses the password" in done.err and "sudo_password_file" in done.err
    assert "cannot become root" in lab.dalsegno("plan", str(lab.file), code=1).err
    write_password(lab)


def test_down_restores_the_hosts(lab):
    assert lab.dalsegno("down", "--yes").err.rstrip().endswith("nothing of it is left")
    for host in lab.rack.hosts:
        assert host.run("sh", "-c", "ls -d /opt/* 2>/dev/null; pidof slurmctld slurmd munged mariadbd || true") == ""
