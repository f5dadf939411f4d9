"""Refusals in the log: each once, then how often."""

from dalsegno.recovery.complaints import AGAIN_S, MOST, Complaints


def test_the_same_cause_is_said_once_a_minute_and_then_with_how_often():
    said: list[str] = []
    now = [100.0]
    complaints = Complaints(said.append, lambda: now[0])
    for _ in range(1000):
        complaints.about("a wrong secret of gpu-1", "from 10.0.0.9")
    complaints.about("no JSON")
    assert said == ["refused: a wrong secret of gpu-1: from 10.0.0.9", "refused: no JSON"]
    now[0] += AGAIN_S
    complaints.about("a wrong secret of gpu-1")
    assert said[2:] == ["refused: a wrong secret of gpu-1 (999 more since the last report)"]


def test_a_flood_of_causes_is_cut_off_and_the_old_ones_are_forgotten():
    said: list[str] = []
    now = [100.0]
    complaints = Complaints(said.append, lambda: now[0])
    for number in range(10 * MOST):
        complaints.about(f"cause {number}")
    assert len(said) == MOST
    now[0] += AGAIN_S
    complaints.about("another")
    assert said[-1] == "refused: another"
