"""The default Python of a run."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from dalsegno.errors import UsageError
from dalsegno.runs.submit.program import check_program, check_torch, find_python
from tests.submit.runs import asked


def python(folder: Path, has: bool) -> str:
    """Create a `python3` that has, or lacks, the requested module."""
    script = folder / "bin" / "python3"
    script.parent.mkdir(parents=True)
    script.write_text(f"#!/bin/sh\nexit {0 if has else 1}\n")
    script.chmod(0o755)
    return str(script)


def test_python_of_the_active_environment_comes_first(tmp_path: Path) -> None:
    active = python(tmp_path / "venv", has=False)
    env = {"VIRTUAL_ENV": str(tmp_path / "venv"), "PATH": os.environ["PATH"]}
    assert find_python(env, "json") == active


def test_python_of_the_shell_comes_second(tmp_path: Path) -> None:
    shells = python(tmp_path, has=True)
    assert find_python({"PATH": os.path.dirname(shells)}, "json") == shells


def test_own_python_is_used_if_only_it_has_the_module(tmp_path: Path) -> None:
    shells = python(tmp_path, has=False)
    assert find_python({"PATH": os.path.dirname(shells)}, "json") == sys.executable
    assert find_python({"PATH": os.path.dirname(shells)}, "a_module_that_is_nowhere") == shells
    assert find_python({"PATH": os.path.dirname(shells)}) == shells


def test_missing_pytorch_is_reported_before_submission(tmp_path: Path) -> None:
    lacks, has = python(tmp_path / "a", has=False), python(tmp_path / "b", has=True)
    with pytest.raises(UsageError, match="PyTorch is not installed in") as caught:
        check_torch(asked(), lacks, certain=True)
    assert "dalsegno setup --torch" in caught.value.hint and "--venv PATH" in caught.value.hint
    (note,) = check_torch(asked(), lacks, certain=False)
    assert "setup --torch" in note, "nodes of a foreign cluster may have what this host lacks"
    assert check_torch(asked(), has, certain=True) == ()
    for other in (asked(framework="jax"), asked(no_preload=True), asked("./solver", framework="mpi")):
        assert check_torch(other, lacks, certain=True) == ()


def test_environment_without_pytorch_is_named_in_the_hint(tmp_path: Path) -> None:
    lacks = python(tmp_path / "mine", has=False)
    with pytest.raises(UsageError) as caught:
        check_torch(asked(venv="mine", chdir=str(tmp_path)), lacks, certain=True)
    assert f"`{tmp_path}/mine/bin/python3 -m pip install torch`" in caught.value.hint
    assert "setup --torch" not in caught.value.hint, "that is for another environment"


@pytest.mark.parametrize("launcher", ["torchrun", "/usr/bin/torchrun", "python3"])
def test_launcher_in_place_of_a_script_is_refused(tmp_path: Path, launcher: str) -> None:
    with pytest.raises(UsageError) as caught:
        args = ("--nproc-per-node", "2", "train.py")
        check_program(asked(script=launcher, args=args, chdir=str(tmp_path)), os.environ)
    name = launcher.rpartition("/")[2]
    assert f"remove {name} and" in caught.value.hint and "`dalsegno run train.py`" in caught.value.hint
