"""The room opens quickly, and everything it promises is in it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import dalsegno.slurm
from dalsegno.system.processes import LocalRunner

SRC = Path(__file__).parent.parent.parent / "src"


@pytest.mark.parametrize("name", dalsegno.slurm.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(dalsegno.slurm, name) is not None


def test_an_unknown_name_is_not() -> None:
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = dalsegno.slurm.no_such_thing


def test_opening_the_room_loads_no_heavy_library() -> None:
    heavy = {"pydantic", "dataclasses", "subprocess", "json"}
    look = f"import sys, dalsegno.slurm; print(*sorted({heavy} & set(sys.modules)))"
    done = LocalRunner().run([sys.executable, "-S", "-c", look], env={"PYTHONPATH": str(SRC)})
    assert done.checked().stdout.split() == []
