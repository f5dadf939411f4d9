"""Environments with the clouds' own tools: ParallelCluster, moto and cfn-lint, and the SDK of OCI.

The tools are large and need conflicting versions of packages, so each has an environment of its own in a cache folder
($DALSEGNO_CLOUD_TOOLS). Where one exists, tests use it. `./test --long` creates those that are missing, with pip.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

LONG = bool(os.environ.get("DALSEGNO_LONG"))
PACKAGES = {
    "pcluster-3.16.1": ["aws-parallelcluster==3.16.1"],
    "pcluster-3.13.1": ["aws-parallelcluster==3.13.1"],
    "tools": ["moto[server]==5.2.5", "boto3", "cfn-lint", "pydantic>=2.10", "click>=8.1"],
    "oci-sdk": ["oci>=2.120"],
}


def python_of(name: str) -> Path:
    """Return the Python of an environment. Create it in a long run; skip the test if it is missing in another run."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(os.environ.get("DALSEGNO_CLOUD_TOOLS") or f"{home}/dalsegno-cloud") / name
    if not LONG and not (folder / "complete").exists():
        pytest.skip(f"{folder} is missing: `./test --long` creates it with pip")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # lanes of tests run side by side
        if not (folder / "complete").exists():
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
            subprocess.run([folder / "bin" / "pip", "install", "--quiet", *PACKAGES[name]], check=True)
            (folder / "complete").touch()
    return folder / "bin" / "python"


def need_oci_sdk() -> None:
    """Make the SDK of OCI importable: the installed one, or the one of its environment, after our own packages."""
    if importlib.util.find_spec("oci") is None:
        sys.path += map(str, python_of("oci-sdk").parents[1].glob("lib/python3*/site-packages"))
        importlib.invalidate_caches()
