"""The same seed draws the same drill, every kind of fault comes where there is room."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dalsegno.drill.lots import KINDS, draw


def test_the_same_seed_draws_the_same_faults():
    assert draw(30, 7) == draw(30, 7) != draw(30, 8)


@given(st.integers(0, 60), st.integers())
def test_there_are_as_many_as_asked_for_and_no_kind_is_left_out(count: int, seed: int):
    lots = draw(count, seed)
    assert len(lots) == count
    assert len({lot.kind for lot in lots}) >= min(count, len(KINDS))
