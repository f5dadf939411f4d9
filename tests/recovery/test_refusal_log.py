"""Tests of logging refusals: each once, then its count."""

from dalsegno.recovery.refusal_log import AGAIN_S, MAX_CAUSES, RefusalLog


def test_a_cause_is_logged_once_a_minute_with_its_count():
    logged: list[str] = []
    now = [100.0]
    refusals = RefusalLog(logged.append, lambda: now[0])
    for _ in range(1000):
        refusals.log("a wrong secret of gpu-1", "from 10.0.0.9")
    refusals.log("no JSON")
    assert logged == ["refused: a wrong secret of gpu-1: from 10.0.0.9", "refused: no JSON"]
    now[0] += AGAIN_S
    refusals.log("a wrong secret of gpu-1")
    assert logged[2:] == ["refused: a wrong secret of gpu-1 (999 more since the last report)"]


def test_the_number_of_causes_is_limited_and_old_ones_are_dropped():
    logged: list[str] = []
    now = [100.0]
    refusals = RefusalLog(logged.append, lambda: now[0])
    for number in range(10 * MAX_CAUSES):
        refusals.log(f"cause {number}")
    assert len(logged) == MAX_CAUSES
    now[0] += AGAIN_S
    refusals.log("another")
    assert logged[-1] == "refused: another"
