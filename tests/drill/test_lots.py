"""The same seed draws the same drill, every kind of fault comes where there is room."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dalsegno.drill.schedule import KINDS, chosen, draw
from dalsegno.errors import UsageError


def test_the_same_seed_draws_the_same_faults():
    assert draw(30, 7) == draw(30, 7) != draw(30, 8)


@given(st.integers(0, 60), st.integers())
def test_there_are_as_many_as_asked_for_and_no_kind_is_left_out(count: int, seed: int):
    lots = draw(count, seed)
    assert len(lots) == count
    assert len({lot.kind for lot in lots}) >= min(count, len(KINDS))


def test_only_some_kinds_may_be_asked_for():
    assert {lot.kind.fault for lot in draw(9, 7, chosen(["xid", "power-off"]))} == {"xid", "power-off"}
    assert list(chosen([])) == list(KINDS)
    with pytest.raises(UsageError, match="no fault `power-of`") as refused:
        chosen(["power-of"])
    assert refused.value.hint == "did you mean `power-off`?"
