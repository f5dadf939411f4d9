"""Tests of drawing faults: the same seed gives the same drill, and every kind occurs if there are enough faults."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dalsegno.drill.schedule import KINDS, draw, select_kinds
from dalsegno.errors import UsageError


def test_the_same_seed_draws_the_same_faults():
    assert draw(30, 7) == draw(30, 7) != draw(30, 8)


@given(st.integers(0, 60), st.integers())
def test_the_requested_number_is_drawn_and_every_kind_occurs(count: int, seed: int):
    faults = draw(count, seed)
    assert len(faults) == count
    assert len({fault.kind for fault in faults}) >= min(count, len(KINDS))


def test_the_kinds_of_faults_can_be_restricted():
    assert {fault.kind.fault for fault in draw(9, 7, select_kinds(["xid", "power-off"]))} == {"xid", "power-off"}
    assert list(select_kinds([])) == list(KINDS)
    with pytest.raises(UsageError, match="unknown fault `power-of`") as refused:
        select_kinds(["power-of"])
    assert refused.value.hint == "did you mean `power-off`?"
