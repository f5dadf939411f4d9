"""examples/gpt.py: alone, with DDP and with FSDP2; stopped and resumed, also on another number of ranks."""

from __future__ import annotations

import subprocess

import pytest

from tests.examples.programs import ALONE, EXAMPLES, FRAIL, PAIR, TINY_GPT, TORCHRUN, assert_well, launcher, losses
from tests.submit.torchrun.launcher import Launcher

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]  # several processes, each with torch

__all__ = ["launcher"]
LONG = ["--steps", "160", "--save-every", "80"]
SINGLE = ["--standalone", "--nproc-per-node", "1"]


def stopped(launcher: Launcher, *words: str, fsdp: bool = False) -> subprocess.CompletedProcess[str]:
    """Send one rank a signal. All ranks then save the same step and stop."""
    run = launcher.run(*words, str(FRAIL), "SIGTERM", "0", "20", *TINY_GPT, *LONG, *(["--fsdp"] if fsdp else []))
    assert run.returncode == 1 and 20 < len(losses(run)) < 300, run.stderr[-3000:]
    assert f"saved step {len(losses(run))}, stopping" in run.stderr
    return run


def first_loss(run: subprocess.CompletedProcess[str]) -> float:
    (loss,) = losses(run)[min(losses(run))]
    return float(loss)


@pytest.mark.long  # tests/cluster/test_examples.py runs it on two nodes
@pytest.mark.parametrize("kind", ["--fsdp", ""])
def test_twenty_steps_on_two_ranks_end_with_a_sample(launcher: Launcher, kind: str) -> None:
    run = launcher.run(*PAIR, *TINY_GPT, "--steps", "20", *kind.split())
    assert_well(run)
    assert list(losses(run)) == list(range(20))
    assert len(run.stdout.split("step 19 loss ")[1].partition("\n")[2]) == 21


@pytest.mark.long
@pytest.mark.parametrize("kind", ["--fsdp", ""])
def test_stopped_run_resumes_with_the_same_loss_curve(launcher: Launcher, kind: str) -> None:
    first = stopped(launcher, *PAIR, fsdp=bool(kind))
    second = launcher.run(*PAIR, *TINY_GPT, *LONG, *kind.split())
    undisturbed = launcher.run(*PAIR, *TINY_GPT, *LONG, *kind.split(), "--checkpoints", "undisturbed")
    assert_well(second), assert_well(undisturbed)
    assert set(losses(first)).isdisjoint(losses(second))
    assert losses(first, second) == losses(undisturbed)


@pytest.mark.long
@pytest.mark.parametrize(("before", "after"), [(PAIR, SINGLE), (SINGLE, PAIR)])
def test_sharded_run_resumes_on_another_number_of_ranks(
    launcher: Launcher, before: list[str], after: list[str]
) -> None:
    first = stopped(launcher, *before, fsdp=True)
    second = launcher.run(*after, *TINY_GPT, *LONG, "--fsdp", program=TORCHRUN)
    assert_well(second)
    assert min(losses(second)) == max(losses(first)) + 1
    assert first_loss(second) < first_loss(first) - 0.5  # the second run did not start from scratch


@pytest.mark.long
def test_sharded_run_resumes_unsharded_in_one_process(launcher: Launcher) -> None:
    first = stopped(launcher, *PAIR, fsdp=True)
    second = launcher.run(*TINY_GPT, *LONG, program=ALONE)
    assert_well(second)
    assert min(losses(second)) == max(losses(first)) + 1
    assert first_loss(second) < first_loss(first) - 0.5


def test_text_has_21_sonnets_of_fourteen_lines() -> None:
    numbers_and_poems = (EXAMPLES / "data/sonnets.txt").read_text().rstrip("\n").split("\n\n")
    assert len(numbers_and_poems) == 2 * 21
    assert {len(poem.split("\n")) for poem in numbers_and_poems[1::2]} == {14}
