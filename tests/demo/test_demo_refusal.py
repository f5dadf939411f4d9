"""Tests that the demo refuses to touch an existing cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"


def test_an_existing_cluster_with_the_demo_name_is_not_touched(tmp_path: Path):
    state = tmp_path / "clusters" / "dalsegno-demo" / "state.json"
    state.parent.mkdir(parents=True)
    state.write_text("{}")
    done = subprocess.run(
        [sys.executable, "-m", "dalsegno", "demo", "--scene", "researchers"], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(SOURCE), "DALSEGNO_HOME": str(tmp_path)}, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1 and "cluster dalsegno-demo already exists" in done.stderr
    assert "`dalsegno down dalsegno-demo`" in done.stderr and state.exists()
