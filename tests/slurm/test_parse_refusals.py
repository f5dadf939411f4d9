"""Tests of classifying Slurm's refusals and the reasons for which it drains nodes."""

import pytest

from dalsegno.slurm.parse.messages import (
    SlurmReason,
    SlurmRefusal,
    SlurmTrouble,
    is_absence,
    parse_reason,
    parse_refusal,
    parse_troubles,
)

NO_NODES = "salloc: error: Job submit/allocate failed: Requested node configuration is not available\n"


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        (NO_NODES, SlurmRefusal.NO_SUCH_NODES),
        (f"salloc: error: Memory specification can not be satisfied\n{NO_NODES}", SlurmRefusal.MEMORY),
        ("salloc: error: Job submit/allocate failed: Invalid qos specification", SlurmRefusal.QOS),
        ("Requested operation is presently disabled for job 7", SlurmRefusal.REQUEUE_DISABLED),
        ("a message of a later Slurm", SlurmRefusal.UNKNOWN),
        ("", SlurmRefusal.UNKNOWN),
    ],
)
def test_most_specific_refusal_is_returned(text: str, refusal: SlurmRefusal):
    assert parse_refusal(text) is refusal


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Prolog error", SlurmReason.PROLOG),
        ("Kill task failed, Not responding", SlurmReason.KILL_TASK),
        ("Low RealMemory (reported:1 < 100.00% of configured:2)", SlurmReason.HARDWARE),
        ("gres/gpu count reported lower than configured (7 < 8)", SlurmReason.HARDWARE),
        ("Prolog error: see ticket 7", SlurmReason.UNKNOWN),
        ("Kill task failed, waiting for a part", SlurmReason.UNKNOWN),
        ("", SlurmReason.UNKNOWN),
    ],
)
def test_reason_must_match_slurms_text_exactly(text: str, reason: SlurmReason):
    assert parse_reason(text) is reason


def test_absence_is_an_empty_reason_or_not_responding():
    away = ["", "Not responding", "Node unexpectedly rebooted", "none"]
    assert [is_absence(text) for text in away] == [True] * 4
    assert not is_absence("new RAM, not responding")


@pytest.mark.parametrize(
    ("text", "troubles"),
    [
        ("slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
         (SlurmTrouble.NO_CONTROLLER, SlurmTrouble.NO_CONNECTION)),
        ("fetch_config: DNS SRV lookup failed\nUnable to contact slurm controller",
         (SlurmTrouble.NO_SETTINGS, SlurmTrouble.NO_CONTROLLER)),
        ("slurm_load_jobs error: Invalid job id specified", ()),
    ],
)  # fmt: skip
def test_all_troubles_in_the_output_are_returned(text: str, troubles: tuple[SlurmTrouble, ...]):
    assert parse_troubles(text) == troubles
