"""Which Python a run gets where nobody names one."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from dalsegno.jobs import find_python


def python(folder: Path, has: bool) -> str:
    """A `python3` that does, or does not, know the module it is asked for."""
    script = folder / "bin" / "python3"
    script.parent.mkdir(parents=True)
    script.write_text(f"#!/bin/sh\nexit {0 if has else 1}\n")
    script.chmod(0o755)
    return str(script)


def test_that_of_the_active_environment_comes_first(tmp_path: Path) -> None:
    active = python(tmp_path / "venv", has=False)
    env = {"VIRTUAL_ENV": str(tmp_path / "venv"), "PATH": os.environ["PATH"]}
    assert find_python(env, "json") == active


def test_then_that_of_the_shell(tmp_path: Path) -> None:
    shells = python(tmp_path, has=True)
    assert find_python({"PATH": os.path.dirname(shells)}, "json") == shells


def test_one_that_lacks_what_ours_has_gives_way_to_ours(tmp_path: Path) -> None:
    shells = python(tmp_path, has=False)
    assert find_python({"PATH": os.path.dirname(shells)}, "json") == sys.executable
    assert find_python({"PATH": os.path.dirname(shells)}, "a_module_that_is_nowhere") == shells
    assert find_python({"PATH": os.path.dirname(shells)}) == shells
