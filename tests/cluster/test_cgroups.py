"""Control groups on the machine at hand: steps are tracked by them, and with cgroup v2 held to what they asked for."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dalsegno.system.cgroups import CgroupTree, cluster_folders, look_at_cgroups
from dalsegno.system.machine import gpu_files
from dalsegno.targets.local.folder import Folder
from tests.cluster.conftest import Cli, at_home, taken_down
from tests.waiting import eventually

TREE = look_at_cgroups()
REAL_GPU = bool(gpu_files(os.listdir("/dev")))
FILE = f"""
name: one
target: local
partitions:
  - {{name: train, nodes: 1, cpus: {min(os.cpu_count() or 1, 4)}, memory: 3G{", gpus: 1" if REAL_GPU else ""}}}
slurm: {{accounting: false}}
health: {{mode: "off"}}
"""
pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="needs virtual hosts"),
    pytest.mark.skipif(CgroupTree() == TREE, reason="this machine has no control groups to use"),
]
with_v2 = pytest.mark.skipif(TREE.version != 2, reason="this machine has no cgroup v2")


@pytest.fixture(scope="module")
def one(cache: Path) -> Iterator[Cli]:
    with taken_down(at_home(cache)) as cli:
        cli.ok("up", cli.file(FILE))
        yield cli


def srun(cli: Cli, *words: str) -> subprocess.CompletedProcess[str]:
    answer = cli.run("shell", "--", "srun", *words)
    return subprocess.CompletedProcess(words, answer.code, answer.out, answer.err)


def steps(cli: Cli) -> list[str]:
    """Return the folders of steps that there still are."""
    found = cluster_folders(Folder(cli.home / "clusters/one").id)
    return [str(path) for folder in found for path in folder.rglob("step_*")]


def test_what_leaves_its_session_ends_with_its_step_and_so_does_its_folder(one: Cli):
    mark = f"ds-orphan-{os.getpid()}"
    srun(one, "bash", "-c", f"(exec -a {mark} setsid sleep 600) & sleep 0.5")
    eventually(lambda: not of_name(mark))
    eventually(lambda: steps(one) == [])


def of_name(mark: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().startswith(mark.encode()):
                found.append(path.parent.name)
        except OSError:
            continue
    return found


@with_v2
@pytest.mark.skipif("memory" not in TREE.controllers, reason="no controller for memory")
def test_a_step_that_takes_more_memory_than_it_asked_for_is_killed(one: Cli):
    taken = "import sys; data = b'x' * (int(sys.argv[1]) << 20); print('fits')"
    assert srun(one, "--mem=300M", "python3", "-c", taken, "100").stdout == "fits\n"
    killed = srun(one, "--mem=300M", "python3", "-c", taken, "900")
    assert killed.returncode != 0 and "fits" not in killed.stdout
    assert "oom" in killed.stderr.lower(), killed.stderr


@with_v2
@pytest.mark.skipif("cpuset" not in TREE.controllers or (os.cpu_count() or 1) < 2, reason="no cores to hold")
def test_a_step_has_the_cores_that_it_asked_for(one: Cli):
    count = "import os; print(len(os.sched_getaffinity(0)))"
    assert srun(one, "-c", "1", "python3", "-c", count).stdout == "1\n"
    assert srun(one, "-c", "2", "python3", "-c", count).stdout == "2\n"


@with_v2
@pytest.mark.skipif(not REAL_GPU, reason="no GPU here")
def test_a_step_without_gpus_cannot_open_one(one: Cli):
    opened = "open('/dev/nvidia0').close(); print('opened')"
    assert srun(one, "--gpus=1", "python3", "-c", opened).stdout == "opened\n"
    refused = srun(one, "python3", "-c", opened)
    assert refused.returncode != 0 and "Operation not permitted" in refused.stderr, refused


@pytest.mark.skipif(not TREE.systemd or shutil.which("systemctl") is None, reason="no systemd here")
def test_a_cluster_is_one_scope_that_a_daemon_reload_leaves_alone(one: Cli):
    unit = f"dalsegno-{Folder(one.home / 'clusters/one').id}.scope"
    assert systemctl("show", "-p", "Delegate", unit) == "Delegate=yes\n"
    assert srun(one, "true").returncode == 0
    systemctl("daemon-reload")
    assert srun(one, "true").returncode == 0
    assert systemctl("is-active", unit) == "active\n"


def systemctl(*words: str) -> str:
    return subprocess.run(["systemctl", *words], capture_output=True, text=True, check=True).stdout
