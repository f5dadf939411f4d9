#!/usr/bin/env python3
"""Measure how long training stalls after a fault, with Dal Segno and with torchrun from the same environment.

    sudo benchmarks/restart.py            everything, about a quarter of an hour; prints a table
    sudo benchmarks/restart.py --quick    fewer repetitions, no comparisons that take minutes
    sudo benchmarks/restart.py --write    also writes the table to docs/performance.md

The cluster has four virtual hosts, with one rank on each. A time ends with the first step that every rank has completed
after the fault. A tool that has not recovered after LIMIT_S counts with that time, and the table says so.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from comparison import Compared, render
from power import power_off
from quiet import wait_for_quiet
from rivals import Ours, Torchrun, kill
from stage import ROOT, Failed, Shape, Stage
from steps import lives, wait_for_restart
from table import write
from up import PYTHON, interrupt, load, machine, said, say

LIMIT_S = 120.0
REQUEUE_LIMIT_S = 180.0
STANDBY_READY_S = 3.0  # a standby worker is assumed to be ready this long after its process has started
FIVE = Shape(5, accounting=False)
LOOPBACK_64 = Shape(64, hosts="loopback", accounting=False)
PAGE = ROOT / "docs/performance.md"
STEPS = Path(tempfile.gettempdir()) / f"dalsegno-steps-{os.getpid()}"
LIGHT = (
    "--framework",
    "jax",
    "--preload",
    "json",
)  # options for agents that do not load torch, because 64 copies of it would not fit


def main() -> int:
    options = parse_options()
    if os.geteuid() != 0:
        say("virtual hosts need root")
        return 1
    signal.signal(signal.SIGTERM, interrupt)
    measured = f"Measured on {time.strftime('%Y-%m-%d')} with {machine()}, torch {torch_version()}; load {load()}."
    say(measured)
    stage, rows, code = Stage(), [], 0
    STEPS.mkdir(mode=0o755)
    try:
        for row in measure(stage, options.quick):
            say(row.line())
            rows.append(row)
    except (KeyboardInterrupt, Failed) as error:
        say(f"stopped: {str(error) or 'interrupted'}")
        code = 1
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        left = stage.close()
        shutil.rmtree(STEPS, ignore_errors=True)
    print(render(rows))
    for thing in left:
        say(f"left behind: {thing}")
    if options.write and code == 0 and not left:
        write(PAGE, f"{measured}\n\n{render(rows)}", "restart")
        say(f"wrote {PAGE.relative_to(ROOT)}")
    return code or (1 if left else 0)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, no comparisons that take minutes")
    parser.add_argument("--write", action="store_true", help="write the table to docs/performance.md")
    return parser.parse_args()


def torch_version() -> str:
    return said([PYTHON, "-c", "from importlib.metadata import version; print(version('torch'))"])


# Measurements


def measure(stage: Stage, quick: bool) -> Iterator[Compared]:
    stage.up(FIVE)
    yield first_start(stage, 1 if quick else 3)
    yield from worker_killed(stage, 5 if quick else 20, 0 if quick else 2)
    yield from node_lost(stage, 2 if quick else 5, quick)
    yield srun_killed(stage, 1 if quick else 3)
    stage.down()
    yield from many_agents(stage, 2 if quick else 5)


def first_start(stage: Stage, times: int) -> Compared:
    """Measure from the command to the first completed step, in turns."""
    ours, theirs = [], []
    for _ in range(times):
        for rival, found in ((Ours(stage, "-N", "4"), ours), (Torchrun(stage, "4", nodes=4), theirs)):
            wait_for_quiet(30)
            folder = new_folder()
            began = time.time()
            rival.start(folder)
            found.append(wait_for_restart(folder, set(), began, LIMIT_S, world=4))
            rival.stop()
    return Compared("first start: command to first step", ours, theirs, "torchrun", ratio=1.0)


def worker_killed(stage: Stage, times: int, more: int) -> Iterator[Compared]:
    """Compare with torchrun's defaults, and with a new store for each attempt, without which restarts can hang."""
    found = kills(stage, times)
    limits = {"limit_s": 0.7, "limit_95_s": 1.0, "ratio": 15.0}
    as_is = [one_rival_killed(Torchrun(stage, "4", nodes=4), 1)]
    yield Compared("worker killed to next step", found, as_is, "torchrun --max-restarts", **limits)
    apart = [one_rival_killed(Torchrun(stage, "4", nodes=4, own_store=True), 1 + turn) for turn in range(more)]
    yield Compared("… compared with torchrun's best setting", found, apart, "torchrun, new store per attempt", **limits)
    yield Compared(
        "… with standby workers (`--standby 1`)", kills(stage, times, "--standby", "1"), [], "", limit_s=0.12
    )


def kills(stage: Stage, times: int, *options: str) -> list[float]:
    """Kill one worker after the other. Return the seconds that each restart took."""
    ours = Ours(stage, "-N", "4", *options)
    folder = begin(ours)
    found = []
    for turn in range(times):
        if options:
            wait_for_standbys()
        found.append(again(folder, partial(kill_worker, ours, turn % 4)))
    ours.stop()
    return found


