"""A demo goes from nothing to nothing: it touches no cluster that is there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"


def test_a_cluster_of_the_demo_s_name_is_neither_played_on_nor_taken_down(tmp_path: Path):
    state = tmp_path / "clusters" / "dalsegno-demo" / "state.json"
    state.parent.mkdir(parents=True)
    state.write_text("{}")
    done = subprocess.run(
        [sys.executable, "-m", "dalsegno", "demo", "--scene", "researchers"], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(SOURCE), "DALSEGNO_HOME": str(tmp_path)}, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1 and "there is a cluster dalsegno-demo already" in done.stderr
    assert "`dalsegno down dalsegno-demo`" in done.stderr and state.exists()
