"""Tests of clusters of a user with sudo."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dalsegno.system.hanging_calls import slowness
from dalsegno.targets.local.folder import Folder
from tests.cluster.conftest import leftovers, make_home
from tests.cluster.test_rootless import NOBODY, copy_program

NAME = f"sudo{os.getpid()}"
FILE = f"""
name: {NAME}
target: local
partitions:
  - {{name: train, nodes: 1}}
slurm: {{accounting: false}}
health: {{mode: "off"}}
"""
STRANGER = NOBODY - 1
# Runs in a separate mount namespace, so that its sudo rules and root's clusters affect nothing else.
ENTER = """
mount --bind "$1/sudoers.d" /etc/sudoers.d && mkdir -p /var/lib/dalsegno && mount --bind "$1/state" /var/lib/dalsegno &&
echo ready && exec cat
"""

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give sudo to a user"),
    pytest.mark.skipif(shutil.which("sudo") is None, reason="there is no sudo here"),
]


class Person:
    """A user of the machine in a namespace where sudo allows only one of two users."""

    def __init__(self, world: int, home: Path, uid: int) -> None:
        self.world, self.home, self.uid = world, home, uid

    def run(self, *args: str) -> subprocess.CompletedProcess[str]:
        me = ["setpriv", f"--reuid={self.uid}", f"--regid={self.uid}", "--clear-groups"]
        env = {"PATH": os.environ["PATH"], "HOME": str(self.home), "PYTHONPATH": str(self.home / "lib")}
        python = str(Path(sys.executable).resolve())
        return subprocess.run(
            ["nsenter", "-t", str(self.world), "--mount", f"--wd={self.home}", *me, python, "-m", "dalsegno", *args],
            env=env, capture_output=True, text=True, check=False, timeout=180 * slowness(), stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def ok(self, *args: str) -> str:
        done = self.run(*args)
        assert done.returncode == 0, (args, done.stdout, done.stderr)
        return done.stdout + done.stderr


@pytest.fixture
def people() -> Iterator[tuple[Person, Person]]:
    home = make_home("ds-")
    copy_program(home / "lib")
    (home / "cluster.yaml").write_text(FILE)
    for folder in ("sudoers.d", "state"):
        (home / folder).mkdir()
    rule = home / "sudoers.d" / "rule"
    rule.write_text(f"#{NOBODY} ALL=(ALL:ALL) NOPASSWD: ALL\n")
    rule.chmod(0o440)
    argv = ["unshare", "--mount", "--propagation=private", "sh", "-c", ENTER, "sh", str(home)]
    # The process lasts until this end of its input is closed. A fixed time could be too short on a slow machine.
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as world:
        assert world.stdout is not None
        assert world.stdout.readline() == "ready\n"
        owner, stranger = (Person(world.pid, home, uid) for uid in (NOBODY, STRANGER))
        try:
            yield owner, stranger
        finally:
            owner.run("down", NAME)
            world.kill()
    left = leftovers(home)
    folder = Folder(Path("/var/lib/dalsegno/clusters") / NAME)
    links = [link for link in os.listdir("/sys/class/net") if folder.id in link]
    shutil.rmtree(home)
    assert left + links == []


def test_user_with_sudo_owns_virtual_hosts(people: tuple[Person, Person]):
    owner, stranger = people
    said = owner.ok("up")
    assert "virtual hosts need root: continuing with sudo" in said
    assert "1 virtual node" in said
    assert "hosts virtual" in owner.ok("status")
    assert owner.ok("shell", "--", "srun", "id", "-u").strip() == str(NOBODY)
    assert "train-1\n" in owner.ok("shell", "--node", "train-1", "--", "hostname")
    assert "nothing to do" in owner.ok("up")

    refused = stranger.run("down", NAME)
    assert refused.returncode == 1
    assert f"cluster {NAME} belongs to nobody" in refused.stderr
    assert stranger.run("shell", "--node", "train-1", "--", "hostname").returncode == 2

    assert "nothing of it is left" in owner.ok("down")
    assert owner.ok("ls").count(NAME) == 0


def test_loopback_without_sudo_with_a_hint_for_virtual_hosts(people: tuple[Person, Person]):
    _, stranger = people
    (stranger.home / "plain.yaml").write_text(FILE)
    done = stranger.run("plan", "plain.yaml")
    assert "1 loopback node" in done.stdout
    assert "sudo requires a password" in done.stderr
    assert "sudo -v" in done.stderr