def wait_for_standbys() -> None:
    """Wait for four standby processes, then STANDBY_READY_S."""
    until = time.monotonic() + LIMIT_S
    while list(process_names()).count("ds:s0") < 4:
        if time.monotonic() > until:
            raise Failed("there are no standby workers")
        time.sleep(0.2)
    time.sleep(STANDBY_READY_S)


def process_names() -> Iterator[str]:
    for comm in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):
            yield comm.read_text().strip()


def one_rival_killed(rival: Torchrun, rank: int) -> float:
    folder = begin(rival)
    took = again(folder, lambda: kill(rival.worker(rank)))
    rival.stop()
    return took


def node_lost(stage: Stage, times: int, quick: bool) -> Iterator[Compared]:
    both = [one_node_lost(stage) for _ in range(times)]
    ours, detected = [took for took, _ in both], [known for _, known in both]
    elastic, requeued = ([], []) if quick else (rival_lost(stage, "3:4"), rival_lost(stage, "4", requeue=True))
    yield Compared(
        "node powered off, a spare in the run: to next step", ours, elastic, "torchrun elastic, on 3 nodes", limit_s=1.0
    )
    yield Compared("… until the loss is detected", detected, [], "", limit_s=0.9)
    yield Compared("node powered off, plain Slurm", ours, requeued, "torchrun, job requeued", limit_s=1.0)


def one_node_lost(stage: Stage) -> tuple[float, float]:
    """Return the time until the next step, and until the loss was detected."""
    run = Ours(stage, "-N", "4", "--spares", "1")
    folder = begin(run)
    node, before = member(run, 1), lives(folder)
    cut = power_off(stage, node)
    took = wait_for_restart(folder, before, cut, LIMIT_S)
    known = run.lost_at(node) - cut
    run.stop()
    stage.dalsegno("up", str(stage.home / "cluster.yaml"))
    return took, known


def rival_lost(stage: Stage, nnodes: str, requeue: bool = False) -> list[float]:
    rival = Torchrun(stage, nnodes, nodes=4, requeue=requeue)
    folder = begin(rival)
    limit_s = REQUEUE_LIMIT_S if requeue else LIMIT_S
    took = again(folder, lambda: power_off(stage, "train-2"), limit_s, world=4 if requeue else 3)
    rival.stop()
    stage.dalsegno("up", str(stage.home / "cluster.yaml"))
    return [took]


def srun_killed(stage: Stage, times: int) -> Compared:
    run = Ours(stage, "-N", "4")
    folder = begin(run)
    found = [again(folder, lambda: kill(run.srun())) for _ in range(times)]
    run.stop()
    return Compared("srun and all agents killed: to next step", found, [], "", limit_s=15)


def many_agents(stage: Stage, times: int) -> Iterator[Compared]:
    """Measure our own part with agents without torch and a program that only reports its start."""
    stage.up(LOOPBACK_64)
    program = ROOT / "benchmarks/idling.py"
    run = Ours(stage, "-N", "64", *LIGHT)
    folder = begin(run, program)
    found = [again(folder, lambda: kill(run.worker(5)), world=64) for _ in range(times)]
    yield Compared("64 agents on loopback nodes: worker killed to all 64 restarted", found, [], "", limit_s=2)
    yield Compared("… idle coordinator, share of a core", [cpu_share(run, 10.0)], [], "", limit_s=0.05, unit="")
    run.stop()
    stage.down()


# Helpers


def new_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="steps-", dir=STEPS))


def begin(rival: Ours | Torchrun, program: Path | None = None) -> Path:
    """Start a tool and wait until all ranks have completed some steps."""
    wait_for_quiet(30)
    folder = new_folder()
    if program is not None and isinstance(rival, Ours):
        rival.start(folder, program)
    else:
        rival.start(folder)
    if wait_for_restart(folder, set(), time.time(), LIMIT_S) >= LIMIT_S:
        raise Failed(f"{rival.name} did not start within {LIMIT_S:.0f} s")
    time.sleep(1.0)  # let the run complete more steps, so that faults hit in its middle
    return folder


def again(folder: Path, fault: Callable[[], float], limit_s: float = LIMIT_S, world: int | None = None) -> float:
    """Return the time from the fault to the first step that all ranks have completed after it."""
    before = lives(folder)
    took = wait_for_restart(folder, before, fault(), limit_s, world)
    time.sleep(0.5)
    return took


def kill_worker(run: Ours, rank: int) -> float:
    return kill(run.worker(rank))


def member(run: Ours, group_rank: int) -> str:
    nodes = run.status()["nodes"]
    assert isinstance(nodes, list)
    return next(str(node["name"]) for node in nodes if node["group_rank"] == group_rank)


def cpu_share(run: Ours, over_s: float) -> float:
    """Return the CPU share of the coordinator. On loopback hosts, the PID in its status is valid on this machine."""
    pid = int(str(run.status()["coordinator_pid"]))
    before = cpu_s(pid)
    time.sleep(over_s)
    return (cpu_s(pid) - before) / over_s


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    sys.exit(main())
