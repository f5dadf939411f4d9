"""Tests of a cluster of a user without root: processes on loopback ports."""

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from dalsegno.system.children import end
from dalsegno.system.hosts import host_process
from dalsegno.targets.local.machine_room import HostControlClient
from tests.cluster.conftest import NOBODY, PINGED_S, SOURCE, Cli, leftovers, make_home, taken_down
from tests.waiting import eventually

NEEDED = (
    "click",
    "yaml",
    "_yaml",
    "pydantic",
    "pydantic_core",
    "annotated_types",
    "typing_extensions",
    "typing_inspection",
)

FILE = """
name: {name}
target: local
partitions:
  - {{name: train, nodes: 3, gpus: 4, gpu_type: a100}}
slurm: {{accounting: {accounting}}}
"""


@dataclass(frozen=True)
class Rootless(Cli):
    """The command line of a user without root, with a copy of the program that this user may read."""

    def argv(self, *args: str) -> list[str]:
        return [*self.become, str(Path(sys.executable).resolve()), "-m", "dalsegno", *args]

    @property
    def env(self) -> dict[str, str]:
        return {**super().env, "PYTHONPATH": str(self.home / "lib"), "HOME": str(self.home)}


def copy_program(target: Path) -> None:
    shutil.copytree(SOURCE / "dalsegno", target / "dalsegno")
    for name in NEEDED:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            continue
        origin = Path(spec.origin)
        if origin.name == "__init__.py":
            shutil.copytree(origin.parent, target / name)
        else:
            shutil.copy(origin, target / origin.name)


@pytest.fixture(scope="module")
def user(cache_of_nobody: Path) -> Iterator[Rootless]:
    home = make_home("ds-")
    (home / "cache").symlink_to(cache_of_nobody)
    copy_program(home / "lib")
    uid = NOBODY if os.geteuid() == 0 else os.geteuid()
    (home / "tmp").mkdir()
    for folder in (home, home / "tmp"):
        os.chown(folder, uid, uid)
    home.chmod(0o700)  # like real homes: munged must accept it
    with taken_down(Rootless(home, uid)) as cli:
        yield cli


def test_up_jobs_and_down_without_root(user: Rootless):
    user.ok("up", user.file(FILE.format(name="one", accounting="true")))
    assert user.status("one")["phase"] == "up"
    assert user.ok("shell", "--", "sinfo", "-h", "-o", "%D %T").split() == ["3", "idle"]
    out = user.ok(
        "shell", "--", "srun", "-N3", "--gpus-per-node=2", "sh", "-c", "echo $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES"
    )
    assert sorted(out.splitlines()) == ["train-1 0,1", "train-2 0,1", "train-3 0,1"]
    assert user.ok("shell", "--", "srun", "nvidia-smi", "-L").count("simulated") == 4
    assert user.ok("shell", "--", "srun", "-N3", "dalsegno", "--version").count("dalsegno") == 3
    eventually(lambda: "COMPLETED" in user.ok("shell", "--", "sacct", "-n", "-X", "-o", "state"))
    user.ok("shell", "--", "sbatch", "-N2", "-o", "/dev/null", "--wrap", "srun sh -c 'setsid sleep 987 & sleep 987'")
    eventually(lambda: "RUNNING" in user.ok("shell", "--", "squeue", "-h", "-o", "%T"))
    user.ok("down", "one")
    assert leftovers(user.home) == []


def test_nodes_are_added_and_used_ports_avoided(user: Rootless):
    file = user.file(FILE.format(name="two", accounting="false"))
    user.ok("up", file)
    user.ok("up", user.file(FILE.format(name="two", accounting="false").replace("nodes: 3", "nodes: 5")))
    assert user.ok("shell", "--", "srun", "-N5", "true") == ""
    room = HostControlClient(user.home / "clusters/two")  # without root, rebooting a node restarts its slurmd
    mark = room.boot_id("train-2")
    room.reboot("train-2")
    assert room.boot_id("train-2") != mark
    eventually(lambda: user.run("shell", "--", "srun", "-w", "train-2", "--immediate=5", "true").code == 0, PINGED_S)
    port = ports(user)["train-2"]  # the same cluster would use this port again
    user.ok("down", "two")
    user.file(FILE.format(name="two", accounting="false"))
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("0.0.0.0", port))
        sock.listen()
        user.ok("up", file)
        assert user.status("two")["phase"] == "up"
        assert port not in ports(user).values()
        user.ok("down", "two")


def test_jobs_survive_the_death_of_the_daemon_supervisor(user: Rootless):
    user.ok("up", user.file(FILE.format(name="two", accounting="true")))
    last = user.home / "last"
    script = f"srun sh -c 'until [ -e {last} ]; do sleep 0.1; done'; echo done"
    user.ok("shell", "--", "sbatch", "-N2", "-o", str(user.home / "out"), "--wrap", script)
    eventually(lambda: "RUNNING" in user.ok("shell", "--", "squeue", "-h", "-o", "%T"))
    head = host_process(user.home / "clusters/two/hosts/head")
    assert head is not None
    end([head])
    assert user.status("two")["phase"] == "degraded"
    user.ok("up")
    assert user.status("two")["phase"] == "up"
    last.touch()
    eventually(lambda: (user.home / "out").read_text() == "done\n")
    user.ok("down", "two")
    assert leftovers(user.home) == []


def ports(user: Rootless) -> dict[str, int]:
    state = json.loads((user.home / "clusters/two/state.json").read_text())
    chosen: dict[str, int] = state["placement"]["ports"]
    return chosen


def test_virtual_hosts_without_root_are_refused(user: Rootless):
    answer = user.run("up", user.file(FILE.format(name="one", accounting="false") + "local: {hosts: virtual}\n"))
    assert answer.code == 1
    assert (
        "no virtual hosts here: they need root" in answer.err
        and "use sudo, or set `local: {hosts: loopback}`" in answer.err
    )


def test_machine_with_only_loopback_address_gets_an_error(user: Rootless):
    """Slurm's daemons would exit with an obscure error."""
    user.file(FILE.format(name="one", accounting="false"))
    script = 'ip link set lo up; exec "$@"'
    done = subprocess.run(
        ["unshare", "--net", "sh", "-c", script, "sh", *user.argv("up")],
        env=user.env, cwd=user.home, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1 and "no network address but 127.0.0.1" in done.stderr


@pytest.mark.long  # as root, test_monitoring.py has Prometheus read all nodes
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="the package prometheus is missing")
def test_prometheus_reads_all_nodes_without_root(user: Rootless):
    more = "monitoring: {interval: 1s, prometheus: true}\n"
    user.ok("up", user.file(FILE.format(name="two", accounting="false") + more))
    wanted = {("dalsegno", "head"), *(("node", name) for name in ("head", "train-1", "train-2", "train-3"))}

    def answering() -> bool:
        targets = json.loads(user.run("monitor", "status", "--json", "-M", "two").out)["targets"]
        return {(each["job"], each["host"]) for each in targets if each["state"] == "up"} == wanted

    eventually(answering)
    user.ok("down", "two")
