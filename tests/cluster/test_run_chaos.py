"""Test of a run with many random faults, some of them during a recovery."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from dalsegno.inject.faults import FaultOptions, find_fault
from dalsegno.targets.local import LocalTarget
from tests.cluster.conftest import Cli
from tests.cluster.runs import LONG_S, Run, kill, now

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(600)]

FAULTS = 20  # each kind of fault occurs at least once
SEED = int(os.environ.get("DALSEGNO_CHAOS_SEED", "11"))  # determines the faults and their order
# One of the six nodes stays up, because without any node nothing recovers.
NODES = [f"train-{number}" for number in range(1, 6)]
PATIENCE_S = 4.0  # maximum wait for a recovery before the next fault


@dataclass
class Chaos:
    """Injects faults into a run. Each method returns its victim, or "" if there is none while the run recovers."""

    run: Run
    dice: random.Random

    @property
    def target(self) -> LocalTarget:
        return LocalTarget(self.run.cli.home / "clusters/one", cache=self.run.cli.home / "cache")

    def kill_worker(self) -> str:
        return self._kill_one({f"rank {rank}": pid for rank, pid in self.run.workers().items()})

    def kill_agent(self) -> str:
        return self._kill_one(self.run.agents())

    def kill_warm_parent(self) -> str:
        return self._kill_one(self.run.warm_parents())

    def kill_srun(self) -> str:
        return self._kill_one({f"srun {pid}": pid for pid in self.run.sruns()})

    def kill_coordinator(self) -> str:
        pid = self.run.coordinator()
        return self._kill_one({"head": pid} if pid else {})

    def cut_shortly(self) -> str:
        return self._cut(0.3)

    def cut(self) -> str:
        return self._cut(3)

    def power_off(self) -> str:
        """Cut the power of a host and boot it again."""
        node = self.dice.choice(NODES)
        self.target.power_off(node)
        self.run.cli.ok("up")
        return node

    def _cut(self, seconds: float) -> str:
        node = self.dice.choice(NODES)
        self.target.inject(find_fault("net-cut"), node, FaultOptions(for_s=seconds))
        return f"{node} for {seconds:g} s"

    def _kill_one(self, found: dict[str, int]) -> str:
        if not found:
            return ""
        name = self.dice.choice(sorted(found))
        try:
            kill(found[name])
        except ProcessLookupError:
            return ""
        return name

    def plan(self) -> list[Callable[[], str]]:
        """Plan each fault at least once, but kill srun, and with it all agents, at most twice."""
        often = [self.kill_worker, self.kill_agent, self.kill_warm_parent, self.kill_coordinator]
        often += [self.cut_shortly, self.cut, self.power_off]
        faults = [*often, self.kill_srun, self.kill_srun]
        faults += self.dice.choices(often, k=FAULTS - len(faults))
        self.dice.shuffle(faults)
        return faults


def test_a_run_survives_random_faults(cluster_for_runs: Cli):
    folder = cluster_for_runs.home / "chaos"
    options = ["-N", "3", "--spares", "2", "--max-restarts", "100", "-J", "chaos"]
    run = Run.start(cluster_for_runs, folder, *options)
    run.wait_for_step(timeout_s=LONG_S)
    chaos = Chaos(run, random.Random(SEED))
    began = time.monotonic()
    for number, fault in enumerate(chaos.plan(), 1):
        do(run, chaos.dice, number, fault)
    run.cli.ok("up")
    run.wait_for_step(after=now(), timeout_s=LONG_S)
    print(f"{FAULTS} faults in {time.monotonic() - began:.0f} s, {run.generation} generations, seed {SEED}")
    assert not run.status.over, run.tail()
    assert {step.rank for step in run.steps(generation=run.generation)} == {0, 1, 2}
    run.assert_fenced()
    assert run.finish() == 0
    run.no_trace()


def do(run: Run, dice: random.Random, number: int, fault: Callable[[], str]) -> None:
    """Inject one fault, then wait. The wait is sometimes too short for the recovery."""
    at = now()
    done: list[str] = []
    run.wait_for(lambda: done.append(fault()) or done[-1])
    pause_s = dice.choice([0.0, 0.2, 1.0, PATIENCE_S])
    outcome = "the next fault comes at once"
    if pause_s:
        try:
            took = run.wait_for_step(after=now() + 0.3, timeout_s=pause_s) - at
            outcome = f"a step {took:.2f} s later"
        except AssertionError:
            outcome = f"no step within {pause_s:g} s"
    print(f"{number:2} {getattr(fault, '__name__', '')} {done[-1]}: {outcome}", flush=True)
