#!/usr/bin/env python3
"""Measure the exporter: CPU, memory and scrapes on a large cluster, and the load that it adds to slurmctld.

    benchmarks/exporter.py            10,000 nodes and 100,000 jobs from generated output; about a minute
    benchmarks/exporter.py --live     also a real slurmctld with 1,000 nodes and 5,000 pending jobs; some minutes
    benchmarks/exporter.py --write    both, and writes the tables to docs/performance.md

The exporter is the real command. In the first part, Slurm's commands are scripts that print generated rows, which
the real parsers read. In the second part, slurmctld is real, and `sdiag` shows which requests it received.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from generated_slurm import times_asked, write_commands
from quiet import QUIET, available_mib, wait_for_quiet
from stage import ROOT, Failed, Shape, Stage
from table import aligned, seconds, write
from up import PAGE, PYTHON, load, machine, say

from dalsegno.slurm.parse.controller import Diagnostics, parse_diag

NODES, JOBS = 10_000, 100_000
CPU_S, MEMORY_MB, SCRAPE_S = 2.0, 300.0, 0.05
CYCLES, SCRAPES = 5, 20
LIVE_NODES, LIVE_JOBS, LIVE_S = 1_000, 5_000, 120.0
LIVE_MIB = 8 * LIVE_NODES  # MiB of memory for all slurmds and their connections
TICKS = os.sysconf("SC_CLK_TCK")
DIALECTS = ("vpenso", "sckyzo")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--live", action="store_true", help="also measure a real slurmctld")
    parser.add_argument("--write", action="store_true", help="write the tables to docs/performance.md")
    options = parser.parse_args()
    measured = f"Measured on {time.strftime('%Y-%m-%d')} with {machine()}; load average before the first row {load()}."
    say(measured)
    rows = [row for dialect in DIALECTS for row in large_rows(dialect)]
    first = aligned(("what", "required", "median", "worst", "runs", "verdict", "machine"), [one.cells for one in rows])
    print(first)
    code = 0 if all(row.met for row in rows) else 1
    text = f"{measured}\n\n{first}"
    if options.live or options.write:
        second = live_table()
        print(second)
        text += f"\n\n{second}"
    if options.write:
        write(PAGE, text, "exporter")
        say(f"wrote {PAGE.relative_to(ROOT)}")
    return code


@dataclass(frozen=True)
class Figure:
    """One measured quantity: its value in each repetition, and the limit for the median of these values."""

    what: str
    most: float
    values: tuple[float, ...]
    shown: Callable[[float], str]
    busy: float

    @property
    def met(self) -> bool:
        return median(self.values) <= self.most

    @property
    def cells(self) -> tuple[str, ...]:
        values = (self.shown(median(self.values)), self.shown(max(self.values)), str(len(self.values)))
        quiet = "quiet" if self.busy <= QUIET else f"{self.busy:.0%} busy with others"
        return (self.what, f"≤ {self.shown(self.most)}", *values, "met" if self.met else "**missed**", quiet)


# A large cluster, generated


def large_rows(dialect: str) -> list[Figure]:
    """Run the exporter on generated output for some cycles, and scrape it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_commands(folder, NODES, JOBS)
        env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "SLURM_CONF": str(folder / "slurm.conf")}
        busy = wait_for_quiet()
        with exporting(env, "--compat", dialect, "--interval", "3s") as (pid, address):
            cpu = [cpu_of_cycle(pid, folder) for _ in range(CYCLES)]
            sizes, scrapes = zip(*(scrape(address) for _ in range(SCRAPES)), strict=True)
            peak_mb = int(re.findall(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())[0]) * 1024 / 1e6
    what = f"{NODES:,} nodes, {JOBS:,} jobs, {dialect}"
    say(f"{what}: text of {max(sizes) / 1e6:.1f} MB")
    return [
        Figure(f"{what}: CPU time to collect and render", CPU_S, tuple(cpu), seconds, busy),
        Figure(f"{what}: memory at most", MEMORY_MB, (peak_mb,), lambda mb: f"{mb:.0f} MB", busy),
        Figure(f"{what}: a scrape ({max(sizes) / 1e6:.0f} MB)", SCRAPE_S, scrapes, seconds, busy),
    ]


