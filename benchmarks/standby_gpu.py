#!/usr/bin/env python3
"""Measure a killed worker: SIGKILL to the next all-reduce, with standby workers, without, and with torchrun.

    benchmarks/standby_gpu.py [--runs 8]          one rank on an NVIDIA GPU, over NCCL; some minutes
    benchmarks/standby_gpu.py --cpu [--runs 8]    four ranks on CPUs, over gloo

Needs a PyTorch in this Python; with CUDA unless --cpu is given. No Slurm: `dalsegno torchrun` has the same agent and
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
READY_S = 3.0  # a standby is assumed to be ready this long after its process has started
GOAL_S = 0.15
CPU_GOAL_S, CPU_RANKS = 0.12, 4
TRAIN = """
import os, sys, time
import torch, torch.distributed as dist
rank, device = int(os.environ["RANK"]), torch.device("cpu")
torch.set_num_threads(1)
if sys.argv[2] == "cuda":
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
else:
    dist.init_process_group("gloo")
factor = torch.ones((1024, 1024) if device.type == "cuda" else (128, 128), device=device)
with open(f"{sys.argv[1]}.{rank}", "a", buffering=1) as out:
    step = 0
    while True:
        total = torch.ones(1024, device=device)
        dist.all_reduce(total)
        if device.type == "cuda":
            torch.cuda.synchronize()
        out.write(f"{time.time()} {os.getpid()} {step}\\n")
        factor @ factor
        step += 1
        time.sleep(0.01)
"""


class Measured(NamedTuple):
    """The first start of a launcher, and the time that each kill cost; None if training did not resume."""

    name: str
    first_s: float | None
    times_s: list[float | None]
    log: str


class Launcher:
    """One launcher with one worker on this machine's GPU, or with several on its CPUs."""

    def __init__(self, name: str, argv: list[str], env: dict[str, str], folder: Path, cpu: bool) -> None:
        self.name, self.folder, self.ranks = name, folder, CPU_RANKS if cpu else 1
        folder.mkdir()
        (folder / "train.py").write_text(TRAIN)
        self.steps = folder / "steps"
        self.log = open(folder / "log", "w")  # noqa: SIM115
        options = ["--standalone", f"--nproc-per-node={self.ranks}", "--max-restarts=100"]
        words = [*argv, *options, "train.py", str(self.steps), "cpu" if cpu else "cuda"]
        self.began = time.time()
        self.process = subprocess.Popen(
            words, cwd=folder, env={**os.environ, **env}, stdout=self.log, stderr=self.log, start_new_session=True
        )

    def lines(self, rank: int) -> list[list[str]]:
        file = Path(f"{self.steps}.{rank}")
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        return [line.split() for line in lines if line.endswith("\n")]

    def wait(self, before: dict[int, int], since: float) -> float | None:
        """Return when all ranks had made an all-reduce in new processes after `since`; None if they had not after
        LIMIT_S."""
        until = time.time() + LIMIT_S
        while time.time() < until:
            firsts = [self._first(rank, before.get(rank, 0), since) for rank in range(self.ranks)]
            if None not in firsts:
                return max(at for at in firsts if at is not None)
            time.sleep(0.005)
        return None

    def _first(self, rank: int, before: int, since: float) -> float | None:
        times = (float(at) for at, pid, _ in self.lines(rank) if int(pid) != before and float(at) > since)
        return next(times, None)

    def kill(self) -> float | None:
        """Kill the worker with the highest rank. Return the seconds until all ranks have made an all-reduce; None after
        LIMIT_S."""
        workers = {rank: int(self.lines(rank)[-1][1]) for rank in range(self.ranks)}
        killed_at = time.time()
        os.kill(workers[self.ranks - 1], signal.SIGKILL)
        at = self.wait(workers, killed_at)
        return None if at is None else at - killed_at

    def has_standbys(self) -> bool:
        names = set[str]()
        for comm in Path("/proc").glob("[0-9]*/comm"):
            try:
                names.add(comm.read_text().strip())
            except OSError:
                continue
        return {f"ds:s{rank}" for rank in range(self.ranks)} <= names

    def end(self) -> None:
        os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.log.close()


def measure(
    name: str, argv: list[str], env: dict[str, str], runs: int, standby: bool, folder: Path, cpu: bool
) -> Measured:
    launcher = Launcher(name, argv, env, folder, cpu)
    try:
        first = launcher.wait({}, 0.0)
        if first is None:
            return Measured(name, None, [], (folder / "log").read_text()[-2000:])
        times = []
        for _ in range(runs):
            if standby:
                until = time.time() + LIMIT_S
                while not launcher.has_standbys() and time.time() < until:
                    time.sleep(0.1)
                time.sleep(READY_S)
            else:
                time.sleep(2.0)
            times.append(launcher.kill())
            if times[-1] is None:
                break  # there are no workers to kill
        return Measured(name, first - launcher.began, times, (folder / "log").read_text()[-1500:])
    finally:
        launcher.end()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--verbose", action="store_true", help="also print the end of each log")
    parser.add_argument("--cpu", action="store_true", help="four ranks on CPUs instead of one on a GPU")
    options = parser.parse_args()
    goal_s, standby_setting = (CPU_GOAL_S, "1") if options.cpu else (GOAL_S, "auto")
    ours = [sys.executable, "-c", "from dalsegno.cli.main import main; main()", "torchrun"]
    own = {"PYTHONPATH": str(ROOT / "src") + os.pathsep + os.environ.get("PYTHONPATH", "")}
    tools = [
        ("dalsegno, standby workers", ours, {**own, "DALSEGNO_RUN_STANDBY": standby_setting}, True),
        ("dalsegno, no standby workers", ours, {**own, "DALSEGNO_RUN_STANDBY": "0"}, False),
        ("torchrun", [sys.executable, "-m", "torch.distributed.run"], {}, False),
    ]
    if options.cpu:  # with gloo, torchrun may hang after a restart unless each attempt has a store of its own
        tools.append(
            ("torchrun, new store per attempt", tools[-1][1], {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}, False)
        )
    results: list[Measured] = []
    with tempfile.TemporaryDirectory() as folder:
        for round_ in range(2):
            for name, argv, env, standby in tools:
                runs = options.runs if not name.startswith("torchrun") else max(1, options.runs // 3)
                place = Path(folder) / f"{round_}-{len(results)}"
                results.append(measure(name, argv, env, runs, standby, place, options.cpu))
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
        if name == tools[0][0] and median(times) > goal_s:
            print(f"missed: the goal is {goal_s} s", file=sys.stderr)
            code = 1
    return code


if __name__ == "__main__":
    sys.exit(main())
