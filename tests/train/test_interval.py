"""How often: what users write, and what would be best."""

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
def test_what_users_write(text: object, meant: Interval) -> None:
    assert parse_interval(text) == meant


@pytest.mark.parametrize("text", [-1, True, "10", "10 minutes", "m", "0m", "", "never", 1.5, [3], "-5m"])
def test_what_means_nothing_is_refused_with_what_would(text: object) -> None:
    with pytest.raises(ValueError, match=r"disk_every=.* is no interval: write a number of steps"):
        parse_interval(text, "disk_every")


def test_auto_may_be_no_choice() -> None:
    with pytest.raises(ValueError, match="or None for never"):
        parse_interval("auto", "disk_every", auto=False)


def test_auto_takes_every_step_until_it_has_learned() -> None:
    assert auto_steps(Measured()) == auto_steps(Measured(step_s=0.5)) == 1


def test_auto_takes_every_step_where_that_costs_next_to_nothing() -> None:
    assert auto_steps(Measured(step_s=1.0, stall_s=0.009)) == 1
    assert auto_steps(Measured(step_s=1.0, stall_s=0.0)) == 1


def test_auto_takes_every_tenth_where_a_snapshot_costs_a_tenth_of_a_step() -> None:
    assert auto_steps(Measured(step_s=1.0, stall_s=0.1)) == 10


@given(st.floats(1e-4, 1e3), st.floats(0, 1e3))
def test_auto_never_costs_more_than_a_hundredth(step_s: float, stall_s: float) -> None:
    steps = auto_steps(Measured(step_s, stall_s))
    assert steps >= 1 and stall_s <= 0.01 * steps * step_s * (1 + 1e-9)


def test_four_failures_a_day_and_saves_of_ten_seconds_ask_for_ten_minutes() -> None:
    wanted = suggest_interval_s(10, failures=4, over_s=DAY_S)
    assert wanted and 600 < wanted < 660


def test_without_failures_or_cost_there_is_nothing_to_suggest() -> None:
    assert suggest_interval_s(10, 0, DAY_S) is None
    assert suggest_interval_s(0, 3, DAY_S) is None
    assert suggest_interval_s(10, 3, 0) is None


@given(st.floats(1e-3, 1e4), st.integers(1, 1000), st.floats(1, 1e7))
def test_a_suggestion_is_positive_and_grows_with_the_time_between_failures(
    save_s: float, failures: int, over_s: float
) -> None:
    often, seldom = suggest_interval_s(save_s, failures + 1, over_s), suggest_interval_s(save_s, failures, over_s)
    assert often and seldom and 0 < often <= seldom * (1 + 1e-9)


def test_no_interval_is_shorter_than_a_save_takes() -> None:
    assert suggest_interval_s(1.0, failures=1, over_s=3600.0) == pytest.approx(84.2, abs=0.5)
    assert suggest_interval_s(1.0, failures=1, over_s=3600.0, save_s=600.0) == 600.0
