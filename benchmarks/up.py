#!/usr/bin/env python3
"""Measure how long a cluster takes to start and to be removed, and how quickly the command line starts.

    benchmarks/up.py            everything, some minutes; prints a table
    benchmarks/up.py --quick    fewer runs, no large clusters
    benchmarks/up.py --write    also writes the table to docs/performance.md

Every figure is the wall time of the command that a user types (`./dalsegno …`), with the start of the process, in a
private state folder. A row waits until the machine is quiet. At the end, and on Ctrl-C, everything is removed.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

from quick_acknowledgement import switch_off
from quiet import available_mib, wait_for_quiet
from stage import ROOT, Failed, Shape, Stage
from table import Row, render, seconds, write

FOUR = Shape(4)
PLAIN = Shape(4, accounting=False)
VIRTUAL_64 = Shape(64)
LOOPBACK_256 = Shape(256, hosts="loopback")
LOOPBACK_1000 = Shape(1000, hosts="loopback")
MIB_PER_NODE = 8  # memory of a slurmd and its connections
PAGE = ROOT / "docs/performance.md"
PYTHON = str(ROOT / ".venv/bin/python")

Timed = Callable[[], float]


def main() -> int:
    options = parse_options()
    signal.signal(signal.SIGTERM, interrupt)
    stage = Stage()
    rows: list[Row] = []
    left: list[str] = []
    code = 0
    measured = f"Measured on {time.strftime('%Y-%m-%d')} with {machine()}; load average before the first row {load()}."
    say(measured)
    try:
        for row in measure(stage, options.quick):
            say(f"{row.what}: {', '.join(map(seconds, row.times_s)) or row.verdict}")
            rows.append(row)
    except (KeyboardInterrupt, Failed) as error:
        say(f"stopped: {str(error) or 'interrupted'}")
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not leave a cluster behind
        left = stage.close()
    print(render(rows))
    for thing in left:
        say(f"left behind: {thing}")
    if options.write and code == 0 and not left:
        write(PAGE, f"{measured}\n\n{render(rows)}", "up")
        say(f"wrote {PAGE.relative_to(ROOT)}")
    return code or (1 if left else 0)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer runs, no large clusters")
    parser.add_argument("--write", action="store_true", help="write the table to docs/performance.md")
    return parser.parse_args()


def interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


# Measurements


def measure(stage: Stage, quick: bool) -> Iterator[Row]:
    """Yield row after row. A cluster exists only while its rows need it."""
    few, some, many = (1, 2, 5) if quick else (3, 5, 20)
    yield from start_rows(stage, many)
    if os.geteuid() == 0:
        yield from four_node_rows(stage, few, some, many)
        yield start_and_remove("4 virtual hosts, without accounting", 1.5, stage, PLAIN, some)
    else:
        yield Row("4 and 64 virtual hosts", None, (), note="needs root")
    if not quick:
        yield from large_rows(stage, few)


def start_rows(stage: Stage, many: int) -> Iterator[Row]:
    python = [PYTHON, "-c", "pass"]
    stage.dalsegno("--help")  # fills the caches before the measurements
    yield repeat("`python -c pass`, for comparison", None, lambda: stage.timed(python, stage.env), many)
    yield repeat("`dalsegno --help`", 0.2, lambda: stage.dalsegno("--help"), many)


def four_node_rows(stage: Stage, few: int, some: int, many: int) -> Iterator[Row]:
    yield start_and_remove("4 virtual hosts with accounting, first time", 6, stage, FOUR, few, stage.forget_template)
    downs: list[float] = []
    yield start_and_remove("4 virtual hosts with accounting, template cached", 3, stage, FOUR, some, downs=downs)
    yield Row("`down` of these 4", 1, tuple(downs))
    stage.up(FOUR)
    yield repeat("`dalsegno status` of these 4", 0.2, lambda: stage.dalsegno("status"), many)
    yield repeat("the Slurm commands in it, alone", None, lambda: slurms_part(stage), many)
    yield from sacctmgr_rows(stage, many)
    stage.down()


def slurms_part(stage: Stage) -> float:
    ask = (["scontrol", "-o", "show", "node"], ["squeue", "--noheader"])
    return sum(stage.timed(argv, stage.slurm_env) for argv in ask)


def sacctmgr_rows(stage: Stage, many: int) -> Iterator[Row]:
    def ask() -> float:
        return stage.timed(["sacctmgr", "--noheader", "show", "cluster"], stage.slurm_env)

    yield repeat("one `sacctmgr` command, with quick acknowledgement", None, ask, many)
    switch_off(stage.cluster)
    yield repeat("the same, with Linux's default acknowledgement", None, ask, many)


def large_rows(stage: Stage, few: int) -> Iterator[Row]:
    if os.geteuid() == 0:
        yield start_and_remove("64 virtual hosts with accounting", 6, stage, VIRTUAL_64, few)
    yield start_and_remove("256 loopback nodes with accounting", 10, stage, LOOPBACK_256, few)
    what = "1,000 loopback nodes with accounting"
    if available_mib() < 1000 * MIB_PER_NODE:
        yield Row(what, None, (), note=f"needs {1000 * MIB_PER_NODE} MiB of free memory", required="starts")
        return
    yield thousand(what, stage)


def thousand(what: str, stage: Stage) -> Row:
    busy = wait_for_quiet()
    before = available_mib()
    took = stage.up(LOOPBACK_1000)
    used = before - available_mib()
    note = f"takes {used} MiB; `down` {seconds(stage.down())}"
    return Row(what, None, (took,), busy, note, required="starts")


# Helpers


def start_and_remove(
    what: str,
    limit_s: float,
    stage: Stage,
    shape: Shape,
    runs: int,
    first: Callable[[], None] = lambda: None,
    downs: list[float] | None = None,
) -> Row:
    """Start the cluster until all nodes are idle, and remove it, several times."""

    def once() -> float:
        first()
        took = stage.up(shape)
        gone = stage.down()
        if downs is not None:
            downs.append(gone)
        return took

    return repeat(what, limit_s, once, runs)


def repeat(what: str, limit_s: float | None, once: Timed, runs: int) -> Row:
    """Repeat a measurement. Wait for a quiet machine once for short ones, before each run for long ones."""
    times: list[float] = []
    busy = 0.0
    for _ in range(runs):
        if not times or max(times) > 0.5:
            busy = max(busy, wait_for_quiet())
        times.append(once())
    return Row(what, limit_s, tuple(times), busy)


# Machine


def machine() -> str:
    kernel = platform.release().split("-")[0]
    return f"{said(['slurmctld', '-V'])}, {mariadb()}, {said([PYTHON, '-V'])}, Linux {kernel}, {size()}"


def size() -> str:
    total = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal:"))
    return f"{os.cpu_count()} cores, {round(int(total.split()[1]) / 1024**2)} GiB"


def mariadb() -> str:
    words = said(["mariadbd", "--version"]).split()
    return f"MariaDB {words[words.index('Ver') + 1].split('-')[0]}" if "Ver" in words else "no MariaDB"


def said(argv: Sequence[str]) -> str:
    env = {**os.environ, "PATH": f"{os.environ.get('PATH', os.defpath)}:/usr/sbin"}
    try:
        return subprocess.run(argv, capture_output=True, text=True, env=env).stdout.strip()
    except FileNotFoundError:
        return f"no {argv[0]}"


def load() -> str:
    return " ".join(f"{value:.2f}" for value in os.getloadavg())


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
