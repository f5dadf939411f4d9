#!/usr/bin/env python3
"""Measure how soon a run detects a lost node, and how many false alarms that costs on a disturbed cluster.

    sudo benchmarks/detection.py            13 minutes of disturbances, then power cuts; prints a table
    sudo benchmarks/detection.py --quick    three minutes of disturbances
    sudo benchmarks/detection.py --write    also writes the table to docs/performance.md

There is one run per node timeout. All runs use the same five virtual hosts at the same time, so they meet the same
disturbances. Throughout, a process per core keeps all cores busy. In the second phase, one host after the other is
stopped for 3 s with SIGSTOP, with all its processes. In the third, each host loses 30 % of its packets, both ways. In
the last phase, which lasts ten minutes, hosts are stopped and lose packets as well. No host is lost in these phases, so
each loss that a run reports is a false alarm. Then hosts lose power.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

from power import namespace, power_off, processes_of
from quiet import wait_for_quiet
from rivals import Ours
from stage import ROOT, Failed, Shape, Stage
from table import aligned, write
from up import load, machine, say

TIMEOUTS_S = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.5, 3.0)
HOSTS, TRAINING, SPARES = 5, 3, 1
PHASES_MIN = {"busy": 1.0, "busy, hosts stopped": 1.0, "busy, 30 % loss": 1.0, "busy, stopped, 30 % loss": 10.0}
QUICK = 0.25  # the fraction of PHASES_MIN that --quick takes
STOPPED_S, STOP_EVERY_S = 3.0, 5.0
START_LIMIT_S, LOSS_LIMIT_S = 180.0, 30.0
PAGE = ROOT / "docs/performance.md"
WORKER = "#!/bin/sh\nexec sleep infinity\n"


class LargeNodes(Shape):
    """Nodes with enough CPUs for all runs at once."""

    def file(self) -> str:
        return super().file().replace(f"nodes: {self.nodes},", f"nodes: {self.nodes}, cpus: 64,")


SHAPE = LargeNodes(HOSTS, accounting=False)


def main() -> int:
    options = parse_options()
    if os.geteuid() != 0:
        say("virtual hosts need root")
        return 1
    measured = f"Measured on {time.strftime('%Y-%m-%d')} with {machine()}; load {load()}."
    say(measured)
    stage, code, table = Stage(), 0, ""
    try:
        stage.up(SHAPE)
        table = measure(stage, QUICK if options.quick else 1.0, 2 if options.quick else 4)
    except (KeyboardInterrupt, Failed) as error:
        say(f"stopped: {str(error) or 'interrupted'}")
        code = 1
    finally:
        left = stage.close()
    print(table)
    for thing in left:
        say(f"left behind: {thing}")
    if options.write and not code and not left:
        write(PAGE, f"{measured}\n\n{table}", "detection")
    return code or (1 if left else 0)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three minutes of disturbances, fewer power cuts")
    parser.add_argument("--write", action="store_true", help="write the table to docs/performance.md")
    return parser.parse_args()


def measure(stage: Stage, share: float, cuts: int) -> str:
    runs = start_runs(stage)
    hosts = {name: namespace(stage, name) for name in host_names()}
    counts: list[dict[float, int]] = []
    for phase, minutes in PHASES_MIN.items():
        before = losses(runs)
        with busy_cores(), lossy_hosts(stage, "loss" in phase), stopped_hosts(hosts, "stopped" in phase):
            time.sleep(60 * minutes * share)
        time.sleep(5)  # a loss that began in this phase is reported by then, and counted for it
        now = losses(runs)
        counts.append({timeout_s: now[timeout_s] - before[timeout_s] for timeout_s in runs})
        say(f"{phase}: {counts[-1]}")
        complete_runs(stage, runs)
    found = power_cuts(stage, runs, cuts)
    rows = []
    for timeout_s in runs:
        times = found[timeout_s] or [LOSS_LIMIT_S]
        alarms = [str(count[timeout_s]) for count in counts]
        rows.append([f"{timeout_s:g} s", f"{median(times):.2f} s", f"{max(times):.2f} s", str(len(times)), *alarms])
    disturbed = [f"false alarms: {phase}, {minutes * share:g} min" for phase, minutes in PHASES_MIN.items()]
    return aligned(("node timeout", "detected", "worst", "cuts", *disturbed), rows)


def host_names() -> list[str]:
    return [f"train-{number}" for number in range(1, HOSTS + 1)]


def start_runs(stage: Stage) -> dict[float, Ours]:
    script = stage.home / "worker.sh"
    script.write_text(WORKER)
    script.chmod(0o755)
    runs = {}
    for timeout_s in TIMEOUTS_S:
        options = ["-N", str(TRAINING), "--spares", str(SPARES), "--no-preload", "--mem", "100M"]
        runs[timeout_s] = Ours(stage, *options, "--node-timeout", str(timeout_s))
        runs[timeout_s].start(stage.home, script)
    until = time.monotonic() + START_LIMIT_S
    while not all(map(is_complete, runs.values())):
        if time.monotonic() > until:
            raise Failed("the runs did not start")
        time.sleep(0.2)
    return runs


def complete_runs(stage: Stage, runs: dict[float, Ours]) -> None:
    """Boot and return nodes that were declared lost, and restart runs that lack a node or their spare."""
    incomplete = [run for run in runs.values() if not is_complete(run)]
    if incomplete:
        stage.dalsegno("up", str(stage.home / "cluster.yaml"))
    for run in incomplete:
        run.stop()
        run.start(stage.home, stage.home / "worker.sh")
    until = time.monotonic() + START_LIMIT_S
    while not all(map(is_complete, runs.values())):
        if time.monotonic() > until:
            raise Failed(f"runs did not start again: {[members(run) for run in runs.values()]}")
        time.sleep(0.2)


def is_complete(run: Ours) -> bool:
    return members(run) == (TRAINING, SPARES)


def members(run: Ours) -> tuple[int, int]:
    """Return how many nodes of the run train, and how many are spares."""
    try:
        nodes = run.status()["nodes"]
    except (OSError, ValueError, KeyError):
        return 0, 0
    assert isinstance(nodes, list)
    states = [node["state"] for node in nodes]
    return states.count("member"), states.count("spare")


def losses(runs: dict[float, Ours]) -> dict[float, int]:
    return {timeout_s: len(lost(run)) for timeout_s, run in runs.items()}


def lost(run: Ours) -> list[dict[str, object]]:
    entries = [json.loads(line) for line in (run.runs / "journal.jsonl").read_text().splitlines()]
    return [entry for entry in entries if entry["event"] == "lost"]


# Disturbances


@contextmanager
def busy_cores() -> Iterator[None]:
    processes = [multiprocessing.Process(target=spin, daemon=True) for _ in range(os.cpu_count() or 1)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()


def spin() -> None:
    while True:
        pass


@contextmanager
def lossy_hosts(stage: Stage, wanted: bool) -> Iterator[None]:
    for host in host_names() if wanted else ():
        stage.dalsegno("inject", "net-loss", host, "--percent", "30")
    try:
        yield
    finally:
        if wanted:
            stage.dalsegno("inject", "--clear")


@contextmanager
def stopped_hosts(hosts: dict[str, str], wanted: bool) -> Iterator[None]:
    """Stop one host after the other for some seconds, with all its processes."""
    done = threading.Event()

    def stop_in_turn() -> None:
        turn = 0
        while not done.wait(STOP_EVERY_S - STOPPED_S):
            pids = processes_of(hosts[sorted(hosts)[turn % len(hosts)]])
            send(pids, signal.SIGSTOP)
            done.wait(STOPPED_S)
            send(pids, signal.SIGCONT)
            turn += 1

    thread = threading.Thread(target=stop_in_turn)
    if wanted:
        thread.start()
    try:
        yield
    finally:
        done.set()
        if wanted:
            thread.join()


def send(pids: list[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


# Power cuts


def power_cuts(stage: Stage, runs: dict[float, Ours], times: int) -> dict[float, list[float]]:
    """Cut the power of a host several times. Return, by node timeout, the times until a run that used the host declared
    it lost."""
    found: dict[float, list[float]] = {timeout_s: [] for timeout_s in runs}
    complete_runs(stage, runs)
    for turn in range(times):
        wait_for_quiet(30)
        host = host_names()[turn % HOSTS]
        before, users = losses(runs), {timeout_s: run for timeout_s, run in runs.items() if uses(run, host)}
        cut_at = power_off(stage, host)
        for timeout_s, run in users.items():
            until = time.monotonic() + LOSS_LIMIT_S
            while len(lost(run)) == before[timeout_s] and time.monotonic() < until:
                time.sleep(0.05)
            found[timeout_s] += [float(str(entry["at"])) - cut_at for entry in lost(run)[before[timeout_s] :][:1]]
        stage.dalsegno("up", str(stage.home / "cluster.yaml"))
        complete_runs(stage, runs)
    return found


def uses(run: Ours, host: str) -> bool:
    nodes = run.status()["nodes"]
    assert isinstance(nodes, list)
    return any(node["name"] == host for node in nodes)


if __name__ == "__main__":
    sys.exit(main())
