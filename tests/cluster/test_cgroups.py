"""Tests of cgroups on this machine: steps are tracked by them and, with cgroup v2, limited to their request."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dalsegno.system.cgroups import CgroupTree, cluster_folders, read_cgroups
from dalsegno.system.machine import gpu_files
from dalsegno.targets.local.folder import Folder
from tests.cluster.conftest import Cli, at_home, taken_down
from tests.waiting import eventually

TREE = read_cgroups()
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
    pytest.mark.skipif(CgroupTree() == TREE, reason="this machine has no usable cgroups"),
]
with_v2 = pytest.mark.skipif(TREE.version != 2, reason="this machine has no cgroup v2")
with_systemd = pytest.mark.skipif(not TREE.systemd or shutil.which("systemctl") is None, reason="no systemd here")


@pytest.fixture(scope="module")
def one(cache: Path) -> Iterator[Cli]:
    with taken_down(at_home(cache)) as cli:
        cli.ok("up", cli.file(FILE))
        yield cli


def srun(cli: Cli, *words: str) -> subprocess.CompletedProcess[str]:
    answer = cli.run("shell", "--", "srun", *words)
    return subprocess.CompletedProcess(words, answer.code, answer.out, answer.err)


def said(step: subprocess.CompletedProcess[str]) -> str:
    """Return the output of a successful step."""
    assert step.returncode == 0, step
    return step.stdout


def works(cli: Cli) -> bool:
    """Return whether a step prints its line. srun of 22.05 exits with 0 even if a task could not be launched."""
    return said(srun(cli, "echo", "here")) == "here\n"


def steps(cli: Cli) -> list[str]:
    """Return the cgroup folders of steps that still exist."""
    found = cluster_folders(Folder(cli.home / "clusters/one").id)
    return [str(path) for folder in found for path in folder.rglob("step_*")]


def test_daemonized_process_ends_with_its_step(one: Cli):
    mark = f"ds-orphan-{os.getpid()}"
    left = f"(exec -a {mark} setsid sleep 600) & sleep 0.5; echo left"
    assert said(srun(one, "bash", "-c", left)) == "left\n"
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
def test_step_over_its_memory_limit_is_killed(one: Cli):
    taken = "import sys; data = b'x' * (int(sys.argv[1]) << 20); print('fits')"
    assert said(srun(one, "--mem=300M", "python3", "-c", taken, "100")) == "fits\n"
    killed = srun(one, "--mem=300M", "python3", "-c", taken, "900")
    assert killed.returncode != 0 and "fits" not in killed.stdout
    assert "oom" in killed.stderr.lower(), killed.stderr


@with_v2
@pytest.mark.skipif("cpuset" not in TREE.controllers or (os.cpu_count() or 1) < 2, reason="no controller for cores")
def test_step_has_the_requested_cores(one: Cli):
    count = "import os; print(len(os.sched_getaffinity(0)))"
    assert said(srun(one, "-c", "1", "python3", "-c", count)) == "1\n"
    assert said(srun(one, "-c", "2", "python3", "-c", count)) == "2\n"


@with_v2
@pytest.mark.skipif(not REAL_GPU, reason="no GPU here")
def test_step_without_gpus_cannot_open_a_gpu(one: Cli):
    opened = "open('/dev/nvidia0').close(); print('opened')"
    assert said(srun(one, "--gpus=1", "python3", "-c", opened)) == "opened\n"
    refused = srun(one, "python3", "-c", opened)
    assert refused.returncode != 0 and "Operation not permitted" in refused.stderr, refused


@with_systemd
def test_cluster_scope_survives_a_daemon_reload(one: Cli):
    unit = unit_of(one)
    assert systemctl("show", "-p", "Delegate", unit) == "Delegate=yes\n"
    before = controllers_of_hosts(one)
    assert works(one)
    for command in ("daemon-reload", "daemon-reexec"):
        systemctl(command)
        assert works(one)
        assert systemctl("is-active", unit) == "active\n"
        assert controllers_of_hosts(one) == before


def controllers_of_hosts(cli: Cli) -> dict[str, str]:
    """Return the controllers that each cgroup v2 host can enable for its steps; {} for v1."""
    found = cluster_folders(Folder(cli.home / "clusters/one").id)
    paths = [path for folder in found for path in folder.glob("*/system.slice/cgroup.subtree_control")]
    return {str(path): path.read_text() for path in paths}


@with_systemd
def test_cluster_outlives_its_creating_service_and_down_leaves_no_unit(cache: Path):
    """systemd kills the remaining processes of a service when its command ends, as logind may do for a session."""
    with taken_down(at_home(cache)) as cli:
        service = [f"--setenv={name}={value}" for name, value in cli.env.items()]
        start = ["systemd-run", "--quiet", "--wait", "--pipe", "--collect", *service]
        made = [*start, *cli.argv("up", cli.file(FILE))]
        subprocess.run(made, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL, timeout=300)
        assert works(cli)
        unit = unit_of(cli)
        assert systemctl("is-active", unit) == "active\n"
        for _ in range(3):
            cli.ok("down", "one")
            assert systemctl("list-units", "--all", "--plain", "--no-legend", unit) == ""
            cli.ok("up", cli.file(FILE))


def unit_of(cli: Cli) -> str:
    return f"dalsegno-{Folder(cli.home / 'clusters/one').id}.scope"


def systemctl(*words: str) -> str:
    return subprocess.run(["systemctl", *words], capture_output=True, text=True, check=True).stdout
