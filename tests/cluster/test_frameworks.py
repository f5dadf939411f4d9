"""Tests that training with other people's frameworks ends as an undisturbed run in spite of a kill and a power cut.

`./test --long` installs the frameworks (tests/frameworks.txt).
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dalsegno.runs.folder import RunFolder
from dalsegno.targets.local import LocalTarget
from tests.cluster.conftest import Cli
from tests.cluster.runs import LONG_S, Run, footprint, kill
from tests.examples.programs import EXAMPLES

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(900)]

NODES = 3
STEPS = 60
KINDS = {
    "transformers": ("hf_trainer.py",),
    "lightning": ("lightning_fit.py",),
    "accelerate": ("accelerate_loop.py",),
    "EMA and GradScaler": ("loop.py", "--with", "ema", "scaler"),
    "inductor and loader processes": ("loop.py", "--with", "compile", "workers"),
    "StatefulDataLoader": ("loop.py", "--with", "stateful"),
    "fully_shard": ("loop.py", "--with", "fsdp"),
}
RESUMED = re.compile(r"resuming from step (\d+) ")
ENDED = re.compile(r"^ended after (.*)$", re.MULTILINE)


def start(cli: Cli, work: Path, kind: str, *options: str, pause_s: float) -> Run:
    script, *words = KINDS[kind]
    given = ("--checkpoints", str(work / "ckpt"), "--steps", str(STEPS), "--pause", str(pause_s))
    work.mkdir(parents=True)
    before = footprint(cli)
    shape = ("-N", "2", "--nproc-per-node", "2", "--name", work.name)
    program = str(EXAMPLES / "frameworks" / script)
    run = cli.ok("run", "--detach", *shape, *options, program, *given, *words, cwd=work).strip()
    return Run(cli, work, RunFolder(cli.home / "runs" / run), before)


def results(run: Run) -> dict[int, list[str]]:
    """Return what each rank printed at its end: steps, weights and losses."""
    return {rank: ENDED.findall(run.log(rank)) for rank in range(4)}


@pytest.mark.parametrize("kind", KINDS)
def test_run_ends_as_if_nothing_had_happened(cluster_for_runs: Cli, tmp_path: Path, kind: str) -> None:
    cli = cluster_for_runs
    undisturbed = start(cli, tmp_path / "undisturbed", kind, pause_s=0.0)
    assert undisturbed.wait_for_end(LONG_S) == 0, undisturbed.tail()

    run = start(cli, tmp_path / "disturbed", kind, "--spares", "1", pause_s=0.15)

    def reached(step: int) -> bool:
        """Return whether this step of the current generation is safe on two nodes."""
        safe = run.safe()
        return safe.generation == run.generation and safe.place[1] >= step

    run.wait_for(lambda: reached(11), LONG_S)
    kill(run.workers()[1])
    run.wait_for_generation(2)
    run.wait_for(lambda: reached(27), LONG_S)
    LocalTarget(cli.home / "clusters/one", cache=cli.home / "cache").power_off(run.nodes[1])
    run.wait_for_generation(3, LONG_S)
    cli.ok("up")
    assert run.wait_for_end(LONG_S) == 0, run.tail()

    ended = results(run)
    assert all(len(lines) == 1 and lines[0].startswith(f"{STEPS} steps: ") for lines in ended.values()), ended
    assert ended == results(undisturbed)
    resumed = [int(step) for number in range(2, run.generation + 1) for step in RESUMED.findall(run.log(0, number))]
    assert run.generation >= 3 and resumed[-1] >= 27, (resumed, run.tail())
