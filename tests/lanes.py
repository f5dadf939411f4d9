"""Pytests side by side: each takes the next file that no other has taken.

`python -m tests.lanes WHICH --lanes 3 ARGS...` runs `pytest -m WHICH ARGS...` so. Files share nothing but the machine,
and most tests on real clusters wait more than they work. After `--beside waits` those with that mark, which do little
else, for Slurm's look at time limits once a minute, say, have a pytest of their own. What measures times is marked
`alone` and is not for lanes.
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


def run(which: str, *args: str, count: int = 2, waits: str = "") -> int:
    """In so many lanes; tests of mark `waits` have a pytest of their own. One lane is to be seen while it runs, the
    others when all have ended. 0 if all was well in all."""
    with tempfile.TemporaryDirectory(prefix="dalsegno-lanes-") as folder:
        in_turn = ["-p", "tests.lanes", f"--lane={folder}"]  # =: it is no test path
        lane = [*in_turn, "-m", f"({which}) and not {waits}" if waits else which, *args]
        told = [None, *(Path(folder) / f"told-{number}" for number in range(1, count + 1))]
        lanes = [start(told[number], *lane) for number in range(count)]
        if waits:
            lanes += [start(told[count], "-m", f"({which}) and {waits}", *args)]
        codes = [ended(each) for each in lanes]
        for path in told[1 : len(lanes)]:
            print(path.read_text() if path else "", flush=True)
    return next((code for code in codes if code), 0)


def start(told: Path | None, *args: str) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-m", "pytest", *args]
    if told is None:
        return subprocess.Popen(argv)
    with told.open("w") as file:
        return subprocess.Popen(argv, stdout=file, stderr=subprocess.STDOUT)


def ended(lane: subprocess.Popen[bytes]) -> int:
    """An interrupt reaches the lanes too; they clean up, and that is waited for."""
    while True:
        try:
            return lane.wait()
        except KeyboardInterrupt:
            continue


def main(which: str, *args: str) -> int:
    options = {"--lanes": "2", "--beside": ""}
    while args and args[0] in options:
        options[args[0]], args = args[1], args[2:]
    return run(which, *args, count=int(options["--lanes"]), waits=options["--beside"])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
