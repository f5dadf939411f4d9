"""The number of workers of a node, and their arguments."""

from __future__ import annotations

import pytest

from dalsegno.runs.torchrun.coordinator import fill_macros
from dalsegno.runs.torchrun.launch import count_gpus


def test_macros_in_arguments_are_filled() -> None:
    assert fill_macros(["--r=${local_rank}", "$$", "$x", "${rank}"], 1) == ["--r=1", "$", "$x", "${rank}"]


@pytest.mark.parametrize(
    ("value", "count"), [("0,1,2", 3), ("", 0), ("-1", 0), ("0,-1,2", 1), ("GPU-a,GPU-b", 2), ("MIG-1", 1)]
)
def test_visible_gpus_are_counted(value: str, count: int) -> None:
    assert count_gpus({"CUDA_VISIBLE_DEVICES": value}) == count
