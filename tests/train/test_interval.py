"""Intervals: parsing, and the best one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dalsegno.train.options import (
    Auto,
    Interval,
    Measured,
    Never,
    Seconds,
    Steps,
    auto_steps,
    parse_interval,
    suggest_interval_s,
)

DAY_S = 86400.0


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        (10, Steps(10)), ("30s", Seconds(30)), ("10m", Seconds(600)), ("1h", Seconds(3600)), ("1.5h", Seconds(5400)),
        ("auto", Auto()), (None, Never()), (0, Never()), (False, Never()),
    ],
)  # fmt: skip
def test_interval_is_parsed(text: object, meant: Interval) -> None:
    assert parse_interval(text) == meant


@pytest.mark.parametrize("text", [-1, True, "10", "10 minutes", "m", "0m", "", "never", 1.5, [3], "-5m"])
def test_invalid_interval_is_refused_with_the_valid_forms(text: object) -> None:
    with pytest.raises(ValueError, match=r"invalid interval disk_every=.*: use a number of steps"):
        parse_interval(text, "disk_every")


def test_auto_can_be_disallowed() -> None:
    with pytest.raises(ValueError, match="or None for never"):
        parse_interval("auto", "disk_every", auto=False)


def test_auto_uses_every_step_until_the_cost_is_known() -> None:
    assert auto_steps(Measured()) == auto_steps(Measured(step_s=0.5)) == 1


def test_auto_uses_every_step_if_the_cost_is_negligible() -> None:
    assert auto_steps(Measured(step_s=1.0, stall_s=0.009)) == 1
    assert auto_steps(Measured(step_s=1.0, stall_s=0.0)) == 1


def test_auto_uses_every_tenth_step_if_a_snapshot_costs_a_tenth_of_a_step() -> None:
    assert auto_steps(Measured(step_s=1.0, stall_s=0.1)) == 10


@given(st.floats(1e-4, 1e3), st.floats(0, 1e3))
def test_auto_never_costs_more_than_one_percent(step_s: float, stall_s: float) -> None:
    steps = auto_steps(Measured(step_s, stall_s))
    assert steps >= 1 and stall_s <= 0.01 * steps * step_s * (1 + 1e-9)


def test_four_failures_a_day_and_ten_second_saves_suggest_ten_minutes() -> None:
    wanted = suggest_interval_s(10, failures=4, over_s=DAY_S)
    assert wanted and 600 < wanted < 660


def test_no_suggestion_without_failures_or_cost() -> None:
    assert suggest_interval_s(10, 0, DAY_S) is None
    assert suggest_interval_s(0, 3, DAY_S) is None
    assert suggest_interval_s(10, 3, 0) is None


@given(st.floats(1e-3, 1e4), st.integers(1, 1000), st.floats(1, 1e7))
def test_suggestion_is_positive_and_grows_with_the_time_between_failures(
    save_s: float, failures: int, over_s: float
) -> None:
    often, seldom = suggest_interval_s(save_s, failures + 1, over_s), suggest_interval_s(save_s, failures, over_s)
    assert often and seldom and 0 < often <= seldom * (1 + 1e-9)


def test_suggested_interval_is_not_shorter_than_a_save() -> None:
    assert suggest_interval_s(1.0, failures=1, over_s=3600.0) == pytest.approx(84.2, abs=0.5)
    assert suggest_interval_s(1.0, failures=1, over_s=3600.0, save_s=600.0) == 600.0
