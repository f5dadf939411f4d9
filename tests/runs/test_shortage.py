"""What a run that is not complete says it waits for."""

from dalsegno.runs.coordinator.report import shortage


def test_nodes_that_slurm_has_still_to_give_are_counted():
    assert shortage(1, (), waits=True, refused="") == "waiting for 1 more node from Slurm"
    assert shortage(3, ["n1"], waits=True, refused="") == "waiting for 2 more nodes from Slurm"


def test_a_node_that_comes_is_waited_for_by_its_name_though_slurm_is_asked_for_a_spare_too():
    assert shortage(1, ["n3"], waits=True, refused="") == "waiting for n3 to be ready"
    assert shortage(3, ["n10", "n9", "n1"], waits=False, refused="") == "waiting for n1, n9, n10 to be ready"
    assert shortage(4, [f"n{n}" for n in range(4)], waits=False, refused="") == "waiting for 4 nodes to be ready"


def test_a_refusal_is_told():
    assert shortage(1, (), waits=False, refused="no such node") == (
        "needs 1 more node, but Slurm has none available: no such node"
    )
    assert shortage(1, ["n3"], waits=False, refused="no such node") == "waiting for n3 to be ready"


def test_where_nothing_is_missing_nothing_is_said():
    assert shortage(0, ["n4"], waits=True, refused="no such node") == ""
    assert shortage(1, (), waits=False, refused="") == ""
