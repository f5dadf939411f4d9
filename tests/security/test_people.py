"""The users of a cluster and the accounts of its machine: no user ever gets the identity of another."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from dalsegno.system.hosts import host_process
from tests.cluster.conftest import SOURCE, Cli, at_home, taken_down
from tests.waiting import eventually

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs virtual hosts"),
]
FILE = """
name: one
target: local
partitions:
  - {name: train, nodes: 2, cpus: 2, memory: 1G, default: true}
users:
  - {name: ada}
slurm: {accounting: false}
health: {mode: observe}
"""
OWN_ETC = 'mount --bind "$1" /etc; shift; exec "$@"'


@dataclass(frozen=True)
class OwnEtc(Cli):
    """`dalsegno` on a machine whose /etc is a copy, so that the tests can add accounts to it."""

    @property
    def machine(self) -> Path:
        return self.home / "machine"

    def argv(self, *args: str) -> list[str]:
        etc = str(self.machine / "etc")
        return ["unshare", "--mount", "sh", "-c", OWN_ETC, "sh", etc, *super().argv(*args)]

    def useradd(self, *words: str) -> None:
        subprocess.run(["useradd", "--prefix", str(self.machine), "--no-create-home", *words], check=True)


@pytest.fixture(scope="module")
def cluster(cache: Path) -> Iterator[OwnEtc]:
    home = at_home(cache).home
    with taken_down(OwnEtc(home, os.geteuid())) as cli:
        cli.machine.mkdir()
        subprocess.run(["cp", "-a", "/etc", str(cli.machine / "etc")], check=True)
        cli.ok("up", cli.file(FILE))
        yield cli


def id_in_job(cli: Cli) -> str:
    return cli.ok("shell", "-u", "ada", "--", "srun", "-N2", "-w", "train-1,train-2", "id", "-un")


def test_useradd_on_the_machine_does_not_change_the_clusters_users(cluster: OwnEtc) -> None:
    assert id_in_job(cluster).split() == ["ada", "ada"]
    for name in ("first", "second"):  # each renames passwd, group and shadow
        cluster.useradd(name)
        eventually(lambda: id_in_job(cluster).split() == ["ada", "ada"], 20)
    assert cluster.status("one")["problems"] == []
    assert "updates the users and groups that hosts know" in cluster.ok("plan", cluster.file(FILE))
    cluster.ok("up", cluster.file(FILE))
    assert "second" in cluster.ok("shell", "-w", "train-2", "--", "getent", "passwd", "second")
    assert "nothing to do" in cluster.ok("plan", cluster.file(FILE))


def test_status_and_up_notice_a_host_that_lost_its_users(cluster: OwnEtc) -> None:
    host = host_process(cluster.home / "clusters/one/hosts/train-1")
    assert host is not None
    os.kill(host.pid, signal.SIGSTOP)  # stopped, because the host would mount the files again
    try:
        cluster.ok("shell", "-w", "train-1", "--", "umount", "/etc/passwd")
        problems = str(cluster.status("one")["problems"])
        assert "train-1: users or storage of the cluster are not mounted there; `dalsegno up` repairs it" in problems
        assert "mounts the cluster's own files on 1 host (train-1) again" in cluster.ok("plan", cluster.file(FILE))
    finally:
        os.kill(host.pid, signal.SIGCONT)
    cluster.ok("up", cluster.file(FILE))
    eventually(lambda: cluster.status("one")["problems"] == [])
    assert id_in_job(cluster).split() == ["ada", "ada"]


@pytest.mark.parametrize(
    ("user", "error"),
    [
        ("{name: metrics}", "`metrics` is a system account of this machine"),
        ("{name: boss}", "`boss` is an account of this machine with the rights of sudo"),
        ("{name: bea, uid: 4321}", "uid 4321 of user `bea` belongs to boss on this machine"),
        ("{name: bea, groups: [sudo]}", "group `sudo` would give user `bea` rights over this machine"),
    ],
)
def test_new_user_never_gets_the_rights_of_an_existing_account(cluster: OwnEtc, user: str, error: str) -> None:
    if "boss:" not in (cluster.machine / "etc/passwd").read_text():
        cluster.useradd("--uid", "4321", "--groups", "sudo", "boss")
        cluster.useradd("--system", "metrics")
    refused = cluster.run("up", cluster.file(FILE.replace("- {name: ada}", f"- {{name: ada}}\n  - {user}")))
    assert refused.code == 1 and error in refused.err and "hint: " in refused.err
    assert "uid=" not in cluster.run("shell", "-u", "bea", "--", "id").out


def test_account_of_the_machine_is_used_and_reported_when_the_file_names_its_uid(cluster: OwnEtc) -> None:
    cluster.useradd("--uid", "4322", "--groups", "sudo", "chief")
    file = cluster.file(FILE.replace("- {name: ada}", "- {name: ada}\n  - {name: chief, uid: 4322}"))
    assert "user chief is this machine's account of that name (uid 4322)" in cluster.ok("plan", file)


def test_plan_warns_of_a_clone_that_users_cannot_read(cache: Path) -> None:
    with taken_down(at_home(cache)) as cli:
        closed = cli.home / "closed"
        closed.mkdir(mode=0o700)
        shutil.copytree(SOURCE, closed / "src", ignore=shutil.ignore_patterns("__pycache__"))
        argv = [sys.executable, "-m", "dalsegno", "plan", cli.file(FILE)]
        env = {**cli.env, "PYTHONPATH": str(closed / "src")}
        output = subprocess.run(argv, env=env, cwd=cli.home, capture_output=True, text=True, check=True).stdout
        assert f"the cluster's users cannot read {closed}, so their runs will fail: move the clone" in output
        assert "cannot read" not in cli.ok("plan", cli.file(FILE))
