"""Download compiled packages for machines whose Python version or processor differs from that of this machine.

Only `pydantic_core` is compiled. pip downloads its wheel from the package index of this machine, in the version that is
installed here. The hosts need no access to an index.
"""

from __future__ import annotations

import os
import sys
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from dalsegno.errors import DalsegnoError
from dalsegno.setup.delivery import CodeFit
from dalsegno.system.files import make_folder, remove_tree
from dalsegno.system.processes import Runner

COMPILED = "pydantic_core"
DOWNLOAD_S = 300.0


def fetch_wheels(runner: Runner, cache: Path, fit: CodeFit) -> Path:
    """Return a folder with the compiled packages for a Python version and processor; download them if needed."""
    wanted = _installed_version()
    python = ".".join(map(str, fit.python))
    folder = cache / f"{COMPILED}-{wanted}-{python}-{fit.machine}"
    if folder.is_dir():
        return folder
    partial = folder.with_name(f"{folder.name}.{os.getpid()}")
    make_folder(partial)
    try:
        platforms = [f"--platform=manylinux2014_{fit.machine}", f"--platform=manylinux_2_17_{fit.machine}"]
        argv = [
            sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
            "--only-binary=:all:", "--implementation=cp", f"--python-version={python}", *platforms,
            f"--dest={partial}", f"{COMPILED}=={wanted}",
        ]  # fmt: skip
        done = runner.run(argv, timeout_s=DOWNLOAD_S)
        found = list(partial.glob("*.whl"))
        if done.exit_code != 0 or not found:
            why = (done.stderr.strip().splitlines() or ["no wheel was found"])[-1]
            raise DalsegnoError(
                f"{COMPILED} {wanted} for Python {python} on {fit.machine} cannot be downloaded: {why}",
                hint=f"let pip reach a package index, or run `dalsegno` with Python {python} on {fit.machine}",
            )
        with zipfile.ZipFile(found[0]) as wheel:
            wheel.extractall(partial)
        found[0].unlink()
        partial.rename(folder)
    finally:
        remove_tree(partial)
    return folder


def _installed_version() -> str:
    try:
        return version(COMPILED)
    except PackageNotFoundError:
        raise DalsegnoError(f"Python's package `{COMPILED}` is missing", hint="install Dal Segno again") from None
