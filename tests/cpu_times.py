"""Measure the CPU time of every test, with all processes that it starts, because CPU time limits the suite's speed.

`pytest -p tests.cpu_times --cpu-times FILE ...` appends lines to a file, also from lanes. `python -m tests.cpu_times
FILE` sums them by file and lists the most expensive tests. Daemons of clusters are counted, because they stay in the
cgroup of their lane; this needs root and cgroup v1's cpuacct. Measure on any machine: other programs change the time
that a test takes, but hardly its CPU time.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

CPUACCT = Path("/sys/fs/cgroup/cpuacct")
SHOWN = 40


class CpuTimes:
    """Writes the CPU seconds of each phase of each test. Every lane enters a cgroup of its own."""

    def __init__(self, file: Path) -> None:
        self.file, self.pid, self.seen_s = file, 0, 0.0
        self.group = CPUACCT

    def pytest_runtest_logstart(self) -> None:
        if self.pid != os.getpid():
            self.pid, self.group = os.getpid(), CPUACCT / f"dalsegno-tests-{os.getpid()}"
            self.group.mkdir(exist_ok=True)
            (self.group / "cgroup.procs").write_text(str(self.pid))
            self.seen_s = self.used_s()

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        now_s = self.used_s()
        with self.file.open("a") as file:
            file.write(json.dumps([report.nodeid, report.when, round(now_s - self.seen_s, 3)]) + "\n")
        self.seen_s = now_s

    def pytest_unconfigure(self) -> None:
        if self.pid == os.getpid():
            (CPUACCT / "cgroup.procs").write_text(str(self.pid))
            with contextlib.suppress(OSError):  # a process that a test has left may still be in the cgroup
                self.group.rmdir()

    def used_s(self) -> float:
        return int((self.group / "cpuacct.usage").read_text()) / 1e9


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-times", type=Path, metavar="FILE", help="append the CPU time of every test to this file")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.cpu_times:
        config.pluginmanager.register(CpuTimes(config.option.cpu_times.resolve()))


def table(lines: Iterable[str]) -> str:
    """Return a table of the CPU seconds: in total, by file, and of the most expensive tests."""
    files: Counter[str] = Counter()
    tests: Counter[str] = Counter()
    for line in lines:
        test, when, cpu_s = json.loads(line)
        files[test.partition("::")[0]] += cpu_s
        tests[test if when == "call" else f"{test} ({when})"] += cpu_s
    rows = [("all", sum(files.values())), *files.most_common(SHOWN), *tests.most_common(SHOWN)]
    return "".join(f"{cpu_s:8.1f}  {name}\n" for name, cpu_s in rows)


if __name__ == "__main__":
    sys.stdout.write(table(Path(sys.argv[1]).read_text().splitlines()))
