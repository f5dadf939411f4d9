"""Tests of what a drill waits for after its run has ended."""

from __future__ import annotations

from dalsegno.drill.impacts import DrillMark, DrillMarkKind, FaultImpact
from dalsegno.drill.schedule import NOTICED_S, describe_waiting, find_repairable, find_unreturned

XID, CUT = FaultImpact(1, "xid 79", "n1", 10.0), FaultImpact(2, "net-cut", "n2", 20.0)
KILL = FaultImpact(3, "worker-kill", "n3", 30.0, needs_repair=False)


def test_a_node_is_out_until_it_returns_after_its_last_fault():
    again = FaultImpact(4, "net-cut", "n1", 40.0)
    assert find_unreturned([XID, CUT, KILL], [DrillMark(15.0, DrillMarkKind.RETURNED, "n1")]) == [CUT]
    assert find_unreturned([XID, again], [DrillMark(15.0, DrillMarkKind.RETURNED, "n1")]) == [again]
    assert find_unreturned([XID, again], [DrillMark(55.0, DrillMarkKind.RETURNED, "n1")]) == []


def test_unnoticed_faults_and_nodes_that_need_an_administrator_are_not_waited_for():
    nodes = {"n1": {"phase": "in service"}, "n2": {"phase": "repairing"}}
    assert find_repairable([XID, CUT], nodes, 12.0) == [XID, CUT], "it may still be noticed"
    assert find_repairable([XID, CUT], nodes, 10.0 + NOTICED_S) == [CUT]
    assert find_repairable([CUT], {"n2": {"phase": "needs admin"}}, 21.0) == []
    assert find_repairable([CUT], {}, 90.0) == [CUT], "the controller does not answer at present"


def test_the_status_line_names_nodes_and_faults():
    nodes = {"n1": {"phase": "validating"}}
    assert describe_waiting([XID, FaultImpact(4, "net-cut", "n1", 40.0), CUT], nodes) == (
        "the run is over; waiting for n1 (xid 79 and net-cut), which is validating; "
        "n2 (net-cut), which is out of service"
    )
