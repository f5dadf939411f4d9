#!/usr/bin/env python3
"""Measure a killed GPU worker: SIGKILL to the next NCCL all-reduce, with standby workers, without, and with torchrun.

    benchmarks/standby_gpu.py [--runs 8]    prints a table; some minutes

Needs one NVIDIA GPU and a PyTorch with CUDA in this Python. No Slurm: `dalsegno torchrun` has the same agent and
coordinator as `dalsegno run`. The three tools take turns, so that they see the same machine.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 60.0
READY_S = 3.0  # a standby is given this long to be ready once its process exists
GOAL_S = 0.15
TRAIN = """
import os, sys, time
import torch, torch.distributed as dist
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device)
factor = torch.ones((1024, 1024), device=device)
with open(sys.argv[1], "a", buffering=1) as out:
    step = 0
    while True:
        total = torch.ones(1024, device=device)
        dist.all_reduce(total)
        torch.cuda.synchronize()
        out.write(f"{time.time()} {os.getpid()} {step}\\n")
        factor @ factor
        step += 1
        time.sleep(0.01)
"""


class Measured(NamedTuple):
    """The first start of a launcher, and the time that each kill cost; None if it did not come back."""

    name: str
    first_s: float | None
    times_s: list[float | None]
    log: str


class Launcher:
    """One launcher with one worker on this machine's GPU."""

    def __init__(self, name: str, argv: list[str], env: dict[str, str], folder: Path) -> None:
        self.name, self.folder = name, folder
        folder.mkdir()
        (folder / "train.py").write_text(TRAIN)
        self.steps = folder / "steps"
        self.log = open(folder / "log", "w")  # noqa: SIM115
        words = [*argv, "--standalone", "--nproc-per-node=1", "--max-restarts=100", "train.py", str(self.steps)]
        self.began = time.time()
        self.process = subprocess.Popen(
            words, cwd=folder, env={**os.environ, **env}, stdout=self.log, stderr=self.log, start_new_session=True
        )

    def lines(self) -> list[list[str]]:
        return [line.split() for line in self.steps.read_text().splitlines()] if self.steps.exists() else []

    def wait(self, after: int, limit_s: float) -> float | None:
        """Return when a worker other than this one made its first all-reduce; None if there was none in time."""
        until = time.time() + limit_s
        while time.time() < until:
            found = [float(line[0]) for line in self.lines() if len(line) == 3 and int(line[1]) != after]
            fresh = [at for at in found if at > self.killed_at]
            if fresh:
                return fresh[0]
            time.sleep(0.002)
        return None

    killed_at = 0.0

    def worker(self) -> int:
        return int(self.lines()[-1][1])

    def kill(self) -> float | None:
        """Kill the worker and return how long it took until the next all-reduce."""
        pid = self.worker()
        self.killed_at = time.time()
        os.kill(pid, signal.SIGKILL)
        at = self.wait(pid, LIMIT_S)
        return None if at is None else at - self.killed_at

    def has_standby(self) -> bool:
        names = []
        for comm in Path("/proc").glob("[0-9]*/comm"):
            try:
                names.append(comm.read_text().strip())
            except OSError:
                continue
        return "ds:s0" in names

    def end(self) -> None:
        os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.log.close()


def measure(name: str, argv: list[str], env: dict[str, str], runs: int, standby: bool, folder: Path) -> Measured:
    launcher = Launcher(name, argv, env, folder)
    try:
        first = launcher.wait(0, LIMIT_S)
        if first is None:
            return Measured(name, None, [], (folder / "log").read_text()[-2000:])
        times = []
        for _ in range(runs):
            if standby:
                until = time.time() + LIMIT_S
                while not launcher.has_standby() and time.time() < until:
                    time.sleep(0.1)
                time.sleep(READY_S)
            else:
                time.sleep(2.0)
            times.append(launcher.kill())
        return Measured(name, first - launcher.began, times, (folder / "log").read_text()[-1500:])
    finally:
        launcher.end()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--verbose", action="store_true", help="also print the end of each log")
    options = parser.parse_args()
    ours = [sys.executable, "-c", "from dalsegno.cli.main import main; main()", "torchrun"]
    own = {"PYTHONPATH": str(ROOT / "src") + os.pathsep + os.environ.get("PYTHONPATH", "")}
    tools = [
        ("dalsegno, standby workers", ours, {**own, "DALSEGNO_RUN_STANDBY": "auto"}, True),
        ("dalsegno, no standby workers", ours, {**own, "DALSEGNO_RUN_STANDBY": "0"}, False),
        ("torchrun", [sys.executable, "-m", "torch.distributed.run"], {}, False),
    ]
    results: list[Measured] = []
    with tempfile.TemporaryDirectory() as folder:
        for round_ in range(2):
            for name, argv, env, standby in tools:
                runs = options.runs if name != "torchrun" else max(1, options.runs // 3)
                results.append(measure(name, argv, env, runs, standby, Path(folder) / f"{round_}-{len(results)}"))
                print(results[-1] if options.verbose else results[-1][:3], file=sys.stderr, flush=True)
    print("| launcher | first all-reduce | SIGKILL to next all-reduce, median | worst | kills |\n|---|--:|--:|--:|--:|")
    code = 0
    for name, *_ in tools:
        rounds = [each for each in results if each.name == name]
        times = [LIMIT_S if took is None else took for each in rounds for took in each.times_s]
        firsts = [each.first_s for each in rounds if each.first_s is not None]
        if not times:
            print(f"| {name} | failed | | | 0 |")
            code = 1
            continue
        print(f"| {name} | {median(firsts):.2f} s | {median(times):.3f} s | {max(times):.3f} s | {len(times)} |")
        if name == tools[0][0] and median(times) > GOAL_S:
            print(f"missed: the goal is {GOAL_S} s", file=sys.stderr)
            code = 1
    return code


if __name__ == "__main__":
    sys.exit(main())
