"""Tests of the packages that the applier installs: which file root accepts."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dalsegno.setup.machine_packages import paths_to_install, refuse_untrusted
from dalsegno.setup.machine_record import Refused

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to own files of root")
NOBODY = 65534


@pytest.fixture
def package() -> Iterator[Path]:
    """A file in a folder that only root can change. /tmp is open to all users."""
    with tempfile.TemporaryDirectory(dir="/root") as folder:
        path = Path(folder) / "packages/made-up.deb"
        path.parent.mkdir()
        path.touch(0o644)
        yield path


def test_file_that_only_root_can_change_is_accepted(package: Path):
    refuse_untrusted(str(package))
    link = package.parents[1] / "link.deb"
    link.symlink_to(package)
    refuse_untrusted(str(link))


def test_file_is_installed_from_the_path_that_was_checked(package: Path):
    link = package.parents[1] / "link.deb"
    link.symlink_to(package)
    assert paths_to_install(["munge", str(link)]) == ["munge", str(package)]
    package.parent.chmod(0o777)
    with pytest.raises(Refused):
        paths_to_install([str(link)])


def test_file_of_another_user_is_refused(package: Path):
    os.chown(package, NOBODY, NOBODY)
    with pytest.raises(Refused, match=f"users can change {package}, from which root would install"):
        refuse_untrusted(str(package))


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o775])
def test_file_in_a_folder_that_others_can_change_is_refused(package: Path, mode: int):
    package.parent.chmod(mode)
    with pytest.raises(Refused, match=f"users can change {package.parent}"):
        refuse_untrusted(str(package))


def test_link_to_a_file_of_another_user_is_refused(package: Path):
    other = package.with_name("other.deb")
    other.touch()
    os.chown(other, NOBODY, NOBODY)
    package.unlink()
    package.symlink_to(other)
    with pytest.raises(Refused, match=f"users can change {other}"):
        refuse_untrusted(str(package))


def test_missing_file_is_refused_with_a_hint(package: Path):
    package.unlink()
    with pytest.raises(Refused, match="cannot be read: No such file") as refused:
        refuse_untrusted(str(package))
    assert f"copy the file to {package}" in refused.value.hint
