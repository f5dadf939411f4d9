"""What a drill says before it begins of what will not be mended."""

from __future__ import annotations

import pytest

from dalsegno.drill.foresight import left_undone, mends
from dalsegno.drill.lots import Kind, Lot

POWER, KILL = Lot(Kind("power-off"), 5, 0), Lot(Kind("worker-kill", heals=False), 5, 0)
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
