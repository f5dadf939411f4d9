"""Fixtures for real clusters, which are created through the command line and checked for leftovers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest

from dalsegno.spec.health import LOAD_TESTS
from dalsegno.system.cgroups import SYSTEMD_RUNS
from dalsegno.system.hanging_calls import slowness
from tests.cluster.warm_cli import READING, WARM, WarmCli
from tests.lanes import CACHES
from tests.waiting import PATIENCE, eventually

SOURCE = Path(__file__).parents[2] / "src"
WARM_CLI = WarmCli()
NOBODY = 65534

SHARED = """
name: shared
target: local
login: {count: 1}
partitions:
  - {name: train, nodes: 3, instance: p5.48xlarge, default: true, time_limit: 2h}
  - {name: lab, nodes: 1, gpus: 4, gpu_type: h100, cpus: 8, memory: 8G}
  - {name: debug, nodes_from: train, nodes: 2, time_limit: 10m, priority: 10}
slurm:
  qos:
    - {name: low, priority: 10}
    - {name: medium, priority: 50}
    - {name: high, priority: 100}
  priority: {calc_period: 1m}
accounts:
  - {name: ada}
  - {name: bob}
  - {name: cem}
users:
  - {name: ada, accounts: [ada], qos: [normal, low, medium, high]}
  - {name: bob, accounts: [bob], qos: [normal, low, medium, high]}
  - {name: cem, accounts: [cem], qos: [normal, low, medium, high]}
"""

# A cluster for the runs of one test module. It is not shared, because the tests break its nodes.
FOR_RUNS = """
name: one
target: local
partitions:
  - {name: train, nodes: 6, cpus: 4, memory: 2G, default: true}
users:
  - {name: ada}
slurm: {accounting: false}
health: {mode: observe}  # what is broken here stays so
"""


def for_runs(nodes: int) -> str:
    """Return the cluster file of `cluster_for_runs`, with this many nodes."""
    return FOR_RUNS.replace("nodes: 6", f"nodes: {nodes}")


NO_LOAD_TESTS = f"{{{', '.join(f'{name}: off' for name in LOAD_TESTS)}}}"
PINGED_S = 200  # slurmctld pings its nodes every 100 s, so a node that missed a ping is `idle*` until the next one


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Cli:
    """The `dalsegno` command with its own home, optionally as another user of the machine."""

    home: Path
    uid: int = 0

    @property
    def become(self) -> list[str]:
        """Return the prefix that runs a command as this user."""
        if self.uid == os.geteuid():
            return []
        return ["setpriv", f"--reuid={self.uid}", f"--regid={self.uid}", "--clear-groups"]

    def argv(self, *args: str) -> list[str]:
        return [*self.become, sys.executable, "-m", "dalsegno", *args]

    @property
    def env(self) -> dict[str, str]:
        """Return an environment whose `python3` is that of the tests and whose TMPDIR the tests can inspect."""
        path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
        own = {"DALSEGNO_HOME": self.home, "HOME": self.home, "TMPDIR": self.home / "tmp", "PYTHONPATH": SOURCE}
        return {**os.environ, "PATH": path, **{name: str(value) for name, value in own.items()}}

    def run(self, *args: str, cwd: Path | None = None, timeout_s: float = 180) -> Answer:
        warm = self._warm_words(args)
        if warm and self.uid == os.geteuid():
            done = WARM_CLI.run(warm, self.env, cwd or self.home, timeout_s * slowness() * PATIENCE)
            return Answer(done.returncode, done.stdout, done.stderr)
        done = subprocess.run(
            self.argv(*args), env=self.env, cwd=cwd or self.home, capture_output=True, text=True,
            timeout=timeout_s * slowness() * PATIENCE, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        return Answer(done.returncode, done.stdout, done.stderr)

    def _warm_words(self, args: tuple[str, ...]) -> tuple[str, ...]:
        """Return the arguments for the warm process; empty if the command needs its own process."""
        plain, words = Cli.argv(self), self.argv(*args)
        own = tuple(words[len(plain) :]) if words[: len(plain)] == plain else ()
        if args and args[0] in READING:
            return args
        return own if own and own[0] in WARM else ()

    def ok(self, *args: str, cwd: Path | None = None, timeout_s: float = 180) -> str:
        answer = self.run(*args, cwd=cwd, timeout_s=timeout_s)
        assert answer.code == 0, f"dalsegno {' '.join(args)} -> {answer.code}\n{answer.out}\n{answer.err}"
        return answer.out

    def start(self, *args: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.argv(*args), env=self.env, cwd=self.home, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def file(self, text: str, name: str = "cluster.yaml") -> str:
        """Write a cluster file.

        Metrics, the web page and load tests are off unless the test enables them, because they take CPU time.
        """
        path = self.home / name
        added = {"monitoring:": "{enabled: false}", "health:": f"{{checks: {NO_LOAD_TESTS}}}"}
        path.write_text("\n".join([text, *(f"{key} {value}" for key, value in added.items() if key not in text), ""]))
        return str(path)

    def status(self, name: str) -> dict[str, object]:
        value: dict[str, object] = json.loads(self.ok("status", "--json", "-M", name))
        return value


def leftovers(home: Path) -> list[str]:
    """Return everything on the machine that still belongs to clusters of this home."""
    from dalsegno.system.cgroups import cluster_folders
    from dalsegno.system.children import environment, find
    from dalsegno.targets.local.folder import Folder

    mark = str(home).encode()
    processes = find(
        lambda pid: any(
            entry.startswith((b"DALSEGNO_MARK=" + mark, b"SLURM_CONF=" + mark)) for entry in environment(pid)
        )
    )
    ids = [Folder(home / "clusters" / name).id for name in ("shared", "one", "two", "demo", "dalsegno-demo")]
    links = [name for name in os.listdir("/sys/class/net") if any(name.startswith(f"ds{one}") for one in ids)]
    cgroups = [str(path) for one in ids for path in cluster_folders(one)]
    units = [unit for one in ids for unit in units_of(one)]
    mounts = [line for line in Path("/proc/self/mounts").read_text().splitlines() if f"{home}/clusters" in line]
    folders = [str(path) for path in (home / "clusters").glob("*")]
    return [*(f"process {process.pid}" for process in processes), *links, *cgroups, *units, *mounts, *folders]


def units_of(cluster_id: str) -> list[str]:
    """Return the systemd units of a cluster; none if systemd does not run."""
    if not SYSTEMD_RUNS.is_dir() or os.geteuid() != 0:
        return []
    listed = ["systemctl", "list-units", "--all", "--plain", "--no-legend", "--full", f"dalsegno-{cluster_id}*"]
    return subprocess.run(listed, capture_output=True, text=True, check=True).stdout.splitlines()


def have_job_saved(cli: Cli, cluster: str, job: str) -> None:
    """Make slurmctld save the current state of a job, because a killed slurmctld loses unsaved changes.

    The first save may have begun earlier, so wait for a second one. Each change of a job triggers a save.
    """
    path = cli.home / "clusters" / cluster / "slurmctld/job_state"
    for number in range(2):
        before = path.stat().st_mtime_ns if path.exists() else 0
        cli.ok("shell", "-M", cluster, "--", "scontrol", "update", f"JobId={job}", f"AdminComment=save-{number}")
        eventually(lambda before=before: path.stat().st_mtime_ns != before)


def have_state_saved(cli: Cli, cluster: str) -> None:
    """Make slurmctld save its state, so that a killed slurmctld does not take ended jobs for running ones."""
    job = cli.ok("shell", "-M", cluster, "--", "sbatch", "--hold", "--parsable", "-o", "/dev/null", "--wrap", "true")
    have_job_saved(cli, cluster, job.strip())
    cli.ok("shell", "-M", cluster, "--", "scancel", job.strip())


def make_home(prefix: str) -> Path:
    home = Path(tempfile.mkdtemp(prefix=prefix, dir="/tmp"))  # a short path, because sockets are below it
    home.chmod(0o755)
    return home


def end_all(cli: Cli) -> None:
    for folder in (cli.home / "clusters").glob("*"):
        cli.ok("down", folder.name)


@pytest.fixture(scope="session")
def cache() -> Iterator[Path]:
    """Return a cache for MariaDB's empty database and the container plugin, which are made once for all homes."""
    yield from common_cache("root", os.geteuid())


