"""The names in a checkpoint folder: ours are recognized, others are not."""

import pytest
from hypothesis import given
from hypothesis import strategies as some

from dalsegno.train.disk.format import TemporaryName, is_trash, parse_step, parse_temporary, step_name, trash_name


@given(some.integers(0, 10**15))
def test_step_name_contains_the_step_and_sorts_numerically(step: int) -> None:
    assert parse_step(step_name(step)) == step
    if step < 10**11:
        assert step_name(step) < step_name(step + 1)


@pytest.mark.parametrize(
    "name", ["step-5", "step-000000000005-copy", "xstep-000000000005", "latest", "step-", ".step-"]
)
def test_similar_names_are_not_checkpoints(name: str) -> None:
    assert parse_step(name) is None


@given(some.builds(TemporaryName, some.integers(0, 10**13), some.text(max_size=60), some.integers(0, 10**6)))
def test_temporary_name_contains_step_run_and_generation(temporary: TemporaryName) -> None:
    assert "/" not in temporary.name and "\0" not in temporary.name
    assert parse_temporary(temporary.name) == temporary
    assert parse_step(temporary.name) is None


def test_trash_name_is_recognized() -> None:
    name = trash_name(7, "ab12")
    assert is_trash(name) and parse_step(name) is None and parse_temporary(name) is None
    assert not is_trash(".trash-of-mine") and not is_trash(step_name(7))
