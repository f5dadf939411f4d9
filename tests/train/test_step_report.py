"""`dalsegno.train.report`: any script reports its steps, without torch and without a launcher."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from dalsegno.train.step_report import StepReporter, find_rank, report


class PlayedLink:
    """Simulates the agent's side, and records all messages."""

    def __init__(self) -> None:
        self.received: list[dict[str, Any]] = []

    def send(self, message: Any) -> None:
        self.received.append(dict(message))


def reporter_of(link: PlayedLink, rank: int = 0) -> StepReporter:
    return StepReporter(link, 2, rank, now=100.0)  # type: ignore[arg-type]


def test_first_report_names_step_generation_rank_and_loss():
    link = PlayedLink()
    reporter_of(link).report(7, 0.5, {"accuracy": 0.9}, last=False, now=103.0)
    (message,) = link.received
    assert (message["step"], message["generation"], message["rank"]) == (7, 2, 0)
    assert (message["progress"]["loss"], message["progress"]["accuracy"]) == (0.5, 0.9)
    assert message["progress"]["starting_s"] == 3.0


def test_last_report_is_sent_at_once_with_the_time_of_a_step_and_ends_the_hang_timer():
    link = PlayedLink()
    reporter = reporter_of(link)
    for number in range(4):
        reporter.report(number, None, {}, last=number == 3, now=103.0 + 0.25 * number)
    last = link.received[-1]
    assert (last["step"], last["over"], last["progress"]["step_s"]) == (3, True, 0.25)


def test_other_ranks_report_only_their_steps():
    link = PlayedLink()
    reporter_of(link, rank=3).report(1, 0.5, {}, last=False, now=101.0)
    assert "progress" not in link.received[0] and link.received[0]["rank"] == 3


@pytest.mark.parametrize(
    ("environ", "rank"),
    [({"RANK": "3", "SLURM_PROCID": "9"}, 3), ({"JAX_PROCESS_ID": "2"}, 2), ({"SLURM_PROCID": "5"}, 5), ({}, 0)],
)
def test_rank_is_found_for_every_framework(environ: dict[str, str], rank: int):
    assert find_rank(environ) == rank


@pytest.mark.parametrize("step", [-1, 1.5, "3", None, True])
def test_step_that_is_no_count_is_refused(step: Any):
    with pytest.raises(ValueError, match="a step is a number from 0"):
        report(step)


def test_report_needs_neither_torch_nor_a_launcher():
    code = "import sys; from dalsegno.train import report; report(1, loss=0.5); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
