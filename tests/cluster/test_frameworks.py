"""Tests that a kill and a power cut do not change the result of training with third-party frameworks.

`./test --long` installs the frameworks (tests/frameworks.txt).
"""

from __future__ import annotations

import importlib.util
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
STEPS, DISK_EVERY = 60, 20  # the second is the default of the examples
KINDS = {
    "transformers": ("hf_trainer.py",),
    "lightning": ("lightning_fit.py",),
    "accelerate": ("accelerate_loop.py",),
    "EMA, and autocast to float16 with GradScaler": ("loop.py", "--with", "ema", "amp", "scaler"),
    "autocast to bfloat16": ("loop.py", "--with", "amp"),
    "inductor and loader processes": ("loop.py", "--with", "compile", "workers"),
    "StatefulDataLoader": ("loop.py", "--with", "stateful"),
    "fully_shard": ("loop.py", "--with", "fsdp"),
}
DEEPSPEED = ("deepspeed_loop.py", "--disk-every", "10")
RESUMED = re.compile(r"resuming from step (\d+) \((\w+)\)")
ENDED = re.compile(r"^ended after (.*)$", re.MULTILINE)


def start(
    cli: Cli, work: Path, program: tuple[str, ...], *options: str, pause_s: float, nproc_per_node: int = 2
) -> Run:
    script, *words = program
    given = ("--checkpoints", str(work / "ckpt"), "--steps", str(STEPS), "--pause", str(pause_s))
    work.mkdir(parents=True)
    before = footprint(cli)
    shape = ("-N", "2", "--nproc-per-node", str(nproc_per_node), "--name", work.name)
    path = str(EXAMPLES / "frameworks" / script)
    run = cli.ok("run", "--detach", *shape, *options, path, *given, *words, cwd=work).strip()
    return Run(cli, work, RunFolder(cli.home / "runs" / run), before)


def results(run: Run, ranks: int = 4) -> dict[int, list[str]]:
    """Return what each rank printed at its end: steps, weights and losses."""
    return {rank: ENDED.findall(run.log(rank)) for rank in range(ranks)}


@pytest.mark.parametrize("kind", KINDS)
def test_run_ends_as_if_nothing_had_happened(cluster_for_runs: Cli, tmp_path: Path, kind: str) -> None:
    cli = cluster_for_runs
    undisturbed = start(cli, tmp_path / "undisturbed", KINDS[kind], pause_s=0.0)
    assert undisturbed.wait_for_end(LONG_S) == 0, undisturbed.tail()

    run = start(cli, tmp_path / "disturbed", KINDS[kind], "--spares", "1", pause_s=0.15)

    def reached(step: int) -> bool:
        """Return whether the current generation has made this step, and the step is safe on two nodes.

        At the start of a generation, the safe step is still one of the generation before.
        """
        made_in, safe_step = run.safe().place
        return made_in == run.generation and safe_step >= step

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
    assert run.generation == 3, run.tail()
    killed, dark = (RESUMED.findall(run.log(0, number)) for number in (2, 3))
    assert [(int(step) >= 11, source) for step, source in killed] == [(True, "memory")], (killed, run.tail())
    # The checkpoint on disk may be newer than the newest step that another node had a copy of.
    assert [int(step) >= 27 and (source == "memory" or int(step) % DISK_EVERY == 0) for step, source in dark] == [True]


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="`./test --long` installs DeepSpeed")
def test_deepspeed_continues_from_its_own_checkpoint(cluster_for_runs: Cli, tmp_path: Path) -> None:
    cli = cluster_for_runs
    undisturbed = start(cli, tmp_path / "undisturbed", DEEPSPEED, pause_s=0.0, nproc_per_node=1)
    assert undisturbed.wait_for_end(LONG_S) == 0, undisturbed.tail()

    run = start(cli, tmp_path / "disturbed", DEEPSPEED, "--spares", "1", pause_s=0.15, nproc_per_node=1)

    def saved() -> int:
        """Return the step of DeepSpeed's newest checkpoint."""
        return int((run.work / "ckpt" / "latest").read_text().removeprefix("global_step"))

    run.wait_for(lambda: saved() >= 10, LONG_S)
    kill(run.workers()[1])
    run.wait_for_generation(2)
    run.wait_for(lambda: saved() >= 30, LONG_S)
    LocalTarget(cli.home / "clusters/one", cache=cli.home / "cache").power_off(run.nodes[1])
    run.wait_for_generation(3, LONG_S)
    cli.ok("up")
    assert run.wait_for_end(LONG_S) == 0, run.tail()

    ended = results(run, ranks=2)
    assert all(len(lines) == 1 and lines[0].startswith(f"{STEPS} steps: ") for lines in ended.values()), ended
    assert ended == results(undisturbed, ranks=2)
    assert run.generation == 3, run.tail()
    killed, dark = (int(step) for number in (2, 3) for step, _ in RESUMED.findall(run.log(0, number)))
    assert killed in (10, 20) and dark in (30, 40), (killed, dark)
