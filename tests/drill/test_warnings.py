"""Tests of the warnings before a drill about nodes that will not be repaired."""

from __future__ import annotations

import pytest

from dalsegno.drill.schedule import (
    FaultKind,
    ScheduledFault,
    find_existing_faults,
    repairs_nodes,
    warn_of_missing_repairs,
)
from dalsegno.inject.faults import InjectedFault

POWER, KILL = (
    ScheduledFault(FaultKind("power-off"), 5, 0),
    ScheduledFault(FaultKind("worker-kill", needs_repair=False), 5, 0),
)
ON = {"automation": "on", "mode": "auto", "per_hour": 4, "taken": {"train": 1}}


def test_faults_within_the_hourly_limit_cause_no_warning():
    assert warn_of_missing_repairs([POWER] * 3 + [KILL] * 9, ON, ["train"]) == ""
    assert warn_of_missing_repairs([POWER] * 4, ON, ["other"]) == "" and repairs_nodes(ON)


def test_faults_beyond_the_hourly_limit_cause_a_warning():
    assert warn_of_missing_repairs([POWER] * 4, ON, ["train"]).startswith(
        "4 faults may take a node out of service, but the controller takes out only 3 more this hour"
    )


@pytest.mark.parametrize(
    ("automation", "why"),
    [(None, "this cluster has no controller"), ({**ON, "automation": "paused"}, "automation is paused"),
     ({**ON, "mode": "observe"}, "the controller only observes"), ({**ON, "mode": "off"}, "does nothing")],
)  # fmt: skip
def test_disabled_recovery_causes_a_warning_and_no_waiting(automation: dict[str, object] | None, why: str):
    assert why in warn_of_missing_repairs([POWER], automation, ["train"]) and not repairs_nodes(automation)
    assert warn_of_missing_repairs([KILL], automation, ["train"]) == "", "nothing needs repair"


def test_faults_before_the_drill_are_reported():
    injected = [InjectedFault("gpu-lost", "n4", 1.0), InjectedFault("bad-replacement", "n4", 2.0)]
    nodes = [
        {"node": "n1", "phase": "in service", "note": ""},
        {"node": "n4", "phase": "suspected", "note": "gpu-count: 7 of 8"},
    ]
    assert find_existing_faults(injected, nodes) == [
        "n4 was injected with gpu-lost and bad-replacement before: the drill does not clear that",
        "n4 is suspected: gpu-count: 7 of 8",
    ]
    assert find_existing_faults([], nodes[:1]) == []
