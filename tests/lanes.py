"""Two pytests side by side: each takes the next file that the other has not taken.

`python -m tests.lanes ARGS...` runs `pytest ARGS...` so. Most tests on the real cluster wait more than they work, and
files share nothing but the machine. What measures times is marked `alone` and is not for lanes.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import pytest

# In each pytest ---------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--lane", metavar="FOLDER", help="where lanes note which test files are taken")


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """As pytest's own, but that what comes next is known only when it was taken."""
    folder = session.config.getoption("--lane")
    if folder is None or session.testsfailed or session.config.option.collectonly:
        return None
    todo = taken(session.items, Path(folder))
    item = next(todo, None)
    while item is not None:
        following = next(todo, None)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        item = following
    return True


def taken(items: Sequence[pytest.Item], folder: Path) -> Iterator[pytest.Item]:
    """The tests of each file that nobody had taken when its turn came."""
    for path, tests in groupby(items, key=lambda item: item.path):
        if take(folder / f"{path}".replace("/", "%")):
            yield from tests


def take(mark: Path) -> bool:
    try:
        mark.open("x").close()
    except FileExistsError:
        return False
    return True


# All of them ------------------------------------------------------------------------------------------------


def run(*args: str) -> int:
    """One lane is to be seen while it runs, the other when both have ended. 0 if all was well in both."""
    with tempfile.TemporaryDirectory(prefix="dalsegno-lanes-") as folder:
        argv = [sys.executable, "-m", "pytest", "-p", "tests.lanes", f"--lane={folder}", *args]  # =: it is no test path
        told = Path(folder) / "told"
        with told.open("w") as file:
            lanes = [subprocess.Popen(argv), subprocess.Popen(argv, stdout=file, stderr=subprocess.STDOUT)]
        codes = [ended(lane) for lane in lanes]
        print(told.read_text(), flush=True)
    return next((code for code in codes if code), 0)


def ended(lane: subprocess.Popen[bytes]) -> int:
    """An interrupt reaches the lanes too; they clean up, and that is waited for."""
    while True:
        try:
            return lane.wait()
        except KeyboardInterrupt:
            continue


if __name__ == "__main__":
    sys.exit(run(*sys.argv[1:]))
