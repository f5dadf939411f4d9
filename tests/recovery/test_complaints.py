"""Tests of logging refusals: each once, then its count."""

from dalsegno.recovery.complaints import AGAIN_S, MOST, Complaints


def test_a_cause_is_logged_once_a_minute_with_its_count():
    logged: list[str] = []
    now = [100.0]
    complaints = Complaints(logged.append, lambda: now[0])
    for _ in range(1000):
        complaints.log("a wrong secret of gpu-1", "from 10.0.0.9")
    complaints.log("no JSON")
    assert logged == ["refused: a wrong secret of gpu-1: from 10.0.0.9", "refused: no JSON"]
    now[0] += AGAIN_S
    complaints.log("a wrong secret of gpu-1")
    assert logged[2:] == ["refused: a wrong secret of gpu-1 (999 more since the last report)"]


def test_the_number_of_causes_is_limited_and_old_ones_are_dropped():
    logged: list[str] = []
    now = [100.0]
    complaints = Complaints(logged.append, lambda: now[0])
    for number in range(10 * MOST):
        complaints.log(f"cause {number}")
    assert len(logged) == MOST
    now[0] += AGAIN_S
    complaints.log("another")
    assert logged[-1] == "refused: another"
