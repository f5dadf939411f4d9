"""The rank, run and generation of a process, from its environment."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from dalsegno.train.errors import CheckpointError
from dalsegno.train.ranks import find_where

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}


def test_process_without_a_launcher_is_generation_1_without_a_name() -> None:
    where = find_where({})
    assert (where.run, where.generation, where.rank, where.world, where.fresh) == ("", 1, 0, 1, False)


@pytest.mark.parametrize(("restarts", "generation"), [("0", 1), ("1", 2)])
def test_torchrun_restart_count_gives_the_generation(restarts: str, generation: int) -> None:
    where = find_where({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": restarts})
    assert (where.run, where.generation, where.rank, where.local_world) == ("", generation, 3, 2)


def test_dalsegno_variables_take_precedence() -> None:
    environ = {"DALSEGNO_RUN": "gpt-1", "DALSEGNO_GENERATION": "5", "DALSEGNO_FRESH": "1"}
    where = find_where({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "1", **environ})
    assert (where.run, where.generation, where.fresh) == ("gpt-1", 5, True)


def test_rank_that_is_not_a_number_is_an_error() -> None:
    with pytest.raises(CheckpointError, match="not a number"):
        find_where({"RANK": "first"})
