"""Repeating refused requests for a node."""

from dalsegno.runs.coordinator.nodes.node_rules import Refusals

BUSY = "Job violates accounting/QOS policy"
NONE_LEFT = "Job submit/allocate failed: Requested node configuration is not available"


def asked_in_vain(why: str, until_s: float) -> list[float]:
    """Return the times of the requests in this period, if all are refused and checks are made every half second."""
    refusals, asked = Refusals(), list[float]()
    for half in range(int(until_s * 2)):
        if refusals.may_ask({"n1"}, half / 2):
            asked.append(half / 2)
            refusals.refused(why, {"n1"}, half / 2)
    return asked


def test_first_request_is_allowed():
    assert Refusals().may_ask({"n1", "n2"}, 0.0)


def test_requests_become_less_frequent_after_refusals():
    assert asked_in_vain(BUSY, 200) == [0, 5, 15, 35, 75, 135, 195]


def test_requests_are_rare_if_no_node_could_be_granted():
    assert asked_in_vain(NONE_LEFT, 3600) == [0, 60, 180, 420, 900, 1800, 2700]


def test_one_more_candidate_node_allows_a_new_request():
    refusals = Refusals()
    refusals.refused(NONE_LEFT, {"n1", "n2"}, 0.0)
    assert refusals.may_ask({"n2"}, 0.5)
    assert not refusals.may_ask({"n1", "n2"}, 0.5) and not refusals.may_ask({"n1", "n2", "n3"}, 0.5)


def test_same_refusal_is_reported_once():
    refusals = Refusals()
    assert refusals.refused(BUSY, {"n1"}, 0.0) and not refusals.refused(BUSY, {"n1"}, 5.0)
    assert refusals.refused(NONE_LEFT, {"n1"}, 15.0)
    refusals.over()
    assert refusals.why == "" and refusals.may_ask({"n1"}, 15.5) and refusals.refused(NONE_LEFT, {"n1"}, 16.0)
