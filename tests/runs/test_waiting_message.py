"""The message about what an incomplete run waits for."""

from dalsegno.runs.coordinator.reports.report import shortage


def test_missing_nodes_are_counted():
    assert shortage(1, (), waits=True, refused="") == "waiting for 1 more node from Slurm"
    assert shortage(3, ["n1"], waits=True, refused="") == "waiting for 2 more nodes from Slurm"


def test_starting_nodes_are_named_even_while_a_spare_is_requested():
    assert shortage(1, ["n3"], waits=True, refused="") == "waiting for n3 to be ready"
    assert shortage(3, ["n10", "n9", "n1"], waits=False, refused="") == "waiting for n1, n9, n10 to be ready"
    assert shortage(4, [f"n{n}" for n in range(4)], waits=False, refused="") == "waiting for 4 nodes to be ready"


def test_refusal_is_shown():
    assert shortage(1, (), waits=False, refused="no such node") == (
        "needs 1 more node, but Slurm has none available: no such node"
    )
    assert shortage(1, ["n3"], waits=False, refused="no such node") == "waiting for n3 to be ready"


def test_complete_run_has_no_message():
    assert shortage(0, ["n4"], waits=True, refused="no such node") == ""
    assert shortage(1, (), waits=False, refused="") == ""
