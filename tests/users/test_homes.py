"""Home folders and keys, which root creates where users may interfere."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from dalsegno.errors import DalsegnoError
from dalsegno.users.homes import FIRST_LINE, LAST_LINE, check_home, install_keys, make_home, remove_home, with_keys

KEY, OTHER = "ssh-ed25519 AAAAC3 bea@laptop", "ssh-ed25519 BBBBC3 own"
UID = 20001 if os.geteuid() == 0 else os.geteuid()
GID = 20001 if os.geteuid() == 0 else os.getegid()


@pytest.fixture
def homes(tmp_path: Path) -> Path:
    make_home(tmp_path, "bea", UID, GID)
    return tmp_path


def about(path: Path) -> tuple[int, int, int]:
    found = path.lstat()
    return found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)


def test_home_belongs_to_its_user_alone(tmp_path: Path):
    before = os.umask(0o077)
    try:
        assert make_home(tmp_path, "bea", UID, GID)
    finally:
        os.umask(before)
    assert about(tmp_path / "bea") == (UID, GID, 0o700)
    assert not make_home(tmp_path, "bea", UID, GID)
    assert [path.name for path in tmp_path.iterdir()] == ["bea"]


def test_existing_home_is_not_changed(homes: Path):
    (homes / "bea").chmod(0o750)
    assert not make_home(homes, "bea", UID, GID)
    assert about(homes / "bea")[2] == 0o750


def test_link_in_place_of_a_home_is_not_followed(tmp_path: Path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "bea").symlink_to("elsewhere")
    assert not make_home(tmp_path, "bea", UID, GID)
    with pytest.raises(DalsegnoError, match="SSH keys of bea cannot be installed"):
        install_keys(tmp_path, "bea", UID, GID, [KEY])
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_keys_are_installed_for_sshd(homes: Path):
    assert install_keys(homes, "bea", UID, GID, [KEY])
    file = homes / "bea/.ssh/authorized_keys"
    assert file.read_text() == f"{FIRST_LINE}\n{KEY}\n{LAST_LINE}\n"
    assert about(file) == (UID, GID, 0o600) and about(file.parent) == (UID, GID, 0o700)
    assert not install_keys(homes, "bea", UID, GID, [KEY])
    assert [path.name for path in file.parent.iterdir()] == ["authorized_keys"]


def test_without_keys_nothing_is_created(homes: Path):
    assert not install_keys(homes, "bea", UID, GID, [])
    assert list((homes / "bea").iterdir()) == []


def test_lines_of_the_user_are_kept(homes: Path):
    install_keys(homes, "bea", UID, GID, [KEY])
    file = homes / "bea/.ssh/authorized_keys"
    file.write_text(f"# mine\n{file.read_text()}{OTHER}")
    assert install_keys(homes, "bea", UID, GID, [])
    assert file.read_text() == f"# mine\n{OTHER}\n"


@pytest.mark.parametrize(
    ("text", "keys", "expected"),
    [
        ("", [], ""),
        ("own", [], "own"),
        ("own\n", [KEY], f"{FIRST_LINE}\n{KEY}\n{LAST_LINE}\nown\n"),
        (f"{FIRST_LINE}\nold\n{LAST_LINE}\nown\n", [KEY], f"{FIRST_LINE}\n{KEY}\n{LAST_LINE}\nown\n"),
        # The user has removed the last line.
        (f"{FIRST_LINE}\nown\n", [KEY], f"{FIRST_LINE}\n{KEY}\n{LAST_LINE}\nown\n"),
        (f"a\u2028{FIRST_LINE}\n", [], f"a\u2028{FIRST_LINE}\n"),  # sshd does not treat this character as a line break
    ],
)
def test_part_of_the_cluster_is_replaced(text: str, keys: list[str], expected: str):
    assert with_keys(text, keys) == expected
    assert with_keys(expected, keys) == expected


def test_links_that_a_user_leaves_are_not_followed(homes: Path, tmp_path: Path):
    secret = tmp_path / "secret"
    secret.write_text("root's\n")
    (homes / "bea/.ssh").symlink_to(tmp_path)
    with pytest.raises(DalsegnoError, match="cannot be installed") as refused:
        install_keys(homes, "bea", UID, GID, [KEY])
    assert refused.value.hint and not (tmp_path / "authorized_keys").exists()
    (homes / "bea/.ssh").unlink()
    install_keys(homes, "bea", UID, GID, [KEY])
    (homes / "bea/.ssh/authorized_keys").unlink()
    (homes / "bea/.ssh/authorized_keys").symlink_to(secret)
    with pytest.raises(DalsegnoError, match="cannot be installed"):
        install_keys(homes, "bea", UID, GID, [KEY])
    assert secret.read_text() == "root's\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root creates files of others")
def test_files_of_others_are_refused(homes: Path):
    install_keys(homes, "bea", UID, GID, [KEY])
    os.chown(homes / "bea/.ssh/authorized_keys", 0, 0)
    with pytest.raises(DalsegnoError, match="cannot be installed"):
        install_keys(homes, "bea", UID, GID, [OTHER])
    os.chown(homes / "bea", UID + 1, GID)
    with pytest.raises(DalsegnoError, match="cannot be installed"):
        install_keys(homes, "bea", UID, GID, [OTHER])


def test_pipe_in_place_of_keys_does_not_block(homes: Path):
    (homes / "bea/.ssh").mkdir(mode=0o700)
    os.chown(homes / "bea/.ssh", UID, GID)
    os.mkfifo(homes / "bea/.ssh/authorized_keys")
    os.chown(homes / "bea/.ssh/authorized_keys", UID, GID)
    with pytest.raises(DalsegnoError, match="cannot be installed"):
        install_keys(homes, "bea", UID, GID, [KEY])


def test_home_of_somebody_else_is_not_deleted(homes: Path):
    check_home(homes / "absent", UID)
    check_home(homes / "bea", UID)
    for uid in (UID + 1, None):
        with pytest.raises(DalsegnoError, match="belongs to uid"):
            check_home(homes / "bea", uid)
    with pytest.raises(DalsegnoError, match="belongs to uid"):
        remove_home(homes / "bea", UID + 1)
    assert (homes / "bea").is_dir()


def test_home_is_deleted_without_following_links(homes: Path, tmp_path_factory: pytest.TempPathFactory):
    others = tmp_path_factory.mktemp("others")
    (others / "kept").touch()
    (homes / "bea/deep").mkdir()
    for link in ("bea/folder", "bea/deep/folder"):
        (homes / link).symlink_to(others)
    (homes / "bea/file").symlink_to(others / "kept")
    homes.chmod(0o755)
    remove_home(homes / "bea", UID)
    assert not (homes / "bea").exists() and (others / "kept").exists()
    remove_home(homes / "bea", UID)  # removing a missing home is not an error


def test_link_in_place_of_a_home_is_not_deleted_through(homes: Path):
    homes.chmod(0o755)
    (homes / "ada").symlink_to("bea")
    with pytest.raises(DalsegnoError):
        remove_home(homes / "ada", UID + 1)
    os.lchown(homes / "ada", UID, GID)
    with pytest.raises(DalsegnoError, match="cannot be deleted"):
        remove_home(homes / "ada", UID)
    assert (homes / "bea").is_dir()


def test_nothing_is_deleted_where_users_can_replace_a_home(homes: Path):
    homes.chmod(0o1777)
    with pytest.raises(DalsegnoError, match="writable by users"):
        remove_home(homes / "bea", UID)
    assert (homes / "bea").is_dir()
