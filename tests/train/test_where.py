"""Where a process stands, from what its launcher has told it."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from dalsegno.train.errors import CheckpointError
from dalsegno.train.ranks import find_where

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}


def test_alone_it_is_the_first_life_of_a_run_without_a_name() -> None:
    where = find_where({})
    assert (where.run, where.generation, where.rank, where.world, where.fresh) == ("", 1, 0, 1, False)


@pytest.mark.parametrize(("restarts", "generation"), [("0", 1), ("1", 2)])
def test_under_torchrun_every_restart_is_a_generation_so_only_the_first_starts_fresh(
    restarts: str, generation: int
) -> None:
    where = find_where({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": restarts})
    assert (where.run, where.generation, where.rank, where.local_world) == ("", generation, 3, 2)


def test_what_dalsegno_says_goes_first() -> None:
    told = {"DALSEGNO_RUN": "gpt-1", "DALSEGNO_GENERATION": "5", "DALSEGNO_FRESH": "1"}
    where = find_where({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "1", **told})
    assert (where.run, where.generation, where.fresh) == ("gpt-1", 5, True)


def test_a_rank_that_is_no_number_is_told() -> None:
    with pytest.raises(CheckpointError, match="not a number"):
        find_where({"RANK": "first"})
