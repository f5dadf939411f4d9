"""Tests of the text and JSON report of a drill."""

from __future__ import annotations

import json
from dataclasses import replace

from dalsegno.drill.impacts import Drill, DrillMark, DrillMarkKind, FaultImpact, TrainedStep
from dalsegno.drill.report import as_json, rows, sentences

IMPACTS = (
    FaultImpact(1, "power-off", "n1", 10.0),
    FaultImpact(2, "worker-kill", "n2", 40.0, needs_repair=False),
    FaultImpact(3, "xid 79", "n1", 60.0, stops=False),
)
MARKS = (
    DrillMark(11.2, DrillMarkKind.KNOWN, "n1"),
    DrillMark(11.5, DrillMarkKind.DRAINED, "n1"),
    DrillMark(24.0, DrillMarkKind.RETURNED, "n1"),
    DrillMark(40.1, DrillMarkKind.KNOWN, "n2"),
)
STEPS = (
    TrainedStep(9.0, 0, 2.5, 1),
    TrainedStep(12.0, 0, 2.5, 2),
    TrainedStep(39.0, 1, 2.4, 2),
    TrainedStep(40.5, 2, 2.3, 3),
)
DRILL = Drill(7, ("n1", "n2"), 0.0, 100.0, IMPACTS, MARKS, STEPS, {"productive": 90.0, "lost": 10.0}, exact=True)


def test_every_fault_has_a_row_with_missing_times_marked():
    assert rows(DRILL) == [
        ["1", "power-off", "n1", "1.2 s", "1.5 s", "2.0 s", "14.0 s", "1"],
        ["2", "worker-kill", "n2", "0.1 s", "", "0.5 s", "", "0"],
        ["3", "xid 79", "n1", "not seen", "not seen", "no stop", "not seen", "0"],
    ]


def test_the_summary_has_the_main_figures():
    assert sentences(DRILL) == [
        "the run survived 3 faults; 1 of 4 steps were repeated",
        "goodput 90% of the run's 100 s (productive 90.0 s, lost 10.0 s)",
        "training resumed after 1.2 s (median), 2.0 s at most",
        "the weights are identical to those of an undisturbed run, bit for bit",
    ]


def test_missing_spares_and_held_back_repairs_are_reported():
    bare = (replace(IMPACTS[0], without_spare=True), *IMPACTS[1:])
    drill = replace(DRILL, impacts=bare, marks=(), held_back={"n1": "4 nodes were taken out within the hour"})
    assert rows(drill)[0][3:7] == ["not seen", "held back", "2.0 s, no spare ready", "held back"]
    assert sentences(drill)[3:] == [
        "1 of these hit while no spare was ready and had to wait for a node; after the others it took 0.5 s at most",
        "the weights are identical to those of an undisturbed run, bit for bit",
        "n1 is not repaired: 4 nodes were taken out within the hour",
    ]


def test_a_further_stop_is_reported_and_counts_for_the_maximum():
    again = (TrainedStep(41.0, 3, 2.2, 3), TrainedStep(50.5, 4, 2.2, 4))
    drill = replace(
        DRILL, steps=(*STEPS, *again), marks=(*MARKS, DrillMark(42.0, DrillMarkKind.KNOWN, "n2", "lost by the run"))
    )
    assert "training resumed after 2.0 s (median), 9.5 s at most" in sentences(drill)
    assert "training also stopped 1.0 s after worker-kill on n2, for 9.5 s (n2: lost by the run)" in sentences(drill)
    assert as_json(drill)["more_stops"] == [
        {"after_fault": 2, "after_s": 1.0, "for_s": 9.5, "why": "n2: lost by the run"}
    ]


def test_failures_are_reported_first():
    bad = Drill(7, (), 0.0, 10.0, IMPACTS[:1], (), (), exit_code=1, orphans=2, exact=False)
    assert sentences(bad)[0] == "the run ended with exit code 1 after 1 fault"
    assert "the weights DIFFER from those of an undisturbed run" in sentences(bad)
    assert "2 processes were left behind" in sentences(bad)


def test_a_restart_of_the_undisturbed_run_is_reported():
    drill = replace(DRILL, troubles="it restarted 1 time")
    assert sentences(drill)[-1] == "the undisturbed run had a fault of its own: it restarted 1 time"
    assert as_json(drill)["troubles"] == "it restarted 1 time"


def test_the_json_report_is_complete():
    report = json.loads(json.dumps(as_json(DRILL)))
    assert report["events"][0] == {"at": 11.2, "what": "known", "node": "n1", "text": ""}
    assert report["survived"] is True and report["share"] == 0.9
    assert report["faults"][0]["resumed_s"] == 2.0 and report["faults"][2]["known_s"] is None
