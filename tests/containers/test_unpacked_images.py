"""Sweeping images that jobs unpacked."""

import fcntl
import os
from pathlib import Path

from dalsegno.cluster import unpacked_homes
from dalsegno.containers.named import sweep_unpacked, unpacked_key


def unpacked(folder: Path, image: Path) -> Path:
    """Create an unpacked image as `native/unpack.c` does."""
    made = folder / unpacked_key(image)
    (made / "shut").mkdir(parents=True)
    (made / "file").write_bytes(b"x" * 5000)
    (made / "shut").chmod(0o500)
    (folder / f"{made.name}.image").write_text(str(image))
    (folder / "lock").touch()
    return made


def new_image(path: Path, text: str = "image") -> Path:
    path.write_text(text)
    return path


def test_sweep_removes_unused_unpacked_images_without_an_image_file(tmp_path: Path):
    folder = tmp_path / "unpacked"
    kept = unpacked(folder, new_image(tmp_path / "kept.sqsh"))
    gone, written_over = new_image(tmp_path / "gone.sqsh"), new_image(tmp_path / "over.sqsh")
    stale = [unpacked(folder, gone), unpacked(folder, written_over)]
    used = unpacked(folder, new_image(tmp_path / "used.sqsh"))
    for path in (gone, tmp_path / "used.sqsh"):
        path.unlink()
    new_image(written_over, "another image")
    cut_short = folder / f"{kept.name}.part"
    cut_short.mkdir()
    with open(folder / f"{used.name}.image") as step:
        fcntl.flock(step, fcntl.LOCK_SH)
        swept = sweep_unpacked(folder)
        assert (swept.files, swept.size >= 10_000) == (3, True)
        assert not any(path.exists() or (folder / f"{path.name}.image").exists() for path in [*stale, cut_short])
        assert kept.exists() and used.exists()
        assert sweep_unpacked(folder).files == 0
    assert sweep_unpacked(folder).files == 1 and not used.exists() and kept.exists()


def test_sweep_removes_nothing_while_an_image_is_unpacked(tmp_path: Path):
    folder = tmp_path / "unpacked"
    stale = unpacked(folder, new_image(tmp_path / "gone.sqsh"))
    (tmp_path / "gone.sqsh").unlink()
    with open(folder / "lock") as another:
        fcntl.flock(another, fcntl.LOCK_EX)
        assert sweep_unpacked(folder).files == 0 and stale.exists()


def test_unpacked_images_of_this_user_are_found_in_every_cluster(tmp_path: Path):
    own = tmp_path / "clusters/lab/unpacked" / str(os.geteuid())
    own.mkdir(parents=True)
    (own.parent / "12345").mkdir()
    assert [path for path in unpacked_homes({"DALSEGNO_HOME": str(tmp_path)}) if tmp_path in path.parents] == [own]
