"""When Slurm is asked again for a node that it has refused."""

from dalsegno.runs.coordinator.node_loss import Refusals

BUSY = "Job violates accounting/QOS policy"
NONE_LEFT = "Job submit/allocate failed: Requested node configuration is not available"


def asked_in_vain(why: str, until_s: float) -> list[float]:
    """When it is asked in this time, if nothing changes: looked at every half second."""
    refusals, asked = Refusals(), list[float]()
    for half in range(int(until_s * 2)):
        if refusals.may_ask({"n1"}, half / 2):
            asked.append(half / 2)
            refusals.refused(why, {"n1"}, half / 2)
    return asked


def test_at_first_nothing_speaks_against_asking():
    assert Refusals().may_ask({"n1", "n2"}, 0.0)


def test_it_is_asked_less_and_less_often():
    assert asked_in_vain(BUSY, 200) == [0, 5, 15, 35, 75, 135, 195]


def test_where_no_node_could_be_given_hardly_ever():
    assert asked_in_vain(NONE_LEFT, 3600) == [0, 60, 180, 420, 900, 1800, 2700]


def test_one_node_more_to_choose_from_is_another_question():
    refusals = Refusals()
    refusals.refused(NONE_LEFT, {"n1", "n2"}, 0.0)
    assert refusals.may_ask({"n2"}, 0.5)
    assert not refusals.may_ask({"n1", "n2"}, 0.5) and not refusals.may_ask({"n1", "n2", "n3"}, 0.5)


def test_the_same_refusal_is_news_once():
    refusals = Refusals()
    assert refusals.refused(BUSY, {"n1"}, 0.0) and not refusals.refused(BUSY, {"n1"}, 5.0)
    assert refusals.refused(NONE_LEFT, {"n1"}, 15.0)
    refusals.over()
    assert refusals.why == "" and refusals.may_ask({"n1"}, 15.5) and refusals.refused(NONE_LEFT, {"n1"}, 16.0)
