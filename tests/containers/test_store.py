"""The image store: lookups, removal and sweeping."""

import os
from pathlib import Path

import pytest

from dalsegno.containers.image_metadata import ImageRecord
from dalsegno.containers.store import ImageStore, Stored
from dalsegno.errors import DalsegnoError, NotThere, UsageError

A, B = ("sha256:" + letter * 64 for letter in "ab")
UBUNTU = "docker://registry-1.docker.io#library/ubuntu:24.04"


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    made = ImageStore(tmp_path / "own", clock=lambda: 100.0)
    with made.in_use():
        return made


def keep(store: ImageStore, digest: str, name: str = "", layers: tuple[str, ...] = (), imported: float = 1.0) -> Stored:
    store.image(digest, "lz4").write_bytes(b"image")
    stored = store.put(ImageRecord(digest, "lz4", 5, "", imported, layers=layers))
    if name:
        store.name(name, "amd64", stored.record)
    return stored


def test_an_image_is_found_by_its_name_its_digest_and_its_path(store: ImageStore):
    kept = keep(store, A, UBUNTU)
    for text in ("ubuntu:24.04", UBUNTU, "docker.io#ubuntu:24.04", "aaaaaa", "a", "sha256:aa", A, str(kept.path)):
        assert store.find(text).record.digest == A
    with pytest.raises(NotThere) as caught:
        store.find("docker://registry-1.docker.io#library/ubuntu:24.40")
    assert UBUNTU in caught.value.hint


def test_ambiguous_digest_prefix_is_refused(store: ImageStore):
    keep(store, "sha256:" + "a" * 63 + "b")
    keep(store, A)
    with pytest.raises(UsageError, match="2 images"):
        store.find("aaaaaa")
    named = keep(store, B, "docker://registry-1.docker.io#library/aaaa:latest")
    assert store.find("aaaa").record == named.record, "a name takes precedence over a digest"


def test_file_without_a_valid_record_or_with_another_size_is_not_an_image(store: ImageStore):
    kept = keep(store, A)
    assert store.get(A, "lz4") and store.get(A, "zstd") is None and store.get(B, "lz4") is None
    kept.path.write_bytes(b"imag")
    assert store.get(A, "lz4") is None
    for text in ("{", "[" * 5000):
        kept.path.with_suffix(".json").write_text(text)
        assert store.all() == []


def test_lookup_ignores_tags_older_than_requested(store: ImageStore):
    keep(store, A, UBUNTU)
    assert store.lookup(UBUNTU, "amd64", "lz4", since=100.0)
    assert store.lookup(UBUNTU, "amd64", "lz4", since=101.0) is None
    assert store.lookup(UBUNTU, "arm64", "lz4", since=0.0) is None
    assert store.lookup(UBUNTU, "amd64", "zstd", since=0.0) is None


def test_sweep_keeps_named_images_and_their_layers(store: ImageStore):
    keep(store, A, UBUNTU, layers=(A,))
    keep(store, B, UBUNTU, layers=(A, B))  # the tag has moved
    keep(store, A, "")
    for name in ("a" * 64, "b" * 64, "c" * 64, f"{'d' * 64}.part"):
        store.blob(f"sha256:{name}").write_bytes(b"layer")
    assert store.sweep().files == 2 + 2
    assert [each.record.digest for each in store.all()] == [B]
    assert sorted(path.name[0] for path in (store.folder / "blobs").iterdir()) == ["a", "b"]
    assert store.sweep(layers=True).files == 2


def test_remove_also_removes_the_names(store: ImageStore):
    store.remove(keep(store, A, UBUNTU))
    assert store.all() == [] and list((store.folder / "tags").iterdir()) == []
    store.remove(keep(store, A))


def test_nothing_is_swept_while_an_image_is_imported(store: ImageStore):
    with store.in_use(), pytest.raises(DalsegnoError, match="being imported"):
        store.sweep()
    assert store.sweep().files == 0


def test_output_file_is_recorded_if_the_store_is_writable(tmp_path: Path, store: ImageStore):
    path = tmp_path / "x.sqsh"
    store.record_file(path, UBUNTU, "ab")
    assert store.find_name_of("ab") == UBUNTU
    (tmp_path / "file").touch()
    nowhere = ImageStore(tmp_path / "file/store")
    nowhere.record_file(path, UBUNTU, "ab")
    assert nowhere.written(path) is None


def test_images_of_root_are_used_and_those_of_other_users_are_not(tmp_path: Path):
    theirs = ImageStore(tmp_path / "shared", clock=lambda: 100.0)
    with theirs.in_use():
        kept = keep(theirs, A, UBUNTU)
    (tmp_path / "shared/images").chmod(0o755)
    if kept.path.stat().st_uid == 0:
        mine = ImageStore(tmp_path / "mine", tmp_path / "shared")
        assert mine.get(A, "lz4") and mine.lookup(UBUNTU, "amd64", "lz4", since=0.0) and mine.find("ubuntu:24.04")
        with pytest.raises(UsageError, match="belongs to root"):
            mine.remove(mine.find(A))
        with mine.in_use():
            keep(mine, B)
        assert mine.sweep().files == 2 and kept.path.exists()
        os.chown(tmp_path / "shared/images", 1234, 1234)
    assert ImageStore(tmp_path / "mine", tmp_path / "shared").get(A, "lz4") is None
    if os.geteuid() == 0:
        os.chown(tmp_path / "shared/images", 0, 0)
    (tmp_path / "shared/images").chmod(0o777)
    assert ImageStore(tmp_path / "mine", tmp_path / "shared").get(A, "lz4") is None
