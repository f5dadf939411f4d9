"""Tests of getting root's rights through sudo."""

import os
from pathlib import Path

import pytest

from dalsegno.errors import DalsegnoError
from dalsegno.system.execute import as_caller, refusal, sudo_command
from dalsegno.system.ownership import caller
from dalsegno.system.processes import Completed, FakeRunner

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def test_sudo_passes_only_named_variables():
    env = {"PYTHONPATH": "/tmp/evil", "LD_PRELOAD": "x.so", "TERM": "xterm", "DALSEGNO_HOME": "/tmp", "PATH": "/tmp"}
    argv = sudo_command(["/usr/bin/python3", "-I", "up"], env, 1000, 1001)
    assert argv[1:5] == ["-n", "--", "/usr/bin/env", "-i"]
    assert argv[-3:] == ["/usr/bin/python3", "-I", "up"]
    assert set(argv[5:-3]) == {
        "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME=/root",
        "TERM=xterm",
        "SUDO_UID=1000",
        "SUDO_GID=1001",
    }


@pytest.mark.parametrize(
    ("unshare", "plain", "expected"),
    [
        (0, 0, ""),
        (1, 0, "this kernel or container does not permit namespaces"),
        (1, 1, "sudo requires a password"),
    ],
)
def test_sudo_refusal_gives_the_reason(unshare: int, plain: int, expected: str):
    def answer(argv: tuple[str, ...], stdin: str | None) -> Completed:
        assert argv[1:3] == ("-n", "--")
        return Completed(argv, unshare if "--mount" in argv else plain)

    assert refusal(FakeRunner(answer)) == expected


@pytest.mark.parametrize("missing", ["sudo", "unshare"])
def test_sudo_refusal_names_the_missing_program(missing: str):
    found = refusal(FakeRunner({}), lambda name: None if name == missing else f"/usr/bin/{name}")
    assert found == f"there is no {missing} on this machine"


@as_root
def test_caller_is_the_user_of_sudo():
    assert caller({"SUDO_UID": "1000"}) == 1000
    assert caller({"SUDO_UID": "nobody"}) == caller({}) == 0


@as_root
def test_files_are_written_with_the_rights_of_the_caller(tmp_path: Path):
    tmp_path.chmod(0o755)
    own = tmp_path / "own"
    own.mkdir()
    os.chown(own, NOBODY, NOBODY)
    for folder in tmp_path.parents:  # only the owner may enter pytest's folders
        if folder.stat().st_uid == 0 and any(part.startswith("pytest-") for part in folder.parts):
            folder.chmod(0o755)
    as_caller(lambda: (own / "page").touch(), {"SUDO_UID": str(NOBODY)})
    assert (own / "page").stat().st_uid == NOBODY
    with pytest.raises(DalsegnoError, match="Permission denied"):
        as_caller(lambda: (tmp_path / "page").touch(), {"SUDO_UID": str(NOBODY)})