@contextmanager
def exporting(env: Mapping[str, str], *options: str) -> Iterator[tuple[int, str]]:
    """Run the exporter; yield its process id and the address of its metrics."""
    argv = [PYTHON, "-m", "dalsegno", "exporter", "--open", "--listen", "127.0.0.1:0", *options]
    process = subprocess.Popen(argv, env=dict(env), stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr
        found = re.search(r"http://\S+/metrics", process.stderr.readline())
        if found is None:
            raise Failed("the exporter did not start")
        yield process.pid, found[0]
    finally:
        process.terminate()
        process.communicate()


def cpu_of_cycle(pid: int, folder: Path) -> float:
    """Return the CPU time of the next whole cycle, without that of Slurm's commands."""
    wait_for_cycle(folder)
    before = cpu_s(pid)
    wait_for_cycle(folder)
    return cpu_s(pid) - before


def wait_for_cycle(folder: Path) -> None:
    """Wait until the exporter asks sdiag, which it does once in a cycle."""
    asked = times_asked(folder, "sdiag")
    until = time.monotonic() + 120
    while times_asked(folder, "sdiag") == asked:
        if time.monotonic() > until:
            raise Failed("the exporter asks nothing any more")
        time.sleep(0.01)


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def scrape(address: str) -> tuple[int, float]:
    """Return the size of the metrics and the seconds until all of them were received."""
    started = time.monotonic()
    with urllib.request.urlopen(address, timeout=30) as answer:
        size = len(answer.read())
    return size, time.monotonic() - started


# A real slurmctld


def live_table() -> str:
    """Return a table of the requests to slurmctld, with and without the exporter."""
    headers = (f"{LIVE_NODES:,} nodes, {LIVE_JOBS:,} pending jobs, {LIVE_S:.0f} s", "without", "with exporter")
    if available_mib() < LIVE_MIB:
        return aligned(headers, [(f"not measured: needs {LIVE_MIB} MiB of free memory", "", "")])
    stage = Stage()
    try:
        say(f"{LIVE_NODES:,} nodes started in {stage.up(Shape(LIVE_NODES, hosts='loopback', health='off')):.0f} s")
        submit_jobs(stage)
        slurmctld = int((stage.cluster / "pid/slurmctld.pid").read_text())
        without = observed(stage, slurmctld)
        with exporting({**stage.env, **stage.slurm_env}, "--interval", "15s"):
            beside = observed(stage, slurmctld)
    finally:
        left = stage.close()
    for thing in left:
        say(f"left behind: {thing}")
    return aligned(headers, live_rows(without, beside))


def submit_jobs(stage: Stage) -> None:
    """Submit jobs that stay pending, one at a time, because slurmctld would count an array as one job."""
    once = "sbatch --begin=now+1day --output=/dev/null --wrap=true >/dev/null || exit"
    loop = f"i=0; while [ $i -lt {LIVE_JOBS} ]; do {once}; i=$((i + 1)); done"
    started = time.monotonic()
    subprocess.run(["sh", "-c", loop], env=stage.slurm_env, cwd=stage.home, check=True)
    say(f"{LIVE_JOBS:,} jobs submitted in {time.monotonic() - started:.0f} s")


def observed(stage: Stage, slurmctld: int) -> tuple[Diagnostics, float]:
    """Return the requests that slurmctld received during LIVE_S, and its CPU seconds."""
    wait_for_quiet(60)
    subprocess.run(["sdiag", "--reset"], env=stage.slurm_env, check=True, capture_output=True)
    before = cpu_s(slurmctld)
    time.sleep(LIVE_S)
    said = subprocess.run(["sdiag"], env=stage.slurm_env, check=True, capture_output=True, text=True)
    return parse_diag(said.stdout), cpu_s(slurmctld) - before


def live_rows(without: tuple[Diagnostics, float], beside: tuple[Diagnostics, float]) -> Sequence[Sequence[str]]:
    """Return a row for the CPU time, all calls, and each type of call that the exporter adds."""
    counts = [{one.name: one for one in diag.rpcs_by_type} for diag, _ in (without, beside)]
    added = [name for name in counts[1] if name not in counts[0] or counts[1][name].count > counts[0][name].count]

    def shown(at: int, name: str) -> str:
        one = counts[at].get(name)
        return f"{one.count}, {one.total_us / 1000:.1f} ms" if one else "none"

    def total(at: int) -> str:
        calls = counts[at].values()
        return f"{sum(one.count for one in calls)}, {sum(one.total_us for one in calls) / 1000:.1f} ms"

    return [
        ("CPU time of slurmctld", f"{without[1]:.2f} s", f"{beside[1]:.2f} s"),
        ("all calls to slurmctld, and their time", total(0), total(1)),
        *((f"`{name}`", shown(0, name), shown(1, name)) for name in sorted(added)),
    ]


if __name__ == "__main__":
    sys.exit(main())