@pytest.fixture(scope="session")
def cache_of_nobody() -> Iterator[Path]:
    """Return a cache like `cache` for the user of rootless clusters."""
    yield from common_cache("nobody", NOBODY if os.geteuid() == 0 else os.geteuid())


def common_cache(name: str, owner: int) -> Iterator[Path]:
    """Yield a folder of this user. All lanes share it; a single process removes it afterwards."""
    common = os.environ.get(CACHES)
    folder = Path(common) / name if common else make_home("ds-cache-")
    folder.mkdir(exist_ok=True)
    folder.chmod(0o755)
    os.chown(folder, owner, owner)
    yield folder
    if not common:
        shutil.rmtree(folder)


AnyCli = TypeVar("AnyCli", bound=Cli)


@contextmanager
def taken_down(cli: AnyCli) -> Iterator[AnyCli]:
    """Remove the clusters of this home afterwards, then the home, and report leftovers."""
    try:
        yield cli
    finally:
        end_all(cli)
        left = leftovers(cli.home)
        shutil.rmtree(cli.home, ignore_errors=True)
    assert left == []


def at_home(cache: Path) -> Cli:
    """Yield `dalsegno` with a new home."""
    home = make_home("ds-")
    (home / "cache").symlink_to(cache)
    (home / "tmp").mkdir()
    (home / "tmp").chmod(0o1777)
    return Cli(home, os.geteuid())


@pytest.fixture
def cli(cache: Path) -> Iterator[Cli]:
    """Return `dalsegno` with a home for one test."""
    with taken_down(at_home(cache)) as cli:
        yield cli


@pytest.fixture(scope="session")
def shared(cache: Path) -> Iterator[Cli]:
    """Return the cluster that tests share and leave unchanged."""
    with taken_down(at_home(cache)) as cli:
        cli.ok("up", cli.file(SHARED))
        yield cli


@pytest.fixture(scope="module")
def cluster_for_runs(request: pytest.FixtureRequest, cache: Path) -> Iterator[Cli]:
    """Return six virtual hosts, or `NODES` of the test module, for runs (see `runs.py`). Tests leave all hosts up."""
    with taken_down(at_home(cache)) as cli:
        cli.ok("up", cli.file(for_runs(getattr(request.module, "NODES", 6))))
        yield cli
