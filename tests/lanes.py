"""Run pytest in several parallel processes, called lanes. Each lane takes the next test file that no other has taken.

`python -m tests.lanes WHICH --lanes 3 ARGS...` runs `pytest -m WHICH ARGS...` this way. It collects once and forks a
process per lane. Files share nothing but the machine, and most cluster tests wait more than they work. With `--beside
waits`, tests with that marker get a lane of their own: they mostly wait, for example for Slurm's time-limit check once
a minute. All files that use the fixture `shared` run in one lane, so that its cluster is created once. With `--memory`,
the folders of tests are in memory if there is enough of it: they hold many small files, which are slow to sync on disk.
With `--halves`, two processes collect half of the folders each, at the same time, and each forks its own lanes.

pytest-xdist was measured for comparison, with the 8,100 unit tests on two cores and other programs running. Lanes took
51 to 63 s when the load was 1 to 3 at the start, and `-n 3 --dist worksteal` 98 and 102 s. Lanes used 89 to 114 s of
CPU time in five turns, `-n 3 --dist worksteal` 138 to 146 s in three, and `-n 2 --dist loadfile` 123 to 138 s in three.
Two to five tests failed with pytest-xdist each time.
"""

from __future__ import annotations

import gc
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import compress
from pathlib import Path

import pytest

IN_COMMON = "shared"
CACHES = "DALSEGNO_TEST_CACHES"  # a folder for data that all lanes need and that only the first lane creates
MEMORY = Path("/dev/shm")
MEMORY_BYTES = 1 << 30
TESTS = Path(__file__).parent
# About half of the unit tests, by the time they take. Only these import torch.
FIRST_HALF = (
    "bench",
    "containers",
    "drill",
    "examples",
    "local",
    "node_agent",
    "recovery",
    "runs",
    "security",
    "submit",
    "train",
)
ALL_ON_CLUSTER = re.compile(r"^pytestmark = \[?\s*pytest\.mark\.cluster", re.MULTILINE)
# These take longest, so they start first, as do the files with the shared cluster.
LONGEST = (
    IN_COMMON, "test_blocks_on_cluster.py", "test_containers.py", "test_recovery.py", "test_run_ends.py",
    "test_run_faults.py", "test_ssh_cluster.py", "test_ssh_recovery.py", "test_train.py",
)  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--lanes", type=int, default=0, help="number of processes that run test files in parallel")
    parser.addoption("--beside", default="", metavar="MARK", help="run tests with this marker in a lane of their own")
    parser.addoption("--memory", action="store_true", help="create the folders of tests in memory")
    parser.addoption("--half", type=int, choices=(1, 2), help="collect only this half of the folders")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.lanes:
        gc.set_threshold(20_000)  # collecting tests and parsing files creates many objects and no garbage
    if config.option.memory and is_usable(MEMORY):
        os.environ["PYTEST_DEBUG_TEMPROOT"] = str(MEMORY)  # only `tmp_path`; programs that tests start still use /tmp


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip the other half, and files that show without being imported that no test in them is selected."""
    which, half = config.option.markexpr, config.option.half
    if collection_path.parent == TESTS:
        if half and (collection_path.name in FIRST_HALF) != (half == 1):
            return True
        if collection_path.name == "cluster":
            return which.startswith("not cluster") or None
    if not collection_path.name.startswith("test_"):
        return None
    if which.startswith("cluster and alone"):
        return "mark.alone" not in collection_path.read_text() or None
    if TESTS / "cluster" in collection_path.parents:
        return None
    if which.startswith("not cluster"):
        return ALL_ON_CLUSTER.search(collection_path.read_text()) is not None or None
    return (which.startswith("cluster") and "mark.cluster" not in collection_path.read_text()) or None


def is_usable(folder: Path) -> bool:
    """Return whether the folder is writable, has enough free space, and allows programs to run."""
    if not os.access(folder, os.W_OK):
        return False
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize >= MEMORY_BYTES and not found.f_flag & os.ST_NOEXEC


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Fork the lanes and wait for them. The parent runs no test, because some inspect all child processes."""
    options = session.config.option
    if not options.lanes or session.testsfailed or options.collectonly:
        return None
    waits = [bool(options.beside and item.get_closest_marker(options.beside)) for item in session.items]
    own, rest = (list(compress(session.items, which)) for which in (waits, [not each for each in waits]))
    folder = Path(tempfile.mkdtemp(prefix="dalsegno-lanes-"))
    (folder / "caches").mkdir()
    folder.chmod(0o755)
    os.environ[CACHES] = str(folder / "caches")
    lanes = [taken(rest, folder) for _ in range(options.lanes)] + [iter(own)] * bool(own)
    outputs = [folder / f"output-{number}" for number in range(len(lanes))]
    pids = []
    gc.freeze()  # objects that exist now need not be collected in every lane
    for items, path in zip(lanes, outputs, strict=True):
        pids.append(forked(session, None if not pids else path))
        if not pids[-1]:
            run(session, items)
            return True
    session.testsfailed = sum([ended(pid) != 0 for pid in pids])
    for path in outputs[1:]:
        print(path.read_text(), flush=True)
    shutil.rmtree(folder)
    session.config.pluginmanager.unregister(name="terminalreporter")  # each lane prints its own report
    return True


