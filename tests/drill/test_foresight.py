"""What a drill says before it begins of what will not be mended."""

from __future__ import annotations

import pytest

from dalsegno.drill.schedule import FaultKind, Lot, already_hurt, left_undone, mends
from dalsegno.inject.faults import InjectedFault

POWER, KILL = Lot(FaultKind("power-off"), 5, 0), Lot(FaultKind("worker-kill", heals=False), 5, 0)
ON = {"automation": "on", "mode": "auto", "per_hour": 4, "taken": {"train": 1}}


def test_what_the_hour_allows_is_nothing_to_speak_of():
    assert left_undone([POWER] * 3 + [KILL] * 9, ON, ["train"]) == ""
    assert left_undone([POWER] * 4, ON, ["other"]) == "" and mends(ON)


def test_faults_beyond_the_budget_are_foreseen():
    assert left_undone([POWER] * 4, ON, ["train"]).startswith(
        "4 of the faults may cost a node, and the controller takes 3 more out of service within this hour"
    )


@pytest.mark.parametrize(
    ("told", "why"),
    [(None, "no controller looks after"), ({**ON, "automation": "paused"}, "automation is paused"),
     ({**ON, "mode": "observe"}, "the controller only observes"), ({**ON, "mode": "off"}, "does nothing")],
)  # fmt: skip
def test_where_nothing_is_mended_it_is_said_and_not_waited_for(told: dict[str, object] | None, why: str):
    assert why in left_undone([POWER], told, ["train"]) and not mends(told)
    assert left_undone([KILL], told, ["train"]) == "", "nothing is to be mended"


def test_what_is_wrong_before_it_begins_is_said():
    injected = [InjectedFault("gpu-lost", "n4", 1.0), InjectedFault("bad-replacement", "n4", 2.0)]
    nodes = [
        {"node": "n1", "phase": "in service", "note": ""},
        {"node": "n4", "phase": "suspected", "note": "gpu-count: 7 of 8"},
    ]
    assert already_hurt(injected, nodes) == [
        "n4 has been injected with gpu-lost and bad-replacement before: the drill leaves that as it is",
        "n4 is suspected: gpu-count: 7 of 8",
    ]
    assert already_hurt([], nodes[:1]) == []
