"""`pip install dalsegno` as documented, from the package index: an ordinary user on a cluster made without Dal Segno.

`test_existing_cluster.py` copies the dependencies instead, so that it needs no network. This test lets pip resolve and
download them, and the build backend too.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.foreign import PYTHON, ROOT, UID, ForeignCluster, foreign_cluster

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to have an ordinary user of its own"),
]
INSTALL_S = 300.0
# Settings of this machine's network, which the user needs, too
SETTINGS = ("PIP_", "SSL_CERT_", "HTTPS_PROXY", "https_proxy", "NO_PROXY", "no_proxy")
SCRIPT = """
import os, sys, click
print("generation", os.environ["DALSEGNO_GENERATION"], "with", click.__file__, flush=True)
"""


def settings() -> list[str]:
    return [f"{name}={value}" for name, value in os.environ.items() if name.startswith(SETTINGS)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[ForeignCluster]:
    """A cluster whose user has installed the wheel of this project in the way that the page tells."""
    with foreign_cluster() as cluster:
        wheel = built_wheel(cluster.root)
        cluster.ok(PYTHON, "-m", "venv", "venv", timeout_s=120)
        pip = ("env", *settings(), "venv/bin/pip", "install", "--quiet", "--no-cache-dir")
        cluster.ok(*pip, str(wheel), timeout_s=INSTALL_S)
        yield cluster


def built_wheel(folder: Path) -> Path:
    """Build the wheel in an environment of its own, with the backend that pyproject.toml names."""
    source, wheels = folder / "source", folder / "wheels"
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    shutil.copytree(ROOT / "examples", source / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    argv = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(wheels), str(source)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = wheels.glob("dalsegno-*.whl")
    return wheel


def test_pip_installs_all_that_the_package_needs(cluster: ForeignCluster):
    assert "No broken requirements" in cluster.ok("venv/bin/pip", "check")
    listed = json.loads(cluster.ok("venv/bin/pip", "list", "--format", "json"))
    assert {"dalsegno", "click", "pydantic", "PyYAML"} <= {each["name"] for each in listed}
    assert cluster.ok("dalsegno", "--version").strip()


def test_run_of_an_ordinary_user_works_from_that_installation(cluster: ForeignCluster):
    (cluster.home / "train.py").write_text(SCRIPT)
    command = "dalsegno run --nodes 2 --framework jax --preload json train.py"
    done = cluster.user("sh", "-c", f". venv/bin/activate && {command}", timeout_s=120)
    assert done.code == 0, f"{done.out}\n{done.err}"
    for rank in (0, 1):
        assert f"[{rank}] generation 1 with {cluster.home}/venv/lib/" in done.out
    (run,) = (cluster.home / ".local/state/dalsegno/runs").iterdir()
    assert run.stat().st_uid == UID
