"""Tests of keeping recently passed checks for the next job."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dalsegno.health import Finding, Remedy, failed, passed, unknown
from dalsegno.health.cache import cache_file, keep, read_kept

NOW = 1_700_000_000.0
GOOD = Finding("disk", passed("room"), NOW - 10)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kept" / "gpu-1.json"


def test_only_passed_checks_are_kept_and_only_for_a_minute(path: Path) -> None:
    bad, odd = Finding("xid", failed("79", Remedy.REBOOT), NOW), Finding("clock", unknown("?"), NOW)
    old = Finding("munge", passed("well"), NOW - 61)
    keep(path, "gpu-1", [GOOD, bad, odd, old, Finding("inodes", passed("of the future"), NOW + 5)])
    assert read_kept(path, NOW) == {"disk": GOOD}
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700


def test_a_folder_writable_by_others_is_not_trusted(path: Path) -> None:
    keep(path, "gpu-1", [GOOD])
    path.parent.chmod(0o777)
    assert read_kept(path, NOW) == {}
    keep(path, "gpu-1", [Finding("munge", passed("well"), NOW)])
    path.parent.chmod(0o700)
    assert list(read_kept(path, NOW)) == ["disk"]


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder away")
def test_a_folder_of_another_user_is_not_trusted(path: Path) -> None:
    keep(path, "gpu-1", [GOOD])
    os.chown(path.parent, 65534, 65534)
    assert read_kept(path, NOW) == {}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"node": 1, "boot": "", "findings": [], "gpus": []}', "\x00"])
def test_a_damaged_file_is_ignored(path: Path, text: str) -> None:
    path.parent.mkdir(mode=0o700)
    path.write_text(text)
    assert read_kept(path, NOW) == {}


def test_each_node_has_its_own_file() -> None:
    one, two = {"SLURM_CONF": "/a/slurm.conf"}, {"SLURM_CONF": "/b/slurm.conf"}
    assert len({cache_file("gpu-1", one), cache_file("gpu-1", two), cache_file("gpu-2", one)}) == 3
    simulated = cache_file("gpu-1", {**one, "DALSEGNO_TELEMETRY": "/state/hosts/gpu-1/telemetry.json"})
    assert simulated.parent == Path("/state/hosts/gpu-1/health")


def test_folder_that_cannot_be_created_is_not_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    keep(tmp_path / "file" / "gpu-1.json", "gpu-1", [GOOD])
    assert read_kept(tmp_path / "file" / "gpu-1.json", NOW) == {}
