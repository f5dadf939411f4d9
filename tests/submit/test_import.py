"""Importing parts of `runs.submit` loads only the libraries that they need."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dalsegno.system.processes import LocalRunner

SRC = Path(__file__).parent.parent.parent / "src"


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("import dalsegno.runs.submit", {"pydantic", "dataclasses", "yaml", "argparse"}),
        ("import dalsegno.runs.submit.plan, dalsegno.runs.submit.slurm_args", {"pydantic", "yaml"}),
        ("from dalsegno.runs.torchrun.args import parse_torchrun", {"pydantic", "yaml", "json"}),
    ],
)
def test_each_part_imports_only_what_it_needs(code: str, heavy: set[str]) -> None:
    look = f"import sys\n{code}\nprint(*sorted({heavy} & set(sys.modules)))"
    done = LocalRunner().run([sys.executable, "-S", "-c", look], env={"PYTHONPATH": str(SRC)})
    assert done.checked().stdout.split() == []
