"""`monitor config` and `dashboards export`, run through sudo, write with the caller's rights."""

from __future__ import annotations

import os
import pwd
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dalsegno.cli.measure.monitor import config, write_private
from dalsegno.errors import DalsegnoError
from dalsegno.system.execute import as_caller

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of the user who called sudo."""
    nobody = pwd.getpwnam("nobody")
    monkeypatch.setenv("SUDO_UID", str(nobody.pw_uid))
    folder = Path(tempfile.mkdtemp(prefix="dalsegno-caller-"))
    os.chown(folder, nobody.pw_uid, nobody.pw_gid)
    yield folder
    shutil.rmtree(folder)


def test_files_belong_to_the_caller(own: Path):
    write_private(own / "config", {"secrets/password": "secret"})
    about = (own / "config/secrets/password").stat()
    assert about.st_uid == pwd.getpwnam("nobody").pw_uid and about.st_mode & 0o777 == 0o600


def test_root_does_not_follow_a_link_to_a_folder_that_the_caller_may_not_change(own: Path, tmp_path: Path):
    tmp_path.chmod(0o755)
    (own / "config").symlink_to(tmp_path)
    with pytest.raises(DalsegnoError):
        write_private(own / "config", {"prometheus.yml": "text"})
    assert list(tmp_path.iterdir()) == []


def test_config_refuses_other_users_before_it_writes(own: Path, monkeypatch: pytest.MonkeyPatch):
    cluster = own.parent / f"{own.name}-home/clusters/one"
    cluster.mkdir(parents=True)
    (cluster / "state.json").write_text("{}")
    monkeypatch.setenv("DALSEGNO_HOME", str(cluster.parents[1]))
    try:
        with pytest.raises(DalsegnoError, match="cluster one belongs to"):
            as_caller(lambda: config.main([str(own / "config")], standalone_mode=False))
    finally:
        shutil.rmtree(cluster.parents[1])
    assert list(own.iterdir()) == []
