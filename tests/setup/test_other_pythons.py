"""Our code on machines with another Python: what they get, and that it runs there."""

from __future__ import annotations

import io
import os
import platform
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from dalsegno.errors import DalsegnoError
from dalsegno.setup.delivery import CodeFit, find_bundle
from dalsegno.setup.wheels import COMPILED, fetch_wheels
from dalsegno.system.processes import Completed, FakeRunner, LocalRunner
from dalsegno.targets.ssh.desired import own_command

VERSIONS = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
OTHERS = [each for each in ("3.10", "3.12", "3.13") if list(VERSIONS.glob(f"{each}.*/bin/python{each}"))]


def test_bundle_for_another_python_has_its_compiled_packages_and_no_others(tmp_path):
    (tmp_path / COMPILED).mkdir()
    (tmp_path / COMPILED / "_core.cpython-313.so").touch()
    inside = [name for _, name in find_bundle(wheels=tmp_path).files]
    assert [name for name in inside if name.endswith(".so")] == [f"{COMPILED}/_core.cpython-313.so"]
    assert "dalsegno/programs.py" in inside and "yaml/__init__.py" in inside
    assert find_bundle(wheels=tmp_path).key != find_bundle().key


def test_missing_wheel_is_reported_with_what_to_do(tmp_path):
    runner = FakeRunner(lambda argv, stdin: Completed(argv, 1, stderr="ERROR: No matching distribution found"))
    with pytest.raises(
        DalsegnoError, match=r"for Python 3\.13 on riscv64 cannot be downloaded: ERROR: No mat"
    ) as raised:
        fetch_wheels(runner, tmp_path, CodeFit((3, 13), "riscv64"))
    assert "run `dalsegno` with Python 3.13" in raised.value.hint
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
@pytest.mark.skipif(not OTHERS, reason="no other Python is installed with pyenv")
@pytest.mark.parametrize("version", OTHERS)
def test_code_that_a_host_gets_runs_with_its_python(version, tmp_path):
    """pip downloads one wheel for each Python."""
    fit = CodeFit(tuple(map(int, version.split("."))), platform.machine())
    bundle = find_bundle(wheels=fetch_wheels(LocalRunner(), tmp_path / "wheels", fit))
    with tarfile.open(fileobj=io.BytesIO(bundle.archive())) as archive:
        archive.extractall(tmp_path / "code", filter="data") if sys.version_info >= (3, 12) else archive.extractall(
            tmp_path / "code"
        )
    python = str(next(VERSIONS.glob(f"{version}.*/bin/python{version}")))
    command = tmp_path / "dalsegno"
    command.write_text(own_command(python).replace("/opt/dalsegno/current", str(tmp_path / "code")))
    (tmp_path / "cluster.yaml").write_text("name: a\ntarget: local\npartitions: [{name: train, nodes: 2}]\n")
    argv = [python, "-I", str(command), "validate", str(tmp_path / "cluster.yaml")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    programs = "controller observer node-agent run-agent run-coordinator job-scratch storage-probe container-plugin"
    check = (
        f"import sys; sys.path[:0] = [{str(tmp_path / 'code')!r}]; from importlib import import_module\n"
        f"from dalsegno.programs import PROGRAMS\n"
        f"for name in {programs.split()!r}: import_module(PROGRAMS[name])\n"
    )
    done = subprocess.run([python, "-I", "-c", check], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
