"""Test that importing `dalsegno.slurm` loads no heavy library."""

from __future__ import annotations

import sys
from pathlib import Path

from dalsegno.system.processes import LocalRunner

SRC = Path(__file__).parent.parent.parent / "src"


def test_importing_slurm_loads_no_heavy_library() -> None:
    heavy = {"pydantic", "dataclasses", "subprocess", "json"}
    look = f"import sys, dalsegno.slurm; print(*sorted({heavy} & set(sys.modules)))"
    done = LocalRunner().run([sys.executable, "-S", "-c", look], env={"PYTHONPATH": str(SRC)})
    assert done.checked().stdout.split() == []
