"""The room opens quickly, and everything it promises is in it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import dalsegno.jobs
from dalsegno.system.processes import LocalRunner

SRC = Path(__file__).parent.parent.parent / "src"


@pytest.mark.parametrize("name", dalsegno.jobs.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(dalsegno.jobs, name) is not None


def test_an_unknown_name_is_not() -> None:
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = dalsegno.jobs.no_such_thing


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("import dalsegno.jobs", {"pydantic", "dataclasses", "yaml", "argparse"}),
        ("from dalsegno.jobs import plan_run, options_from_env, load_job, render_sbatch", {"pydantic", "yaml"}),
        ("from dalsegno.jobs import parse_torchrun", {"pydantic", "yaml", "json"}),
    ],
)
def test_nobody_pays_for_what_he_does_not_use(code: str, heavy: set[str]) -> None:
    look = f"import sys\n{code}\nprint(*sorted({heavy} & set(sys.modules)))"
    done = LocalRunner().run([sys.executable, "-S", "-c", look], env={"PYTHONPATH": str(SRC)})
    assert done.checked().stdout.split() == []
