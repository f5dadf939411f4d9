"""Lanes, side by side, of one pytest: each takes the next files that no other has taken.

`python -m tests.lanes WHICH --lanes 3 ARGS...` runs `pytest -m WHICH ARGS...` so. It collects once and forks a process
for each lane. Files share nothing but the machine, and most tests on real clusters wait more than they work. After
`--beside waits` those with that mark, which do little else, for Slurm's look at time limits once a minute, say, have a
lane of their own. Files whose tests have a cluster in common, the fixture `shared`, are one lane's: it is made once.
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import compress
from pathlib import Path

import pytest

IN_COMMON = "shared"
LONGEST = ("test_run_faults.py", "test_train.py", "test_gpt.py", "test_blocks_on_cluster.py")  # a minute or more: first

# In pytest --------------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--lanes", type=int, default=0, help="how many processes take test files side by side")
    parser.addoption("--beside", default="", metavar="MARK", help="tests of this mark have a lane of their own")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Forks the lanes and waits for them. It runs no test itself: some look at all processes below theirs."""
    options = session.config.option
    if not options.lanes or session.testsfailed or options.collectonly:
        return None
    waits = [bool(options.beside and item.get_closest_marker(options.beside)) for item in session.items]
    own, rest = (list(compress(session.items, which)) for which in (waits, [not each for each in waits]))
    folder = Path(tempfile.mkdtemp(prefix="dalsegno-lanes-"))
    lanes = [taken(rest, folder) for _ in range(options.lanes)] + [iter(own)] * bool(own)
    told = [folder / f"told-{number}" for number in range(len(lanes))]
    pids = []
    gc.freeze()  # what is here by now is nobody's garbage, and is not looked through again and again
    for items, path in zip(lanes, told, strict=True):
        pids.append(forked(session, None if not pids else path))
        if not pids[-1]:
            run(session, items)
            return True
    session.testsfailed = sum([ended(pid) != 0 for pid in pids])
    for path in told[1:]:
        print(path.read_text(), flush=True)
    shutil.rmtree(folder)
    session.config.pluginmanager.unregister(name="terminalreporter")  # each lane has told its own
    return True


def forked(session: pytest.Session, told: Path | None) -> int:
    """A lane; 0 in it. One is to be seen while it runs, the others when all have ended."""
    capture = session.config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()  # or all would capture into the same file
    sys.stdout.flush()
    sys.stderr.flush()
    if told is not None:
        told.touch()
    pid = os.fork()
    if pid == 0 and told is not None:
        with told.open("a") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    if pid == 0 and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)  # the parent's threads did not come along
    capture.start_global_capturing()
    capture.suspend_global_capture()
    return pid


def run(session: pytest.Session, items: Iterator[pytest.Item]) -> None:
    """As pytest's own loop, but that what comes next is known only when it was taken."""
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
    """The tests of each file, or of files with a cluster in common, that nobody had taken when its turn came."""
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
    """How it did. An interrupt reaches the lanes too; they clean up, and that is waited for."""
    while True:
        try:
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        except KeyboardInterrupt:
            continue


if __name__ == "__main__":
    which, *words = sys.argv[1:]
    os.execv(sys.executable, [sys.executable, "-m", "pytest", "-p", "tests.lanes", "--lanes=2", "-m", which, *words])