def forked(session: pytest.Session, output: Path | None) -> int:
    """Fork a lane; return 0 in the child. With a file, its output goes there; otherwise it is shown live."""
    capture = session.config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()  # otherwise all lanes would capture output to the same file
    sys.stdout.flush()
    sys.stderr.flush()
    if output is not None:
        output.touch()
    pid = os.fork()
    if pid == 0 and output is not None:
        with output.open("a") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    if pid == 0 and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)  # the parent's threads do not exist in the child
    capture.start_global_capturing()
    capture.suspend_global_capture()
    return pid


def run(session: pytest.Session, items: Iterator[pytest.Item]) -> None:
    """Run tests as pytest's own loop does, but take the next test only when needed."""
    item = next(items, None)
    while item is not None:
        following = next(items, None)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        item = following


def taken(items: Sequence[pytest.Item], folder: Path) -> Iterator[pytest.Item]:
    """Yield the tests of each file, or of all files with the shared cluster, that no other lane has taken."""
    shared = {item.path for item in items if IN_COMMON in getattr(item, "fixturenames", ())}
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        groups.setdefault(IN_COMMON if item.path in shared else f"{item.path}".replace("/", "%"), []).append(item)
    for name, tests in sorted(groups.items(), key=lambda group: not group[0].endswith(LONGEST)):
        if take(folder / name):
            yield from tests


def take(mark: Path) -> bool:
    try:
        mark.open("x").close()
    except FileExistsError:
        return False
    return True


def ended(pid: int) -> int:
    """Return a lane's exit code. An interrupt reaches the lanes too, and their cleanup is awaited."""
    while True:
        try:
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        except KeyboardInterrupt:
            continue


def in_halves(argv: Sequence[str]) -> int:
    """Run pytest for both halves at once. The output of the second is shown after the first has ended."""
    with tempfile.TemporaryFile("w+") as later:
        first = subprocess.Popen([*argv, "--half=1"])
        second = subprocess.Popen([*argv, "--half=2"], stdout=later, stderr=subprocess.STDOUT)
        codes = [ended(process.pid) for process in (first, second)]
        later.seek(0)
        shutil.copyfileobj(later, sys.stdout)
    return int(any(codes))


if __name__ == "__main__":
    which, *words = sys.argv[1:]
    if "--memory" in words:
        words += ["-o", "tmp_path_retention_policy=failed"]  # folders of passed tests are removed, to free the memory
    argv = [sys.executable, "-m", "pytest", "-p", "tests.lanes", "--lanes=2", "-m", which]
    if "--halves" in words:
        sys.exit(in_halves([*argv, *(word for word in words if word != "--halves")]))
    os.execv(sys.executable, [*argv, *words])
