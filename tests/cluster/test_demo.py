"""Test of `dalsegno demo` in a pipe: a host loses power, a GPU falls off the bus, and all is repaired."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.cluster.conftest import at_home, taken_down

pytest.importorskip("torch")
# The ordinary suite tests the parts of the demo in test_train.py, test_recovery.py and test_researchers.py.
pytestmark = [pytest.mark.waits, pytest.mark.long, pytest.mark.timeout(600)]


def test_training_survives_and_the_cluster_is_repaired(cache: Path):
    with taken_down(at_home(cache)) as cli:
        page = cli.home / "a page.html"
        done = subprocess.run(
            cli.argv("demo", "--report", str(page)), env={**cli.env, "PYTHONIOENCODING": "ascii"}, cwd=cli.home,
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=560, check=False,
        )  # fmt: skip
        said = done.stdout + done.stderr
        assert done.returncode == 0, said
        assert "the run survived 2 faults" in done.stdout
        assert "the weights are identical to those of an undisturbed run, bit for bit" in done.stdout
        rows = {line.split()[1]: line for line in done.stdout.splitlines() if re.match(r"\d+  ", line)}
        assert set(rows) == {"power-off", "xid"} and "not seen" not in "".join(rows.values()), said
        assert done.stderr.count("validated, and back in service") == 2
        assert "nothing of it is left" in done.stderr and "\x1b" not in said
        assert list((cli.home / "runs").iterdir()) == [], "runs are removed with their cluster"
        assert page.read_text().count('class="repairing"') == 2
